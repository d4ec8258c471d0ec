"""Compares losses of the same steps on CPU and GPU in float32 without dropout, plain and with compiled blocks.

    python benchmarks/gpu/same_losses.py --text FILE [--steps 30]

Each training runs in its own process. Exits with status 1 if a loss differs by more than 0.5% of its value.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from device import require_gpu

ROOT = Path(__file__).parents[2]
WORST = 5e-3
TASKS = {
    "captioning": ["data=shapes", "data.batch_size=16"],
    "classification": ["data=shapes_classes", "model=classifier_tiny", "data.batch_size=16"],
    "language_modeling": ["data=text", "model=lm_tiny", "tokenizer=char"],
}


def losses(task: str, steps: int, text: str, *more: str) -> list[float]:
    """Returns the training losses of a run."""
    overrides = [f"task={task}", *TASKS[task], *([f"data.path={text}"] if task == "language_modeling" else [])]
    overrides += [f"trainer.max_steps={steps}", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"]
    overrides += ["trainer.precision=32-true", "callbacks.progress=null", "callbacks.samples=null"]
    overrides += ["model.size.dropout=0"]
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"runs={runs}", *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{task} {' '.join(more)}: ended with status {done.returncode}\n{done.stderr[-1500:]}")
        (path,) = Path(runs).glob("*/*/metrics.csv")
        with path.open(newline="") as file:
            return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="A file of text, such as Shakespeare's plays.")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    require_gpu()
    differ = False
    for task in TASKS:
        cpu = losses(task, args.steps, args.text, "trainer=cpu")
        for compiled in ("false", "true"):
            gpu = losses(task, args.steps, args.text, "trainer=gpu", f"compile={compiled}")
            worst = max(abs(one - other) / abs(one) for one, other in zip(cpu, gpu, strict=True))
            differ |= worst > WORST
            print(
                f"{task:18s} compile={compiled:6s} {len(gpu)} steps, worst relative difference {worst:.1e}", flush=True
            )
    sys.exit(differ)


if __name__ == "__main__":
    main()
