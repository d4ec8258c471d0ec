"""CIDEr against a plain computation from its definition."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.evaluation.metrics.ngrams import Cider, DocumentFrequencies, ReferenceCounts

Captions = list[list[str]]


def cider(candidates: Captions, references: list[Captions], known: DocumentFrequencies | None = None) -> np.ndarray:
    counts = ReferenceCounts(references, [gram.split() for gram in known.counts] if known else [])
    return Cider(counts, known)(counts.vocabulary.encode(candidates))


def split(*captions: str) -> Captions:
    return [caption.split() for caption in captions]


def grams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def by_definition(candidates: Captions, references: list[Captions]) -> list[float]:
    """Vedantam et al. 2015, equations 1 to 4 with the clipping and the Gaussian of section 6 (CIDEr-D)."""
    said: Counter[tuple[str, ...]] = Counter()
    for captions in references:
        said.update({gram for caption in captions for n in range(1, 5) for gram in grams(caption, n)})

    def weigh(tokens: list[str], n: int) -> dict[tuple[str, ...], float]:
        return {g: k * (math.log(len(references)) - math.log(max(1, said[g]))) for g, k in grams(tokens, n).items()}

    def similarity(candidate: list[str], reference: list[str], n: int) -> float:
        own, theirs = weigh(candidate, n), weigh(reference, n)
        norm = math.sqrt(sum(w * w for w in own.values())) * math.sqrt(sum(w * w for w in theirs.values()))
        product = sum(min(w, theirs[g]) * theirs[g] for g, w in own.items() if g in theirs)
        gap = max(0, len(candidate) - 1) - max(0, len(reference) - 1)
        return product / norm * math.exp(-gap * gap / 72) if norm else 0.0

    return [
        10 * sum(similarity(candidate, r, n) for r in captions for n in range(1, 5)) / 4 / len(captions)
        for candidate, captions in zip(candidates, references, strict=True)
    ]


def test_the_only_reference_of_an_image_scores_ten() -> None:
    references = [split("a red cube stands there"), split("two green balls roll away"), split("one blue cone")]
    scores = cider([captions[0] for captions in references], references)
    # The last has no 4-gram.
    assert scores == pytest.approx([10, 10, 7.5])


caption = st.lists(st.sampled_from("abcde"), max_size=9)
image = st.tuples(caption | st.lists(st.sampled_from("abxy"), max_size=5), st.lists(caption, min_size=1, max_size=4))


@settings(max_examples=150)
@given(st.lists(image, min_size=1, max_size=5))
def test_agrees_with_the_definition(images: list[tuple[list[str], Captions]]) -> None:
    candidates, references = [c for c, _ in images], [r for _, r in images]
    assert cider(candidates, references) == pytest.approx(by_definition(candidates, references), rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(st.lists(st.lists(caption, min_size=1, max_size=3), min_size=1, max_size=5), st.lists(caption, max_size=4))
def test_constants_score_as_if_given_for_every_image(references: list[Captions], constants: Captions) -> None:
    constants = [*constants, ["zz", "a", "a"]]
    counts = ReferenceCounts(references)
    scores = Cider(counts).of_constants(counts.vocabulary.encode(constants))
    means = [np.mean(by_definition([constant] * len(references), references)) for constant in constants]
    assert scores == pytest.approx(means, rel=1e-9, abs=1e-12)


REFERENCES = [split("a dog runs", "the dog is here"), split("a cat sleeps"), split("a dog and a cat", "two pets")]
CANDIDATES = split("a dog sleeps", "a cat is new", "two dogs and a cat")


def test_frequencies_of_the_references_change_nothing() -> None:
    frequencies = DocumentFrequencies.from_references(REFERENCES)
    assert frequencies.images == 3
    assert frequencies.counts["a"] == 3 and frequencies.counts["a dog"] == 2 and "dog here" not in frequencies.counts
    assert cider(CANDIDATES, REFERENCES, frequencies) == pytest.approx(cider(CANDIDATES, REFERENCES))
