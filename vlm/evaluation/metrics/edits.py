"""Edit distance, and character and word error rates (CER, WER) of texts with one right reading."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from vlm.evaluation.metrics.ngrams import Floats

ERROR_RATES = ("cer", "wer")
_RUN = re.compile(r"\s\s+")


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Returns the minimum number of insertions, deletions and substitutions between two sequences (Levenshtein 1966).

    Two integers hold a column of the distance table; their bits mark where it rises and falls (Myers 1999; Hyyrö 2003).
    """
    if not one:
        return len(other)
    places: dict[Hashable, int] = {}
    for place, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << place
    every, last = (1 << len(one)) - 1, 1 << len(one) - 1
    rises, falls, distance = every, 0, len(one)
    for item in other:
        equal = places.get(item, 0)
        diagonal = equal | falls
        across = (((equal & rises) + rises) ^ rises) | equal
        up, down = falls | (every & ~(across | rises)), rises & across
        distance += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & every, down << 1 & every
        rises, falls = down | (every & ~(diagonal | up)), up & diagonal
    return distance


def error_counts(texts: Iterable[str], references: Iterable[str]) -> Floats:
    """Edits and length of each reference, in characters and in words, as jiwer counts them. Shapes: (N, 4)"""
    rows = []
    for text, reference in zip(texts, references, strict=True):
        sides = ((text.strip(), reference.strip()), (_words(text), _words(reference)))
        rows.append([count for one, other in sides for count in (edit_distance(one, other), len(other))])
    return np.array(rows, np.float64).reshape(-1, 4)


def _words(text: str) -> list[str]:
    """Splits a text at spaces and at runs of white space. A single tab or line separator is part of a word."""
    return [word for word in _RUN.sub(" ", text).strip().split(" ") if word]


def error_rates(counts: Floats) -> Floats:
    """``NAMES`` of summed counts: edits over the length of all references. Shapes: (..., 4) -> (..., 2)"""
    return counts[..., ::2] / np.maximum(1, counts[..., 1::2])


def caption_counts(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> Floats | None:
    """Returns `error_counts` of captions by image; None unless each image has one reference. Shapes: (N, 4)"""
    if not all(len(references[image]) == 1 for image in captions):
        return None
    return error_counts(captions.values(), (references[image][0] for image in captions))


def caption_rates(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Returns the error rates of captions by name; empty unless each image has one reference."""
    counts = caption_counts(captions, references)
    return {} if counts is None else dict(zip(ERROR_RATES, error_rates(counts.sum(0)).tolist(), strict=True))
