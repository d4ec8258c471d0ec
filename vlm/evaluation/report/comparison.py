"""`vlm compare`: several runs' evaluations side by side, with the significance of their differences."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vlm.checkpoint.runs import LAST, newest_run
from vlm.errors import UserError, print_error, printable
from vlm.evaluation.metrics.bootstrap import Difference, Scorer, caption_scorer, mean_scorer, paired
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.evaluation.report.evaluation import TITLES, number
from vlm.inference import page
from vlm.inference.output import Output, aligned

Captions = dict[str, tuple[str, list[str]]]  # caption and references by image


@dataclass
class StoredEvaluation:
    """An evaluation's folder.

    Attributes:
        name: Its name beside the others.
        split: The split.
        scores: By metric, as in metrics.json without the split.
        captions: Caption and references by image, of a captioner, by language; "" where nobody says the languages.
        values: What each image, text or question adds to scores that are means over them, by the score's name.
    """

    name: str
    split: str
    scores: dict[str, float]
    captions: dict[str, Captions] = field(default_factory=dict)
    values: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def samples(self) -> set[str]:
        """Images, texts or questions of which something is known."""
        return {*chain.from_iterable(self.captions.values()), *self.values}


def compare(folders: Sequence[str], *, out: str | None = None, seed: int = 0) -> int:
    """Prints evaluations side by side, each compared with the first; returns the exit status.

    Args:
        folders: Folders of ``vlm evaluate --out``, or of runs; ``last`` is the newest run.
        out: HTML file to write as well.
        seed: Of the resampling.
    Raises:
        UserError: A folder holds no evaluation, there are fewer than two, or two have no sample or no score in common.
    """
    if len(folders) < 2:
        raise UserError("compare: give two folders or more that vlm evaluate --out wrote")
    folders = [str(newest_run()) if folder == LAST else folder for folder in folders]
    files = [str(file) for folder in folders for place in places(Path(folder)) for file in place.glob("*.json")]
    output = Output(out, inputs=files)
    runs = [read(Path(folder), name) for folder, name in zip(folders, short_names(folders), strict=True)]
    differences = [differences_of(runs[0], run, seed=seed) for run in runs[1:]]
    for run in runs[1:]:
        if runs[0].scores.keys().isdisjoint(run.scores):
            raise UserError(f"{runs[0].name} and {run.name}: no score in common; compare evaluations of one task", 1)
    header, rows = lines(runs, differences)
    print(aligned([header, *rows]))
    if out is not None:
        body = [page.section("Scores", page.table(header, rows), page.paragraph(_legend(runs), "soft small"))]
        title = "Comparison of " + ", ".join(run.name for run in runs)
        with output:
            output.write(page.page(title, f"{runs[0].split} split", body))
    return 0


def read(folder: Path, name: str) -> StoredEvaluation:
    """Reads an evaluation's folder, or the one of the run whose folder is given.

    Raises:
        UserError: There is none, or it is damaged.
    """
    place = next((place for place in places(folder) if (place / "metrics.json").is_file()), None)
    if place is None:
        raise UserError(f"{folder}: holds no metrics.json; give a folder that vlm evaluate --out wrote, or a run's")
    metrics, details, predictions = (_json(place / f"{part}.json") for part in ("metrics", "details", "predictions"))
    try:
        split = next(iter(metrics)).split("/")[0]
        run = StoredEvaluation(name, split, {key.split("/", 1)[1]: float(value) for key, value in metrics.items()})
        run.captions = dict(_captions(details or {}, run.scores))
        run.values = dict(_values(details or {}, predictions or ()))
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise UserError(f"{place}: not what vlm evaluate writes ({error!r}); evaluate again") from error
    return run


def _captions(details: Mapping[str, Any], scores: Mapping[str, float]) -> Iterator[tuple[str, Captions]]:
    for language in ("", *(name for name in details if f"{KEYS[-1]}_{name}" in scores)):
        if rows := details.get(language or "images"):
            yield language, {image: (row["caption"], row["references"]) for image, row in rows.items()}


def _values(
    details: Mapping[str, Any], predictions: Iterable[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """The samples of a classifier, and those of answers, with what each adds to its scores."""
    for row in predictions:
        if "label" in row:
            yield row["image" if "image" in row else "id"], {"accuracy": float(row["predicted"] == row["label"])}
    for row in details.get("questions", ()):
        if "f1" in row:
            yield row["id"], {name: float(row[name]) for name in ("exact_match", "f1")}
        else:
            known = f"{row['image_id']}: {row['question']}"
            yield known, {"accuracy": float(row["predicted"] == row["answer"])}


def places(folder: Path) -> list[Path]:
    """Places of an evaluation in a folder."""
    return [folder, *(folder / "evaluation" / split for split in ("test", "val"))]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); evaluate again") from error


def short_names(folders: Sequence[str]) -> list[str]:
    """Names of folders: the parts of their paths that are not common to all."""
    parts = [Path(folder).resolve().parts for folder in folders]
    if len(set(parts)) == 1:
        return [f"{Path(folder).name} ({place})" for place, folder in enumerate(folders, 1)]
    unlike = [at for at in range(min(map(len, parts))) if len({path[at] for path in parts}) > 1]
    start = unlike[0] if unlike else min(map(len, parts))
    names = [path[start:] or path[-1:] for path in parts]
    while len({name[-1] for name in names}) == 1 and min(map(len, names)) > 1:
        names = [name[:-1] for name in names]
    return ["/".join(name) for name in names]


def differences_of(one: StoredEvaluation, other: StoredEvaluation, *, seed: int) -> dict[str, Difference]:
    """The metrics that are known of each sample, compared on those that both have; of captions in each language."""
    if (one.samples or other.samples) and one.samples.isdisjoint(other.samples):
        raise UserError(
            f"{one.name} and {other.name}: have no sample in common; compare evaluations of the same data", 1
        )
    differences: dict[str, Difference] = {}
    for language in one.captions.keys() & other.captions.keys():
        sides = one.captions[language], other.captions[language]
        if len(shared := _shared(one, other, *sides)) > 1:
            left, right = _caption_scorers(*sides, shared)
            by_metric = zip(KEYS, paired(left, right, len(shared), seed=seed), strict=True)
            differences |= {f"{name}_{language}" if language else name: value for name, value in by_metric}
    if not one.captions and len(shared := _shared(one, other, one.values, other.values)) > 1:
        names = [name for name in one.values[shared[0]] if name in other.values[shared[0]]]
        rows = (np.array([[side.values[at][name] for name in names] for at in shared]) for side in (one, other))
        left, right = map(mean_scorer, rows)
        differences |= zip(names, paired(left, right, len(shared), seed=seed), strict=True)
    return differences


def _shared(one: StoredEvaluation, other: StoredEvaluation, left: Iterable[str], right: Iterable[str]) -> list[str]:
    """The samples that both evaluations have, by name; a warning says how many one of them lacks."""
    if left_out := len({*left} ^ {*right}):
        warning = (
            f"{left_out} samples are in only one of {one.name} and {other.name}; the differences are of the others"
        )
        print_error(printable(warning), "warning")
    return sorted({*left} & {*right})


def _caption_scorers(one: Captions, other: Captions, shared: Sequence[str]) -> list[Scorer]:
    if unlike := [image for image in shared if sorted(one[image][1]) != sorted(other[image][1])]:
        raise UserError(f"{unlike[0]}: has other references in the two evaluations; evaluate both on the same data")
    prepared = References({image: one[image][1] for image in shared})
    return [caption_scorer(prepared.score({image: side[image][0] for image in shared})) for side in (one, other)]


def lines(
    runs: Sequence[StoredEvaluation], differences: Sequence[Mapping[str, Difference]]
) -> tuple[list[str], list[list[str]]]:
    """A row a metric: the score of each run, and of each but the first the difference with its interval and p."""
    header = ["", runs[0].name]
    for run in runs[1:]:
        header += [run.name, "difference (95% interval)", "p"]
    names = [name for name in runs[0].scores if "@" not in name]
    rows = []
    for name in names:
        row = [TITLES.get(name, name.replace("_", " ")), number(runs[0].scores[name])]
        for run, by_metric in zip(runs[1:], differences, strict=True):
            row += [number(run.scores.get(name)), *_cells(by_metric.get(name))]
        rows.append(row)
    return header, rows


def _cells(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["", ""]
    mark = "*" if difference.low > 0 or difference.high < 0 else ""
    return [f"{difference.value:+.4f} ({difference.low:+.4f} to {difference.high:+.4f}){mark}", f"{difference.p:.3f}"]


def _legend(runs: Sequence[StoredEvaluation]) -> str:
    return (
        f"Differences are from {runs[0].name}, by paired bootstrap over 1,000 resamples (Koehn 2004); "
        "those marked * have an interval without 0."
    )
