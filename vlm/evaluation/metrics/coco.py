"""The caption metrics of COCO's evaluation: BLEU, ROUGE-L and CIDEr."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from vlm.data.text.words import words
from vlm.errors import UserError
from vlm.evaluation.metrics.ngrams import (
    Bleu,
    BleuCounts,
    Cider,
    DocumentFrequencies,
    Entries,
    Floats,
    ReferenceCounts,
    Tokens,
    bleu_of,
)
from vlm.evaluation.metrics.tokens import Units, units_of

# Weight of recall against precision, as in COCO's evaluation.
_BETA = 1.2


class _Image(NamedTuple):
    """The references of an image in the bits of one integer, separated by an empty bit."""

    places: dict[str, int]
    fields: list[tuple[int, int]]
    all_fields: int


class RougeL:
    """ROUGE-L against the references of a set of images.

    An F-measure of the best precision and the best recall, which may come from different references. Longest common
    subsequences with all references of an image are computed together, with one bit per word (Hyyrö 2004, "Bit-parallel
    LCS-length computation revisited").

    Args:
        references: Tokenized captions of each image.
    """

    def __init__(self, references: Sequence[Sequence[Tokens]]) -> None:
        self._images = [_pack(captions) for captions in references]

    def __call__(self, candidates: Sequence[Tokens]) -> Floats:
        """Scores one caption per image: (N,)."""
        return np.array([_score(tokens, image) for tokens, image in zip(candidates, self._images, strict=True)])


def _replace_empty(tokens: Tokens) -> Tokens:
    # COCO's evaluation treats a caption without words as one empty word, so that two such captions agree.
    return tokens or [""]


def _pack(captions: Sequence[Tokens]) -> _Image:
    places: dict[str, int] = {}
    fields: list[tuple[int, int]] = []
    start = 0
    for tokens in map(_replace_empty, captions):
        for place, word in enumerate(tokens, start):
            places[word] = places.get(word, 0) | 1 << place
        fields.append((((1 << len(tokens)) - 1) << start, len(tokens)))
        start += len(tokens) + 1
    return _Image(places, fields, sum(mask for mask, _ in fields))


def _common_lengths(tokens: Tokens, image: _Image) -> list[tuple[int, int]]:
    """Lengths of the longest common subsequence with each reference, and of the reference."""
    # A bit is cleared where the subsequence grows by one. The empty bits absorb carries.
    state = image.all_fields
    for word in tokens:
        if places := image.places.get(word):
            matched = state & places
            state = ((state + matched) | (state - matched)) & image.all_fields
    fallen = image.all_fields & ~state
    return [((fallen & mask).bit_count(), length) for mask, length in image.fields]


def _score(candidate: Tokens, image: _Image) -> float:
    tokens = _replace_empty(candidate)
    common = _common_lengths(tokens, image)
    precision = max(count for count, _ in common) / len(tokens)
    recall = max(count / length for count, length in common)
    if precision == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def rouge(text: str, reference: str) -> tuple[float, float, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L: F1 of the words, pairs of words and longest common subsequence of two texts.

    Words are lower-case runs of letters and digits, unstemmed; for a script without spaces they are its characters.
    """
    text_words, reference_words = (list(words(side.lower().replace("_", " "))) for side in (text, reference))
    ((longest, _),) = _common_lengths(text_words, _pack([reference_words]))
    shares = [2 * longest / max(1, len(text_words) + len(reference_words))]
    for n in (2, 1):
        ngrams, wanted = _ngrams(text_words, n), _ngrams(reference_words, n)
        shares.insert(0, 2 * (ngrams & wanted).total() / max(1, ngrams.total() + wanted.total()))
    first, second, third = shares
    return first, second, third


def _ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))


KEYS = ("bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider")


class References:
    """The reference captions of a set of images, tokenized and counted once.

    Args:
        captions: Reference captions by image.
        frequencies: Document frequencies of a corpus, for CIDEr; default those of these references.
        units: Units of that corpus; None for words, or characters if the script of the references has no spaces.

    Raises:
        UserError: There is no image, or an image has no reference.
    """

    def __init__(
        self,
        captions: Mapping[str, Sequence[str]],
        frequencies: DocumentFrequencies | None = None,
        units: Units | None = None,
    ) -> None:
        if not captions:
            raise UserError("there is no image to score: the references are empty", status=1)
        if bare := [image for image, texts in captions.items() if not texts]:
            remedy = f"({len(bare)} such images); leave it out or add one"
            raise UserError(f"{bare[0]}: no reference caption {remedy}", status=1)
        # Floating-point sums depend on the order, so images are always scored in the order of their ids.
        self.captions = {image: list(captions[image]) for image in sorted(captions)}
        self.units = units or units_of(chain.from_iterable(self.captions.values()))
        tokens = [[self.units.cut(caption) for caption in texts] for texts in self.captions.values()]
        corpus_ngrams = [gram.split() for gram in frequencies.counts] if frequencies else []
        self._counts = ReferenceCounts([list(map(_words, texts)) for texts in tokens], corpus_ngrams)
        self._rouge_l, self._bleu, self._cider = RougeL(tokens), Bleu(self._counts), Cider(self._counts, frequencies)

    def score(self, predictions: Mapping[str, str]) -> "CaptionScores":
        """Scores one caption per image.

        Raises:
            UserError: The images of predictions and references differ.
        """
        missing, unknown = self.captions.keys() - predictions.keys(), predictions.keys() - self.captions.keys()
        for images, lack in ((missing, "predicted caption"), (unknown, "reference")):
            if images:
                count = f"{len(images)} such images of {len(self.captions.keys() | predictions.keys())}"
                raise UserError(f"{min(images)}: no {lack} ({count}); both must name the same images", status=1)
        tokens = [self.units.cut(predictions[image]) for image in self.captions]
        entries = self._encode(tokens)
        counts = self._bleu.count(entries)
        values = np.column_stack([bleu_of(*counts), self._rouge_l(tokens), self._cider(entries)])
        return CaptionScores(list(self.captions), values, counts)

    def cider(self, predictions: Mapping[str, str]) -> Floats:
        """CIDEr of one caption per image, in a third of the time of `score`. Shapes: -> (N,)"""
        return self._cider(self._encode([self.units.cut(predictions[image]) for image in self.captions]))

    def cider_of_constants(self, captions: Sequence[str]) -> Floats:
        """CIDEr of each caption if it were given for every image. Shapes: C captions -> (C,)"""
        return self._cider.of_constants(self._encode([self.units.cut(caption) for caption in captions]))

    @property
    def mean_length(self) -> float:
        """Mean number of units per reference."""
        return float(self._counts.entries.lengths.mean())

    def best_constant(self, candidates: Sequence[str]) -> str:
        """Returns the caption with the best score if it is given for every image: a baseline for any model.

        Best is the highest CIDEr; ties (with one image, CIDEr is always 0) are broken by BLEU-4, then alphabetically.

        Raises:
            UserError: There is no candidate.
        """
        captions = sorted(set(candidates))
        if not captions:
            raise UserError("no caption to choose a constant from: give the captions of the training split")
        entries = self._encode([self.units.cut(caption) for caption in captions])
        bleu4 = self._bleu.of_constants(entries)[:, -1]
        return captions[np.lexsort((-bleu4, -self._cider.of_constants(entries)))[0]]

    def _encode(self, tokens: Sequence[Tokens]) -> Entries:
        return self._counts.vocabulary.encode(list(map(_words, tokens)))


class CaptionScores:
    """Scores of a set of captions.

    Args:
        images: Ids of the images.
        values: Scores of each image, in the order of ``KEYS`` (N, 6).
        counts: Counts for corpus BLEU, which is not a mean over images.
    """

    def __init__(self, images: list[str], values: Floats, counts: BleuCounts) -> None:
        self.images, self.values, self.counts = images, values, counts

    def summary(self) -> dict[str, float]:
        """The score of the whole set under each of ``KEYS``."""
        bleu = bleu_of(*(np.sum(part, 0) for part in self.counts))
        # Column by column, because numpy sums contiguous and strided arrays in different orders.
        means = [np.ascontiguousarray(column).mean() for column in self.values[:, len(bleu) :].T]
        return dict(zip(KEYS, map(float, [*bleu, *means]), strict=True))

    @cached_property
    def per_image(self) -> dict[str, dict[str, float]]:
        """The scores of each image."""
        rows = (dict(zip(KEYS, row, strict=True)) for row in self.values.tolist())
        return dict(zip(self.images, rows, strict=True))


def score_captions(
    predictions: Mapping[str, str], references: References | Mapping[str, Sequence[str]]
) -> CaptionScores:
    """Scores captions as in COCO's evaluation.

    Args:
        predictions: One caption per image.
        references: Captions by the same images, prepared or not.

    Raises:
        UserError: The images differ, or an image has no reference.
    """
    prepared = references if isinstance(references, References) else References(references)
    return prepared.score(predictions)


def _words(tokens: Tokens) -> list[str]:
    # COCO's BLEU and CIDEr split tokens at no-break spaces (in fractions); its ROUGE-L does not.
    return " ".join(tokens).split()
