"""Selects what `vlm compare` compares of captioning evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.evaluation.metrics.bootstrap import Scorer, caption_scorer
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.tasks.shared.stored import Compared, Sample


def select_captions(details: Mapping[str, Any], predictions: Any) -> Compared:
    """Returns the captions, by language if the data have languages."""
    by_language = {"" if name == "images" else name: rows for name, rows in details.items() if rows}
    return Compared(
        {
            language: {image: Sample(sorted(row["references"]), row["caption"]) for image, row in rows.items()}
            for language, rows in by_language.items()
        },
        _score_captions,
    )


def _score_captions(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    names = [f"{place:09}" for place in range(len(samples))]  # in sorted order
    references = References(dict(zip(names, (sample.true for sample in samples), strict=True)))
    captions = dict(zip(names, (sample.predicted for sample in samples), strict=True))
    return KEYS, caption_scorer(references.score(captions))
