"""Scores of texts with one reference each: sacreBLEU's BLEU and chrF, ROUGE, edit distances."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from vlm.evaluation.metrics.bootstrap import intervals
from vlm.evaluation.metrics.coco import rouge
from vlm.evaluation.metrics.ngrams import Floats

ERROR_RATES = ("cer", "wer")
_RUN = re.compile(r"\s\s+")


def edit_distance(source: Sequence[Hashable], target: Sequence[Hashable]) -> int:
    """Returns the minimum number of insertions, deletions and substitutions between two sequences (Levenshtein 1966).

    Two integers hold a column of the distance table; their bits mark where it rises and falls (Myers 1999; Hyyrö 2003).
    """
    if not source:
        return len(target)
    places: dict[Hashable, int] = {}
    for place, item in enumerate(source):
        places[item] = places.get(item, 0) | 1 << place
    every, last = (1 << len(source)) - 1, 1 << len(source) - 1
    rises, falls, distance = every, 0, len(source)
    for item in target:
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
        characters, words = (text.strip(), reference.strip()), (_words(text), _words(reference))
        rows.append([edit_distance(*characters), len(characters[1]), edit_distance(*words), len(words[1])])
    return np.array(rows, np.float64).reshape(-1, 4)


def _words(text: str) -> list[str]:
    """Splits a text at spaces and at runs of white space. A single tab or line separator is part of a word."""
    return [word for word in _RUN.sub(" ", text).strip().split(" ") if word]


def error_rates(counts: Floats) -> Floats:
    """``ERROR_RATES`` of summed counts: edits over the length of all references. Shapes: (..., 4) -> (..., 2)"""
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


NAMES = ("bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match", *ERROR_RATES)


class TextScores:
    """Scores of texts: BLEU (Papineni et al. 2002) and chrF (Popović 2015) from 0 to 100 as sacreBLEU computes
    them (Post 2018), cased and with its own tokenization; the mean of ROUGE, from 0 to 1; the share that equal their
    reference; and error rates of characters and words.

    Args:
        predictions, references: Texts and their references; at least two.
    """

    def __init__(self, predictions: Sequence[str], references: Sequence[str]) -> None:
        self.predictions, self.references = predictions, references
        self._bleu, self._chrf = BLEU(), CHRF()

    @cached_property
    def summary(self) -> dict[str, float]:
        """The score of all texts under each of ``NAMES``."""
        metrics = (self._bleu, self._chrf)
        scores = [metric.corpus_score(self.predictions, [self.references]).score for metric in metrics]
        errors = error_rates(self._edits.sum(0)).tolist()
        return dict(zip(NAMES, [*scores, *self._shares.mean(0).tolist(), *errors], strict=True))

    def signatures(self) -> dict[str, str]:
        """Returns sacreBLEU's signatures of BLEU and chrF; `summary` must have been computed."""
        return {"bleu": str(self._bleu.get_signature()), "chrf": str(self._chrf.get_signature())}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """metric@low and metric@high: 95% intervals, by bootstrap over texts."""
        return intervals(NAMES, self.score, len(self.predictions), seed=seed)

    def score(self, draws: Floats) -> Floats:
        """Scores of resampled texts, in the order of NAMES. Shapes: draws (R, N) -> (R, 8)"""
        bleu = [_bleu(row) for row in (draws @ self._words).astype(int).tolist()]
        shares, errors = draws @ self._shares / draws.sum(1)[:, None], error_rates(draws @ self._edits)
        return np.column_stack([bleu, _chrf(draws @ self._characters), shares, errors])

    @cached_property
    def _edits(self) -> Floats:
        return error_counts(self.predictions, self.references)

    @cached_property
    def _shares(self) -> Floats:
        """ROUGE and exact match of each text; the scores are their means. Shapes: (N, 4)"""
        return np.array([[*rouge(text, reference), text == reference] for text, reference in self._pairs], np.float64)

    @cached_property
    def _words(self) -> Floats:
        """Counts for BLEU: matches and n-grams of each order, and both lengths. Shapes: (N, 10)"""
        single = BLEU(effective_order=True)  # else it warns about scores of single texts, which are not used
        scores = [single.sentence_score(text, [reference]) for text, reference in self._pairs]
        counts = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
        return np.array(counts, np.float64)

    @cached_property
    def _characters(self) -> Floats:
        """Counts for chrF: n-grams of text and reference, and matches. Shapes: (N, 18)"""
        return np.array([_count_character_ngrams(*pair) for pair in self._pairs], np.float64)

    @property
    def _pairs(self) -> Iterable[tuple[str, str]]:
        return zip(self.predictions, self.references, strict=True)


def _bleu(counts: Sequence[int]) -> float:
    correct, total, length, reference = list(counts[:4]), list(counts[4:8]), counts[8], counts[9]
    return BLEU.compute_bleu(correct, total, length, reference, smooth_method="exp").score


def _count_character_ngrams(text: str, reference: str) -> list[int]:
    """Counts character n-grams of orders 1 to 6 in a text and its reference, and their matches, without white space.

    As in sacreBLEU, the text's n-grams of an order for which the reference is too short do not count.
    """
    counts, sides = [], ("".join(text.split()), "".join(reference.split()))
    for order in range(1, CHRF.CHAR_ORDER + 1):
        text_ngrams, reference_ngrams = (
            Counter(side[at : at + order] for at in range(len(side) - order + 1)) for side in sides
        )
        counts += [
            text_ngrams.total() if reference_ngrams else 0,
            reference_ngrams.total(),
            (text_ngrams & reference_ngrams).total(),
        ]
    return counts


def _chrf(counts: Floats) -> Floats:
    """Computes chrF from counts, with recall twice as important as precision. Shapes: (R, 18) -> (R,)"""
    text, reference, matches = np.moveaxis(counts.reshape(len(counts), -1, 3), 2, 0)  # each (R, 6)
    is_counted = (text > 0) & (reference > 0)
    orders = np.maximum(1, is_counted.sum(1))
    precision = (matches / np.maximum(1, text) * is_counted).sum(1) / orders
    recall = (matches / np.maximum(1, reference) * is_counted).sum(1) / orders
    return 100 * 5 * precision * recall / np.maximum(1e-16, 4 * precision + recall)
