"""Measures how many photos, and captions of each, a captioner needs: its scores after training on parts of Flickr8k.

    python benchmarks/how_many_photos.py --root data/flickr8k --out FOLDER [--photos 500 1000] [--captions 1 5]
    python benchmarks/how_many_photos.py --root data/flickr8k --out OTHER --experiment captioning_flickr8k_pretrained \
        --beside FOLDER --overrides model.encoder.weights=FILE

Each point is a run of `python train.py experiment=...` on a table of the first N photos of train, with the first K
captions of each. All runs take the same number of steps, learn a vocabulary from their own captions, are validated on
the same photos, and are scored on test with the best checkpoint. Points whose runs are already in FOLDER, with the same
--experiment, --steps and --overrides, are not repeated, and interrupted ones are resumed. The plot and the table show
all points in FOLDER and in the folders --beside it, so several calls can share the work.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from vlm.data.sources.captions import Flickr8k
from vlm.io.files import write_text

ROOT = Path(__file__).resolve().parents[1]
METRICS = {"cider": "CIDEr", "bleu4": "BLEU-4"}
VALIDATIONS = 5
SETTINGS = "settings.json"

Point = tuple[int, int]  # photos, captions of each
Series = dict[str, dict[int, dict[str, float]]]  # label of a series -> photos -> test scores


def table(source: Flickr8k, photos: int, captions: int) -> Iterator[str]:
    """Yields lines of JSON for data=captions."""
    for split, images, most in (("train", photos, captions), ("val", None, None), ("test", None, None)):
        for record in source.split(split).records(images):
            yield json.dumps({"image": record.id, "caption": record["references"][:most], "split": split}) + "\n"


def train(point: Point, source: Flickr8k, args: argparse.Namespace) -> None:
    """Trains a point, or resumes its interrupted run, unless it already has scores.

    A point that another call is training is skipped.
    """
    name = "{}x{}".format(*point)
    with (args.out / f"{name}.log").open("a") as log:
        try:
            flock(log, LOCK_EX | LOCK_NB)  # the training process inherits the lock
        except BlockingIOError:
            print(f"{name}: another call is at it", flush=True)
            return
        if scores(args.out, point):
            return
        command = [sys.executable, str(ROOT / "train.py"), *options_of(name, point, source, args)]
        if subprocess.run(command, stdout=log, stderr=log, cwd=ROOT).returncode:
            raise SystemExit(f"{log.name}: the training failed; see there")


def options_of(name: str, point: Point, source: Flickr8k, args: argparse.Namespace) -> list[str]:
    """Returns the options of a point's run; writes its table if the run is new."""
    if cut_off := sorted(args.out.glob(f"{name}/*/checkpoints/last.ckpt")):
        return [f"resume={cut_off[-1].parents[1]}"]
    path, images = args.out / f"{name}.jsonl", (source.root / source.base).resolve()
    write_text(path, "".join(table(source, *point)))
    options = [f"experiment={args.experiment}", "data=captions", f"data.path={path}", f"data.root={images}"]
    options += ["trainer.max_epochs=-1", f"trainer.max_steps={args.steps}", "trainer.check_val_every_n_epoch=null"]
    options += [f"trainer.val_check_interval={args.steps // VALIDATIONS}", f"runs={args.out}", f"name={name}"]
    return options + args.overrides


def scores(out: Path, point: Point) -> dict[str, float]:
    """Returns the test scores of a point; empty if it has no finished run."""
    files = sorted(out.glob("{}x{}/*/evaluation/test/metrics.json".format(*point)))
    return json.loads(files[-1].read_text()) if files else {}


def points(out: Path) -> dict[Point, dict[str, float]]:
    """Returns the scores of all points with finished runs."""
    names = (path.stem.split("x") for path in out.glob("*x*.jsonl"))
    known = sorted((int(photos), int(captions)) for photos, captions in names)
    return {point: scored for point in known if (scored := scores(out, point))}


def series(folders: list[Path]) -> Series:
    """Returns the scores of all points in some folders, one series per experiment and number of captions."""
    found: Series = {}
    for folder in folders:
        experiment = json.loads((folder / SETTINGS).read_text())["experiment"]
        for (photos, captions), scored in points(folder).items():
            label = f"{experiment}, {captions} caption{'s' * (captions > 1)}"
            found.setdefault(label, {})[photos] = scored
    return found


def plot(known: Series, path: Path) -> None:
    """Plots one panel per metric: scores with 95% intervals over photos, one line per series."""
    figure, axes = plt.subplots(1, len(METRICS), figsize=(4.2 * len(METRICS), 3.2), layout="constrained")
    for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
        for label, rows in known.items():
            values = [scored[f"test/{metric}"] for scored in rows.values()]
            sides = [
                [abs(scored[f"test/{metric}{side}"] - scored[f"test/{metric}"]) for scored in rows.values()]
                for side in ("@low", "@high")
            ]
            axis.errorbar(list(rows), values, sides, marker="o", capsize=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({photos for rows in known.values() for photos in rows}), minor=False)
        axis.get_xaxis().set_major_formatter("{x:.0f}")
        axis.set_xlabel("photos")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=100)


def report(known: Series) -> None:
    print(f"{'experiment, captions':<44}{'photos':>7}" + "".join(f"{title:>26}" for title in METRICS.values()))
    for label, rows in known.items():
        for photos, scored in rows.items():
            values = [[scored[f"test/{metric}{part}"] for part in ("", "@low", "@high")] for metric in METRICS]
            cells = ("{:.3f} ({:.3f} to {:.3f})".format(*value) for value in values)
            print(f"{label:<44}{photos:>7}" + "".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="Flickr8k's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of tables, runs and the plot")
    parser.add_argument("--experiment", default="captioning_flickr8k")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="folders of other calls, plotted too")
    parser.add_argument("--photos", type=int, nargs="+", default=[500, 1000, 2000, 4000, 6000])
    parser.add_argument("--captions", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--steps", type=int, default=1900, help="of each training: ten epochs of all photos")
    parser.add_argument("--overrides", nargs="*", default=[], help="of our config")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = args.out / SETTINGS
    own = json.dumps({"experiment": args.experiment, "steps": args.steps, "overrides": args.overrides})
    if settings.is_file() and settings.read_text() != own:
        raise SystemExit(f"{args.out}: holds points of {settings.read_text()}; give another --out")
    write_text(settings, own)
    source = Flickr8k(root=args.root)
    for captions in args.captions:
        for photos in args.photos:
            train((photos, captions), source, args)
    known = series([*args.beside, args.out])  # empty if the overrides contain test=false
    report(known)
    if known:
        plot(known, args.out / "how_many_photos.png")


if __name__ == "__main__":
    main()
