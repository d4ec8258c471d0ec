"""Fine-tuning beside TRL and peft: images per second and peak memory on a random model of SmolVLM-256M's size.

python benchmarks/fine_tune.py [--steps 4] [--rounds 2] [--precision fp32 bf16]

It needs trl and peft besides the `test` extra. Both sides adapt the decoder's attention by LoRA of rank 8 and train
four images per step, each with one conversation, or with five conversations about it, which ours packs into one row
and trains with activation_checkpointing=true. Runs alternate; each is a process of its own.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]
BATCH, SIDE = 4, 512
WORDS = ["man", "red", "shirt", "rock", "two", "dogs", "watch", "grass", "runs", "over", "blue", "small", "a", "the"]


def save_model(folder: Path) -> None:
    """Writes a random SmolVLM with the sizes of SmolVLM-256M-Instruct and a small tokenizer.

    Most of the 49,280 rows of its embedding are used by no text.
    """
    import image_text
    import torch
    import transformers as t

    torch.manual_seed(0)
    _, processor = image_text.MODELS["smolvlm"]()
    tokenizer = processor.tokenizer
    tokenizer.add_tokens([f"<unused{n}>" for n in range(49_280 - len(tokenizer))])
    text = t.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    vision |= {"image_size": SIDE, "patch_size": 16}
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    config = t.SmolVLMConfig(
        vision_config=vision, text_config=text, scale_factor=4, image_token_id=image_id, tie_word_embeddings=True
    )
    processor.image_processor.size = {"longest_edge": SIDE}
    processor.image_processor.max_image_size = {"longest_edge": SIDE}
    processor.image_seq_len = (SIDE // 16 // 4) ** 2
    processor.save_pretrained(folder)
    t.SmolVLMForConditionalGeneration(config).save_pretrained(folder)


def save_data(folder: Path, images: int, conversations: int) -> None:
    import numpy as np
    from PIL import Image

    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = []
    for number in range(images):
        pixels = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
        for _ in range(conversations):
            answer = " ".join(rng.permutation(WORDS)[:14])
            turns = {"user": "Describe this image.", "assistant": answer}
            rows.append({"image": f"{number}.png", "texts": [turns], "split": "train"})
    rows.append({"texts": [{"user": "Say no.", "assistant": "no"}], "split": "val"})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_ours(model: str, data: Path, steps: int, precision: str, *, recompute: bool) -> float:
    """Trains with vlm; returns seconds per step, without the first.

    Args:
        recompute: Whether to keep only the input of each block, and compute the rest again in the backward pass.
    """
    from vlm.training.callbacks import progress
    from vlm.training.run.fit import main

    ends: list[float] = []
    original = progress.Progress.on_train_batch_end

    def on_train_batch_end(self: Any, *args: Any, **kwargs: Any) -> None:
        ends.append(time.perf_counter())
        original(self, *args, **kwargs)

    progress.Progress.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    words = ["model=pretrained", f"model.path={model}", "task=conversations", "data=conversations", "model/adapt=lora"]
    words += ["model.adapt.projections=[decoder.*.qkv,decoder.*.proj]", "task.freeze=[encoder]", "trainer=cpu"]
    words += [f"data.path={data / 'chats.jsonl'}", f"data.batch_size={BATCH}", "data.num_workers=0", "test=false"]
    words += [f"trainer.max_steps={steps + 1}", "trainer.limit_val_batches=0", f"runs={data / 'runs'}"]
    words += [f"trainer.precision={'bf16-mixed' if precision == 'bf16' else '32-true'}"]
    words += [f"activation_checkpointing={json.dumps(recompute)}"]
    assert main(words) == 0
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def run_theirs(model: str, data: Path, steps: int, precision: str) -> float:
    """Trains with TRL and peft, one conversation per row; returns seconds per step, without the first."""
    import transformers as t
    from datasets import Dataset
    from peft import LoraConfig
    from PIL import Image
    from trl import SFTConfig, SFTTrainer

    processor = t.AutoProcessor.from_pretrained(model)
    rows = []
    for line in (data / "chats.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"] == "train":
            (turn,) = row["texts"]
            question = [{"type": "image"}, {"type": "text", "text": turn["user"]}]
            prompt = [{"role": "user", "content": question}]
            completion = [{"role": "assistant", "content": [{"type": "text", "text": turn["assistant"]}]}]
            rows.append({"prompt": prompt, "completion": completion, "images": [Image.open(data / row["image"])]})
    ends: list[float] = []

    class Clock(t.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    config = SFTConfig(
        output_dir=str(data / "trl"),
        per_device_train_batch_size=BATCH,
        max_steps=steps + 1,
        learning_rate=2e-4,
        max_length=None,
        gradient_checkpointing=False,
        bf16=precision == "bf16",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    targets = r".*text_model.*\.(q_proj|k_proj|v_proj|o_proj)"
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=t.SmolVLMForConditionalGeneration.from_pretrained(model, dtype="float32"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        peft_config=lora,
        callbacks=[Clock()],
    )
    trainer.train()
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        options = (args.model, Path(args.data), args.steps, args.precision[0])
        seconds = run_ours(*options, recompute=args.recompute) if args.side == "ours" else run_theirs(*options)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak": peak}), file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        save_model(model)
        images = BATCH * (args.steps + 1)
        for conversations in (1, 5):
            save_data(Path(place) / f"data{conversations}", images, conversations)
        for precision in args.precision:
            for conversations in (1, 5):
                measured: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
                for _ in range(args.rounds):
                    for side, found in measured.items():
                        words = [
                            sys.executable,
                            __file__,
                            "--side",
                            side,
                            "--model",
                            str(model),
                            "--precision",
                            precision,
                        ]
                        words += ["--steps", str(args.steps), "--data", str(Path(place) / f"data{conversations}")]
                        words += ["--recompute"] if conversations > 1 else []
                        done = subprocess.run(
                            words, capture_output=True, text=True, env=os.environ | {"VLM_DEBUG": "1"}
                        )
                        if done.returncode:
                            sys.exit(done.stderr[-3000:])
                        found.append(json.loads(done.stderr.strip().splitlines()[-1]))
                seconds = {side: statistics.median(row["seconds"] for row in found) for side, found in measured.items()}
                peak = {side: statistics.median(row["peak"] for row in found) for side, found in measured.items()}
                # A step of ours has all conversations of its images; one of theirs has one conversation per image.
                rates = {"ours": BATCH * conversations / seconds["ours"], "theirs": BATCH / seconds["theirs"]}
                print(
                    f"{precision}, {conversations} per image: conversations/s {rates['ours']:.2f} and "
                    f"{rates['theirs']:.2f} ({rates['ours'] / rates['theirs']:.2f} times); peak {peak['ours']:,.0f}, "
                    f"{peak['theirs']:,.0f} MB ({peak['ours'] / peak['theirs']:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
