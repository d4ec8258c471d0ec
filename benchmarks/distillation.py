"""Captioners of half the depth with and without a teacher: `python benchmarks/distillation.py [FOLDER]`.

Every run is a `vlm train` on drawn scenes in FOLDER, by default runs/distillation; finished runs are not repeated. It
prints a table: the mean test scores of each kind of student over the seeds, and their differences to the same seeds
without a teacher with 95% intervals (Student's t over the seeds).
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

SEEDS = (0, 1, 2, 3)
T_QUANTILE = 3.182  # of Student's t with 3 degrees of freedom, for 95%
COMMON = ["trainer=cpu", "trainer.precision=32-true", "data.num_workers=0", "callbacks.progress=null"]
SCENES = ["data.source.train_scenes=3000", "data.source.val_scenes=100", "data.source.test_scenes=1000"]
CAPTIONER = ["task=captioning", *SCENES, "data.image_size=32", "model/encoder=vit", "model.encoder.patch_size=8"]
CAPTIONER += ["model.size.dim=64", "model.size.num_heads=4", "task.val_captions=100"]
TEACHER = ["model.size.encoder_depth=2", "model.size.decoder_depth=2", "trainer.max_epochs=12"]
STUDENT = ["model.size.encoder_depth=1", "model.size.decoder_depth=1", "trainer.max_epochs=4"]
STUDENTS = {
    "no teacher": [],
    "temperature 1": ["task.teacher.path={best}", "task.teacher.temperature=1"],
    "temperature 2": ["task.teacher.path={best}", "task.teacher.temperature=2"],
}
METRICS = ("loss", "cider", "exact_match")


def train(folder: Path, options: list[str]) -> dict[str, float]:
    """Trains in a folder, unless it holds a finished run, and returns the test scores without the split's name."""
    if not (done := [*folder.glob("*/*/evaluation/test/metrics.json")]):
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "vlm", "train", *COMMON, *options, f"runs={folder}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        print(f"{folder}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        done = [*folder.glob("*/*/evaluation/test/metrics.json")]
    return {name.partition("/")[2]: value for name, value in json.loads(done[0].read_text()).items()}


def format_difference(values: list[float], baseline: list[float]) -> str:
    """Returns the mean paired difference and its interval."""
    differences = [value - other for value, other in zip(values, baseline, strict=True)]
    half = T_QUANTILE * stdev(differences) / math.sqrt(len(differences))
    return f"{mean(differences):+.4f} ({mean(differences) - half:+.4f} to {mean(differences) + half:+.4f})"


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/distillation")
    teacher = train(root / "teacher", [*CAPTIONER, *TEACHER])
    (best,) = (root / "teacher").glob("*/*/checkpoints/best.ckpt")
    print(f"| model | {' | '.join(f'{metric} | difference' for metric in METRICS)} |")
    print(f"|---|{'---|' * (2 * len(METRICS))}")
    print(f"| teacher | {' | '.join(f'{teacher[metric]:.4f} | ' for metric in METRICS)} |", flush=True)
    baseline: list[dict[str, float]] = []
    for name, options in STUDENTS.items():
        given = [option.format(best=best) for option in options]
        folder = root / name.replace(" ", "_")
        runs = [train(folder / f"{seed}", [*CAPTIONER, *STUDENT, f"seed={seed}", *given]) for seed in SEEDS]
        cells = []
        for metric in METRICS:
            values = [run[metric] for run in runs]
            difference = format_difference(values, [run[metric] for run in baseline]) if baseline else ""
            cells.append(f"{mean(values):.4f} | {difference}")
        baseline = baseline or runs
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
