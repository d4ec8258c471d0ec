"""Compares twenty steps of SGD on a small random SmolVLM with TRL's SFTTrainer.

It runs in an environment with vlm, its `test` extra and trl (see trl.sh), and writes the weights at the end of TRL's
training, in short, to the fixture that tests/tasks/shared/test_prompted_training.py compares ours with.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

import prompted_steps as steps


def train_with_trl(folder: Path, records: list[Any]) -> None:
    """Trains the folder's model on the records in order, and writes it to the folder."""
    import transformers as t
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    model = t.SmolVLMForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    processor = steps.load_processor(folder)
    rows = [{"messages": steps.to_messages(record), "images": record.images()} for record in records]
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out,
            per_device_train_batch_size=steps.BATCH,
            num_train_epochs=1,
            learning_rate=steps.RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            weight_decay=0,
            assistant_only_loss=True,
            packing=False,
            max_length=None,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = InOrder(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=processor)
        trainer.train()
    model.save_pretrained(folder)


def main() -> None:
    import trl

    with tempfile.TemporaryDirectory() as place:
        folder, theirs = Path(place) / "start", Path(place) / "theirs"
        for each in (folder, theirs):
            steps.save_start(each)
        records = steps.make_records()
        ours = steps.train(folder, records)
        train_with_trl(theirs, records)
        start, ended = steps.read_weights(folder), steps.read_weights(theirs)
    differences = {name: (ours[name] - ended[name]).abs().max().item() for name in ended}
    moved = {name: (start[name] - ended[name]).abs().max().item() for name in ended}
    worst = max(differences, key=lambda name: differences[name])
    print(f"trl {trl.__version__}, torch {torch.__version__}: {len(records) // steps.BATCH} steps of SGD")
    print(f"largest change of a weight {max(moved.values()):.3g}; tensors that moved {sum(map(bool, moved.values()))}")
    print(f"largest difference {differences[worst]:.3g} ({worst}) of {len(ended)} tensors")
    path = ROOT / "tests" / "checkpoint" / "files" / "trl.json"
    path.write_text(json.dumps(steps.summarise(ended), indent=0) + "\n")


if __name__ == "__main__":
    main()
