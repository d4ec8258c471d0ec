"""Exact match of a half-trained captioner of drawn scenes before and after training on pairs of captions.

    python benchmarks/preferences.py FOLDER

A captioner is trained for 600 steps, which is too few. Further runs start from it and take 300 steps each, with the
same learning rate: on pairs (a right caption, and one that one word makes wrong), and on captions as before. The table
has the exact match of each on the same 1,000 scenes of the test split. It takes about ten minutes on two CPU cores.
"""

import sys
from pathlib import Path

import numpy as np

from vlm import load
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.evaluation.metrics.bootstrap import LEVEL, compute_differences, mean_scorer
from vlm.training.run.build import build_data

START, MORE, RATE = 600, 300, 1e-4
COMMON = ["trainer=cpu", "callbacks.progress=null", "test=false"]
RUNS = {  # options of the runs after the first, by name
    "dpo": ["task=preferences"],
    "dpo_beta1": ["task=preferences", "task.beta=1"],
    "dpo_beta1_ce10": ["task=preferences", "task.beta=1", "task.cross_entropy=10"],
    "simpo": ["task=preferences", "task.loss=simpo"],
    "simpo_ce10": ["task=preferences", "task.loss=simpo", "task.cross_entropy=10"],
    "captions": ["task=captioning"],
}


def train(folder: Path, name: str, *options: str) -> Path:
    """Trains a model, unless the folder has it; returns its checkpoint."""
    if not (found := sorted((folder / name).glob("*/checkpoints/best.ckpt"))):
        assert vlm(["train", *COMMON, f"runs={folder}", f"name={name}", *options]) == 0
        found = sorted((folder / name).glob("*/checkpoints/best.ckpt"))
    return found[-1]


def find_exact_matches(checkpoint: Path) -> np.ndarray:
    """1 for each scene of the test split whose caption is one of the right ones. Shapes: -> (N, 1)"""
    records = list(build_data(compose(["task=captioning", "data.num_workers=0"])).split("test").records())
    model = load(checkpoint, device="cpu", precision="fp32")
    captions = model.caption([record.image() for record in records])
    right = [caption.text in record["references"] for caption, record in zip(captions, records, strict=True)]
    return np.array(right, np.float64)[:, None]


def main(folder: Path) -> None:
    steps = [f"trainer.max_steps={START}", f"schedule_steps={START}", f"trainer.val_check_interval={START}"]
    start = train(folder, "start", "task=captioning", *steps)
    more = [f"model.init_from={start}", "tokenizer=pretrained", f"tokenizer.path={start}", "optim=adamw"]
    more += [f"optim.lr={RATE}", f"trainer.max_steps={MORE}", f"schedule_steps={MORE}"]
    more += [f"trainer.val_check_interval={MORE}"]
    checkpoints = {name: train(folder, name, *options, *more) for name, options in RUNS.items()}
    before = find_exact_matches(start)
    print(f"{'start':<16} exact match {before.mean():.3f}")
    for name, checkpoint in checkpoints.items():
        right = find_exact_matches(checkpoint)
        (gain,) = compute_differences(mean_scorer(before), mean_scorer(right), len(right), seed=0)
        interval = f"{LEVEL:.0%}: {gain.low:+.3f} to {gain.high:+.3f}"
        print(f"{name:<16} exact match {right.mean():.3f}, difference {gain.value:+.3f} ({interval})", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
