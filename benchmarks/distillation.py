"""Students of half the depth with and without a teacher, on drawn scenes: `python benchmarks/distillation.py [FOLDER]`.

Every run is a `vlm train` in FOLDER, by default runs/distillation; finished runs are not repeated. It prints a table
of each task: the mean test score of each kind of student over the seeds, and the difference to the same seeds without a
teacher with its 95% interval (Student's t over the seeds).
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
# The options of each task, of its teacher and of its students, and the metrics of its table.
TASKS = {
    "captioning": (
        CAPTIONER,
        ["model.size.encoder_depth=2", "model.size.decoder_depth=2", "trainer.max_epochs=12"],
        ["model.size.encoder_depth=1", "model.size.decoder_depth=1", "trainer.max_epochs=4"],
        ("loss", "cider", "exact_match"),
    ),
    "language_modeling": (
        ["task=language_modeling", "data.source.train_documents=1000"],
        ["model.size.depth=4", "trainer.max_epochs=3"],
        ["model.size.depth=2", "trainer.max_epochs=1"],
        ("bits_per_byte",),
    ),
}
STUDENTS = {"no teacher": [], "teacher": ["task.teacher.path={best}"]}


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
    for task, (common, of_teacher, of_student, metrics) in TASKS.items():
        teacher = train(root / task / "teacher", [*common, *of_teacher])
        (best,) = (root / task / "teacher").glob("*/*/checkpoints/best.ckpt")
        scores = {
            name: [
                train(
                    root / task / name.replace(" ", "_") / f"{seed}",
                    [*common, *of_student, f"seed={seed}", *(option.format(best=best) for option in options)],
                )
                for seed in SEEDS
            ]
            for name, options in STUDENTS.items()
        }
        print(f"\n| {task} | {' | '.join(f'{metric} | difference' for metric in metrics)} |")
        print(f"|---|{'---|' * (2 * len(metrics))}")
        print(f"| teacher | {' | '.join(f'{teacher[metric]:.4f} | ' for metric in metrics)} |")
        for name, runs in scores.items():
            cells = []
            for metric in metrics:
                values, baseline = ([run[metric] for run in part] for part in (runs, scores["no teacher"]))
                difference = "" if name == "no teacher" else format_difference(values, baseline)
                cells.append(f"{mean(values):.4f} | {difference}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
