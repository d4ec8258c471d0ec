"""Compares losses, rewards and gradients of pairs of answers with TRL's DPOTrainer and CPOTrainer.

It runs in an environment with vlm, its `test` extra and trl (see trl.sh), and writes TRL's values to the fixture that
tests/tasks/preferences/test_train.py compares ours with.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

import preference_steps as steps
from image_text import MODELS


def compute_with_trl(start: Path, reference: Path, case: str, folder: Path) -> dict[str, Any]:
    """Mean loss, mean rewards and gradients of a case by TRL."""
    import transformers as t
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    options = steps.CASES[case]
    kind: Any = t.SmolVLMForConditionalGeneration if steps.has_images(case) else t.AutoModelForCausalLM
    model, ref_model = (kind.from_pretrained(place, attn_implementation="eager") for place in (start, reference))
    if steps.has_images(case):
        torch.manual_seed(55)
        _, processor = MODELS["smolvlm"]()  # on Pillow's resizing, as ours
        processor.chat_template = steps.IMAGE_TEMPLATE
    else:
        processor = t.AutoTokenizer.from_pretrained(start)
        processor.pad_token = processor.eos_token
    rows = steps.to_rows(steps.make_records(case))
    common = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": len(rows),
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "beta": options["beta"],
    }
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": processor}
    if options["loss"] == "simpo":
        smoothing = options.get("label_smoothing", 0.0)
        simpo = {"loss_type": "simpo", "simpo_gamma": options["gamma"], "max_length": 512}
        simpo["cpo_alpha"] = options.get("cross_entropy", 0.0)
        trainer: Any = CPOTrainer(model=model, args=CPOConfig(**common, **simpo, label_smoothing=smoothing), **data)
    else:
        losses = {"sigmoid" if options["loss"] == "dpo" else "ipo": 1.0, "sft": options.get("cross_entropy", 0.0)}
        losses = {name: weight for name, weight in losses.items() if weight}
        config = DPOConfig(**common, loss_type=[*losses], loss_weights=[*losses.values()], max_length=None)
        trainer = DPOTrainer(model=model, ref_model=ref_model, args=config, **data)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = getattr(trainer, "_stored_metrics", None) or trainer._metrics
    rewards = [metrics["train"][f"rewards/{name}"][0] for name in ("chosen", "rejected")]
    gradients = steps.read_gradients(trainer.model, start, folder / "gradients")
    return {"loss": loss.item(), "rewards": rewards, "gradients": gradients}


def main() -> None:
    import trl

    print(f"trl {trl.__version__}, torch {torch.__version__}: pairs of answers of random models, padded by TRL")
    fixture = {}
    for case in steps.CASES:
        with tempfile.TemporaryDirectory() as place:
            start, reference = steps.save_models(Path(place), case)
            theirs = compute_with_trl(start, reference, case, Path(place))
            task = steps.build_task(start, reference, case)
            ours = steps.compute(task, steps.make_records(case))
        theirs["gradients"] = short = steps.summarise(theirs["gradients"])
        differences = [
            abs(value - other) / max(1.0, short[name][0])
            for name, values in ours["gradients"].items()
            for value, other in zip(values, short[name], strict=True)
        ]
        apart = max(abs(value - other) for value, other in zip(ours["rewards"], theirs["rewards"], strict=True))
        print(
            f"{case:<24} loss {ours['loss']:.6f} and {theirs['loss']:.6f}; rewards differ by at most {apart:.1e}, "
            f"gradients of {len(short)} tensors by {max(differences):.1e}"
        )
        fixture[case] = theirs
    path = ROOT / "tests" / "checkpoint" / "files" / "trl_preferences.json"
    path.write_text(json.dumps(fixture, indent=0) + "\n")


if __name__ == "__main__":
    main()
