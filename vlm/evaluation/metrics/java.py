"""METEOR and SPICE, which are Java programs, through the package ``pycocoevalcap``."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm.evaluation.metrics.tokens import Units

Texts = dict[str, list[str]]
Found = tuple[float, list[float]]

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
    wanted = {image: [" ".join(units.cut(text)) for text in references[image]] for image in images}
    candidates = {image: [" ".join(units.cut(predictions[image]))] for image in images}
    corpus: dict[str, float] = {}
    rows: dict[str, dict[str, float]] = {}
    absent: dict[str, str] = {}
    metrics: dict[str, tuple[Callable[[], str | None], Callable[[Texts, Texts], Found]]] = {
        "meteor": (_why_no_java, _meteor),
        "spice": (_why_no_spice, _spice),
    }
    for name, (why_not, compute) in metrics.items():
        if reason := why_not():
            absent[name] = reason
            continue
        try:
            corpus[name], values = compute(wanted, candidates)
            rows[name] = dict(zip(images, values, strict=True))
        except Exception as error:  # an external program
            absent[name] = f"pycocoevalcap failed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return corpus, rows, absent


def _why_no_java() -> str | None:
    if find_spec("pycocoevalcap") is None:
        return 'needs pip install "vlm-lightning[coco]" and Java'
    return None if shutil.which("java") else "needs Java (any from 8 on) in the PATH"


def _why_no_spice() -> str | None:
    if reason := _why_no_java():
        return reason
    package: Any = find_spec("pycocoevalcap")
    if not any(Path(place, "spice", "lib", _MODELS).is_file() for place in package.submodule_search_locations):
        return "needs Stanford's models (400 MB): python -m pycocoevalcap.spice.get_stanford_models fetches them"
    return None


def _meteor(wanted: Texts, candidates: Texts) -> Found:
    from pycocoevalcap.meteor.meteor import Meteor

    meteor = Meteor()
    try:
        score, values = meteor.compute_score(wanted, candidates)
    finally:
        meteor.meteor_p.kill()
        meteor.meteor_p.wait()
        for pipe in (meteor.meteor_p.stdin, meteor.meteor_p.stdout, meteor.meteor_p.stderr):
            pipe.close()
    return float(score), [float(value) for value in values]


def _spice(wanted: Texts, candidates: Texts) -> Found:
    from pycocoevalcap.spice.spice import Spice

    # Results are in the order of sorted ids.
    order = sorted(wanted)
    score, values = Spice().compute_score(wanted, candidates)
    by_image = dict(zip(order, (float(value["All"]["f"]) for value in values), strict=True))
    return float(score), [by_image[image] for image in wanted]
