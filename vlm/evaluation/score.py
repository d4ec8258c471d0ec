"""`vlm score`: COCO's caption metrics of files, scores of lines of text, and METEOR and SPICE by Java."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from vlm.data.text.words import split_lines
from vlm.errors import UserError, print_error, printable
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.ngrams import DocumentFrequencies
from vlm.evaluation.metrics.texts import ERROR_RATES, NAMES, TextScores, caption_counts, error_rates
from vlm.evaluation.metrics.tokens import Units, units_of
from vlm.io.output import align_columns, csv_text, text_line
from vlm.untrusted.sizes import JsonValue

Texts = dict[str, list[str]]
MetricResult = tuple[float, list[float]]

_MODELS = "stanford-corenlp-3.6.0-models.jar"  # SPICE's parser models, which the package downloads on request


def java_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], units: Units
) -> tuple[dict[str, float], dict[str, dict[str, float]], dict[str, str]]:
    """Computes the metrics that are available on this machine.

    Args:
        predictions: One caption per image.
        references: Captions by the same images.
        units: Units of the other metrics; words are split by the rules of pycocoevalcap's tokenizer.
    Returns:
        The corpus score by metric, the scores by metric and image, and the reason for each metric that is not
        available.
    """
    images = list(references)
    reference_texts = {image: [" ".join(units.cut(text)) for text in references[image]] for image in images}
    candidates = {image: [" ".join(units.cut(predictions[image]))] for image in images}
    corpus: dict[str, float] = {}
    rows: dict[str, dict[str, float]] = {}
    absent: dict[str, str] = {}
    compute_by_metric = {"meteor": _compute_meteor, "spice": _compute_spice}
    for name, compute in compute_by_metric.items():
        if reason := _explain_missing(name):
            absent[name] = reason
            continue
        try:
            corpus[name], values = compute(reference_texts, candidates)
            rows[name] = dict(zip(images, values, strict=True))
        except Exception as error:  # an external program
            absent[name] = f"pycocoevalcap failed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return corpus, rows, absent


def _explain_missing(metric: str) -> str | None:
    """Returns what the computation of "meteor" or "spice" lacks on this machine; None if nothing."""
    package = find_spec("pycocoevalcap")
    if package is None:
        return 'needs pip install "vlm-lightning[coco]" and Java'
    if not shutil.which("java"):
        return "needs Java (any from 8 on) in the PATH"
    folders = package.submodule_search_locations or ()
    if metric == "spice" and not any(Path(folder, "spice", "lib", _MODELS).is_file() for folder in folders):
        return "needs Stanford's models (400 MB): python -m pycocoevalcap.spice.get_stanford_models fetches them"
    return None


def _compute_meteor(references: Texts, candidates: Texts) -> MetricResult:
    from pycocoevalcap.meteor.meteor import Meteor

    meteor = Meteor()
    try:
        score, values = meteor.compute_score(references, candidates)
    finally:
        meteor.meteor_p.kill()
        meteor.meteor_p.wait()
        for pipe in (meteor.meteor_p.stdin, meteor.meteor_p.stdout, meteor.meteor_p.stderr):
            pipe.close()
    return float(score), [float(value) for value in values]


def _compute_spice(references: Texts, candidates: Texts) -> MetricResult:
    from pycocoevalcap.spice.spice import Spice

    # Results are in the order of sorted ids.
    order = sorted(references)
    score, values = Spice().compute_score(references, candidates)
    by_image = dict(zip(order, (float(value["All"]["f"]) for value in values), strict=True))
    return float(score), [by_image[image] for image in references]


NEEDS_REFERENCES = "its weights need references of several images; give those of a larger set: --references-of FILE"
NAMED = 10  # number of unscored images listed on stderr; JSON lists all


@dataclass
class MatchedCaptions:
    """Captions matched with references.

    Attributes:
        predictions, references: Texts of the images that have both.
        without_caption, without_reference: The other images.
    """

    predictions: dict[str, str]
    references: dict[str, list[str]]
    without_caption: list[str]
    without_reference: list[str]


@dataclass
class Scores:
    """Scores of a set of images.

    Attributes:
        corpus: Scores of the whole set.
        per_image: Scores of each image.
        units: Units that the metrics count.
        absent: Reason for each metric that is not available.
    """

    corpus: dict[str, float]
    per_image: dict[str, dict[str, float]]
    units: Units
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: Mapping[str, float]) -> None:
        """Adds a score of each image, and their mean."""
        self.corpus[name] = sum(values.values()) / len(values)
        for image, value in values.items():
            self.per_image[image][name] = value


def score(captioned: MatchedCaptions, *, java: bool, larger: Mapping[str, Sequence[str]] | None = None) -> Scores:
    """Computes BLEU, ROUGE-L, CIDEr, error rates if each image has one reference, and METEOR and SPICE if possible.

    CIDEr weights n-grams by their rarity over images. With a single image it would always be 0, and is left out.

    Args:
        larger: References that determine the weights of CIDEr; by default the scored ones.
    """
    units = units_of(chain.from_iterable((larger or captioned.references).values()))
    frequencies = None
    if larger is not None:
        frequencies = DocumentFrequencies.from_references([*map(units.cut, texts)] for texts in larger.values())
    references = References(captioned.references, frequencies, units)
    coco = references.score(captioned.predictions)
    scores = Scores(coco.summary(), {image: dict(row) for image, row in coco.per_image.items()}, references.units)
    if len(larger or captioned.references) < 2:
        for row in (scores.corpus, *scores.per_image.values()):
            del row["cider"]
        scores.absent["cider"] = NEEDS_REFERENCES
    if (edits := caption_counts(captioned.predictions, captioned.references)) is not None:
        scores.corpus |= dict(zip(ERROR_RATES, error_rates(edits.sum(0)).tolist(), strict=True))
        for image, row in zip(captioned.predictions, error_rates(edits).tolist(), strict=True):
            scores.per_image[image] |= dict(zip(ERROR_RATES, row, strict=True))
    if java:
        corpus, rows, absent = java_scores(captioned.predictions, captioned.references, scores.units)
        scores.absent |= absent
        scores.corpus |= corpus
        for name, values in rows.items():
            for image, value in values.items():
                scores.per_image[image][name] = value
    return scores


def image_files(references: str, folder: Path, images: Iterable[str]) -> dict[str, Path]:
    """Returns the file of each image: its name in COCO's list of images, else the image id.

    Raises:
        UserError: A file does not exist.
    """
    content = _read_json(references)
    listed = content.get("images", ()) if isinstance(content, dict) else ()
    names = {str(image["id"]): str(image.get("file_name", image["id"])) for image in listed}
    files = {image: folder / names.get(image, image) for image in images}
    for image, path in files.items():
        if not path.is_file():
            raise UserError(f"{path}: no such image ({image} of {references}); give the folder with --images")
    return files


def read_captions(
    results: Any, references: Any, references_of: Any = None
) -> tuple[MatchedCaptions, dict[str, list[str]] | None]:
    """Reads captions and references from files, their contents, or texts by image; prints images that lack either.

    Args:
        results: A path, a list of ``{"image_id", "caption"}``, or one caption per image as a dictionary or list.
        references: A path, ``{"annotations": [...]}`` or its list, or captions per image as a dictionary or list.
        references_of: References of a larger set in the same form, which determine the weights of CIDEr.
    Returns:
        The captions with their references, and the references of the larger set.
    Raises:
        UserError: A file is unreadable or in another format, or the files have no image in common.
    """
    contents, names = [], ("results", "references", "references_of")
    for name, value in zip(names, (results, references, references_of), strict=True):
        path = isinstance(value, str | os.PathLike)
        contents.append((os.fspath(value), _read_json(os.fspath(value))) if path else (name, _to_rows(value)))
    (results_name, predictions), (references_name, truths), larger_set = contents
    captioned = match_captions(_captions(results_name, predictions), _references(references_name, truths))
    report_missing(captioned, results_name, references_name)
    return captioned, None if references_of is None else _references(*larger_set)


def _to_rows(value: Any) -> JsonValue:
    """Converts texts by image to COCO's rows; texts may be strings or objects with `text`."""
    if isinstance(value, Mapping) and "annotations" not in value:
        pairs = list(value.items())
    elif isinstance(value, Sequence) and not all(isinstance(row, Mapping) for row in value):
        pairs = list(enumerate(value))
    else:
        return value
    several = ((image, texts if isinstance(texts, list | tuple) else [texts]) for image, texts in pairs)
    return [{"image_id": image, "caption": getattr(text, "text", text)} for image, texts in several for text in texts]


def _captions(path: str, content: JsonValue) -> dict[str, str]:
    """Returns the caption of each image, from the contents of a file in COCO's result format."""
    captions: dict[str, str] = {}
    for image, caption in _rows(path, content, "results"):
        if captions.setdefault(image, caption) != caption:
            raise UserError(f"{path}: image {image} has more than one caption; give one per image")
    return captions


def _references(path: str, content: JsonValue) -> dict[str, list[str]]:
    """Returns the captions of each image, from the contents of a file in COCO's annotation format; may be empty."""
    listed: Any = content
    captions: dict[str, list[str]] = {}
    if isinstance(content, dict):
        listed = content.get("annotations")
        try:
            captions = {str(image["id"]): [] for image in content.get("images", ())}
        except (TypeError, KeyError) as error:
            raise UserError(f"{path}: an entry of its images has no id; is it a COCO captions file?") from error
    for image, caption in _rows(path, listed, "annotations"):
        captions.setdefault(image, []).append(caption)
    return captions


def _read_json(path: str) -> JsonValue:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        if path.endswith(".jsonl"):  # as written by training to samples/
            return [json.loads(line) for line in split_lines(text) if line.strip()]
        return json.loads(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); give a file in COCO's format") from error


def _rows(path: str, rows: JsonValue, what: str) -> Iterable[tuple[str, str]]:
    if not isinstance(rows, list):
        wanted = {"results": 'a list of {"image_id", "caption"}', "annotations": '{"annotations": [...]}'}[what]
        raise UserError(f"{path}: has no COCO {what}; it should be {wanted}")
    for number, row in enumerate(rows):
        is_valid = isinstance(row, dict) and isinstance(row.get("image_id"), int | str)
        if not is_valid or not isinstance(row.get("caption"), str):
            raise UserError(f"{path}: entry {number} has no image_id and caption; is it in COCO's format?")
        yield str(row["image_id"]), row["caption"]


def match_captions(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> MatchedCaptions:
    """Matches captions with references, in the order of the files."""
    scored = [image for image, texts in references.items() if texts and image in predictions]
    without_texts = [image for image, texts in references.items() if not texts]
    return MatchedCaptions(
        predictions={image: predictions[image] for image in scored},
        references={image: list(references[image]) for image in scored},
        without_caption=[image for image, texts in references.items() if texts and image not in predictions],
        without_reference=[*without_texts, *(image for image in predictions if image not in references)],
    )


def report_missing(captioned: MatchedCaptions, results: str, references: str) -> None:
    """Prints the images that cannot be scored, and their number, to stderr.

    Raises:
        UserError: No image could be scored.
    """
    if not captioned.predictions:
        raise UserError(f"{results}: has no caption of an image of {references}; do their image ids agree?", 1)
    missing = [(captioned.without_caption, "caption", results), (captioned.without_reference, "reference", references)]
    for images, part, file in missing:
        for image in images[:NAMED]:
            print_error(printable(f"image {image}: no {part} in {file}"))
        if images:
            more = f" ({len(images) - NAMED} more are not listed)" if len(images) > NAMED else ""
            summary = f"{len(images)} image{'s' * (len(images) > 1)} without a {part} in {file}{more}"
            print_error(f"{summary}; the scores are of the other {len(captioned.predictions)}")


def as_text(captioned: MatchedCaptions, scores: Scores, per_image: bool) -> str:
    lines = [f"images    {len(captioned.predictions):>10,}"]
    lines += [f"{name:<10}{value:>10.4f}" for name, value in scores.corpus.items()]
    lines += [f"{name:<10}{'absent':>10}  {why}" for name, why in scores.absent.items()]
    lines += [f"({scores.units.note})"] if scores.units.note else []
    text = "\n".join([*lines, ""])
    if not per_image:
        return text
    rows = ([image, *(f"{row[name]:.4f}" for name in scores.corpus)] for image, row in scores.per_image.items())
    return text + "\n" + "".join(map(text_line, [["image", *scores.corpus], *rows]))


def as_json(captioned: MatchedCaptions, scores: Scores, per_image: bool) -> str:
    content: dict[str, JsonValue] = {**scores.corpus, "images": len(captioned.predictions)}
    content |= {
        "units": scores.units.name,
        "without_caption": captioned.without_caption,
        "without_reference": captioned.without_reference,
    }
    content |= {"absent": scores.absent} if scores.absent else {}
    content |= {"per_image": scores.per_image} if per_image else {}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def as_csv(captioned: MatchedCaptions, scores: Scores, per_image: bool) -> str:
    for name, why in scores.absent.items():
        print_error(f"{name}: absent, {why}", "warning")
    if scores.units.note:
        print_error(scores.units.note, "warning")
    if not per_image:
        return csv_text([scores.corpus, scores.corpus.values()])
    rows = ([image, *(row[name] for name in scores.corpus)] for image, row in scores.per_image.items())
    return csv_text([["image", *scores.corpus], *rows])


FORMS = {"text": as_text, "json": as_json, "csv": as_csv}


def score_texts(results: str, references: str, form: str) -> str:
    """Scores a file of texts, one per line, against a file with one reference per line.

    Args:
        form: "text", "json" or "csv".
    Raises:
        UserError: A file cannot be read or is empty, or they differ in their number of lines.
    """
    texts, reference_texts = _lines(results), _lines(references)
    if len(texts) != len(reference_texts):
        counts = f"{len(texts):,} lines, and {references} {len(reference_texts):,}"
        raise UserError(f"{results}: has {counts}; give one text per line")
    scores = TextScores(texts, reference_texts)
    summary, bounds = scores.summary, scores.intervals(seed=0)
    if form == "json":
        content = {**summary, **bounds, "texts": len(texts), "signatures": scores.signatures()}
        return json.dumps(content, indent=1) + "\n"
    if form == "csv":
        return csv_text([NAMES, [summary[name] for name in NAMES]])
    columns = [[summary[name], bounds[f"{name}@low"], bounds[f"{name}@high"]] for name in NAMES]
    rows = [[name, *(f"{value:.4f}" for value in row)] for name, row in zip(NAMES, columns, strict=True)]
    signatures = "\n".join(f"{name:<6}{signature}" for name, signature in scores.signatures().items())
    return f"{len(texts):,} texts\n{align_columns([['', 'score', 'low', 'high'], *rows])}\n\n{signatures}\n"


def _lines(path: str) -> list[str]:
    try:
        lines = split_lines(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as fault:
        raise UserError(f"{path}: {fault.strerror}; give a readable file") from fault
    except UnicodeDecodeError as fault:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from fault
    if lines in ([], [""]):
        raise UserError(f"{path}: is empty; give one text per line")
    return lines
