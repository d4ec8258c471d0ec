"""Compares advantages, losses and gradients of training on rewards with TRL's GRPOTrainer and RLOOTrainer.

The texts and their rewards are fixed. It runs in an environment with vlm, its `test` extra and trl (see
trl_rewards.sh), and writes TRL's values to the fixture that tests/tasks/shared/test_policy_gradient.py compares ours
with.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

import preference_steps
import reward_steps as steps
from image_text import MODELS


def compute_with_trl(start: Path, reference: Path, case: str, folder: Path, loss_type: str) -> dict[str, Any]:
    """Advantages, loss and gradients of a case by TRL.

    Args:
        loss_type: That of GRPO.
    """
    import transformers as t
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    baseline, beta = steps.CASES[case]
    model, ref_model = (
        t.SmolVLMForConditionalGeneration.from_pretrained(place, attn_implementation="eager")
        for place in (start, reference)
    )
    torch.manual_seed(55)
    _, processor = MODELS["smolvlm"]()  # on Pillow's resizing, as ours
    processor.chat_template = preference_steps.IMAGE_TEMPLATE
    texts = [text for row in steps.draw_texts(processor.tokenizer.eos_token_id) for text in row]
    rewards = steps.draw_rewards().flatten().tolist()

    class FixedTexts:
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            assert len(prompt_ids) == len(texts)
            return (texts, None) if baseline == "group" else texts

    records = [record for record in steps.make_records() for _ in range(steps.SAMPLES)]
    rows = [
        {"prompt": [{"role": "user", "content": record["questions"][0].text}], "images": record.images()}
        for record in records
    ]
    common = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": len(rows),
        "num_generations": steps.SAMPLES,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "beta": beta,
        "max_completion_length": 16,
    }
    trainers = {"group": (GRPOTrainer, GRPOConfig), "leave_one_out": (RLOOTrainer, RLOOConfig)}
    kind, config = trainers[baseline]
    if baseline == "group":
        common |= {"loss_type": loss_type, "epsilon_high": 5.0, "scale_rewards": "group"}
    trainer: Any = type("FixedTrainer", (FixedTexts, kind), {})(
        model=model,
        args=config(**common),
        reward_funcs=lambda prompts, completions, **others: rewards,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )
    if beta:
        trainer.ref_model.load_state_dict(ref_model.state_dict())  # by default, the model at the start
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(rows)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = preference_steps.read_gradients(trainer.model, start, folder / f"gradients {loss_type}")
    return {"advantages": inputs["advantages"].tolist(), "loss": loss.item(), "gradients": gradients}


def differ(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of gradients, relative to the norms of those above 1."""
    return max(
        abs(value - other) / max(1.0, theirs[name][0])
        for name, values in ours.items()
        for value, other in zip(values, theirs[name], strict=True)
    )


def main() -> None:
    import trl

    print(f"trl {trl.__version__}, torch {torch.__version__}: rewards of fixed texts of a random SmolVLM")
    print("trl losses are compared for cispo; those of dapo and RLOO have other values and the same gradients")
    fixture = {}
    for case in steps.CASES:
        kinds = ["cispo", "dapo"] if case.startswith("group") else ["reinforce"]
        for kind in kinds:
            with tempfile.TemporaryDirectory() as place:
                start, reference = preference_steps.save_models(Path(place), "images dpo")
                theirs = compute_with_trl(start, reference, case, Path(place), kind)
                ours = steps.compute(steps.build_task(start, reference, case))
            theirs["gradients"] = short = steps.summarise(theirs["gradients"])
            pairs = zip(ours["advantages"], theirs["advantages"], strict=True)
            apart = max(abs(value - other) for value, other in pairs)
            name = f"{case} ({'GRPO, ' + kind if case.startswith('group') else 'RLOO'})"
            values = f"; loss {ours['loss']:.6f} and {theirs['loss']:.6f}" if kind == "cispo" else ""
            print(
                f"{name:<24} advantages differ by at most {apart:.1e}, gradients of {len(short)} tensors by "
                f"{differ(ours['gradients'], short):.1e}{values}"
            )
            fixture[name] = theirs
    path = ROOT / "tests" / "checkpoint" / "files" / "trl_rewards.json"
    path.write_text(json.dumps(fixture, indent=0) + "\n")


if __name__ == "__main__":
    main()
