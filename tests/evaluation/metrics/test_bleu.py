"""BLEU against the examples of its paper and a plain count by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.evaluation.metrics.ngrams import Bleu, ReferenceCounts

Captions = list[list[str]]


def bleu(candidates: Captions, references: list[Captions]) -> tuple[np.ndarray, np.ndarray]:
    counts = ReferenceCounts(references)
    return Bleu(counts)(counts.vocabulary.encode(candidates))


def split(*captions: str) -> Captions:
    return [caption.split() for caption in captions]


def grams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def by_hand(candidates: Captions, references: list[Captions]) -> list[float]:
    correct, guessed = [0] * 4, [0] * 4
    for candidate, captions in zip(candidates, references, strict=True):
        for n in range(1, 5):
            most: Counter[tuple[str, ...]] = Counter()
            for caption in captions:
                most |= grams(caption, n)
            correct[n - 1] += sum((grams(candidate, n) & most).values())
            guessed[n - 1] += max(0, len(candidate) - n + 1)
    pairs = zip(map(len, candidates), ([*map(len, captions)] for captions in references), strict=True)
    closest = [min((abs(length - own), length) for length in lengths)[1] for own, lengths in pairs]
    ratio = (sum(map(len, candidates)) + 1e-15) / (sum(closest) + 1e-9)
    penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    precisions = [(c + 1e-15) / (g + 1e-9) for c, g in zip(correct, guessed, strict=True)]
    return [math.prod(precisions[:n]) ** (1 / n) * penalty for n in range(1, 5)]


def test_a_word_counts_no_more_often_than_in_a_reference() -> None:
    # Papineni et al. 2002, section 2.1, example 2: modified precision 2/7.
    references = split("the cat is on the mat", "there is a cat on the mat")
    corpus, _ = bleu(split("the the the the the the the"), [references])
    assert corpus[0] == pytest.approx(2 / 7)


def test_the_first_example_of_the_paper() -> None:
    # Section 2.1, example 1: 17 of 18 unigrams of candidate 1 are in a reference, 8 of 14 of candidate 2.
    references = split(
        "it is a guide to action that ensures that the military will forever heed party commands",
        "it is the guiding principle which guarantees the military forces always being under the command of the party",
        "it is the practical guide for the army always to heed the directions of the party",
    )
    first = "it is a guide to action which ensures that the military always obeys the commands of the party"
    second = "it is to insure the troops forever hearing the activity guidebook that party direct"
    assert bleu(split(first), [references])[0][0] == pytest.approx(17 / 18)
    # 14 words against the 16 of the closest reference.
    assert bleu(split(second), [references])[0][0] == pytest.approx(8 / 14 * math.exp(1 - 16 / 14))


caption = st.lists(st.sampled_from("abcd"), max_size=8)
image = st.tuples(caption | st.lists(st.sampled_from("abxy"), max_size=5), st.lists(caption, min_size=1, max_size=4))


@settings(max_examples=150)
@given(st.lists(image, min_size=1, max_size=4))
def test_agrees_with_counting_by_hand(images: list[tuple[list[str], Captions]]) -> None:
    candidates, references = [list(c) for c, _ in images], [r for _, r in images]
    corpus, per_image = bleu(candidates, references)
    assert corpus == pytest.approx(by_hand(candidates, references), rel=1e-12)
    for row, candidate, captions in zip(per_image, candidates, references, strict=True):
        assert row == pytest.approx(by_hand([candidate], [captions]), rel=1e-12)


@settings(max_examples=60)
@given(st.lists(st.lists(caption, min_size=1, max_size=3), min_size=1, max_size=4), st.lists(caption, max_size=4))
def test_constants_score_as_if_given_for_every_image(references: list[Captions], constants: Captions) -> None:
    counts = ReferenceCounts(references)
    scores = Bleu(counts).of_constants(counts.vocabulary.encode([*constants, ["zz", "a"]]))
    for row, constant in zip(scores, [*constants, ["zz", "a"]], strict=True):
        assert row == pytest.approx(by_hand([constant] * len(references), references), rel=1e-12)
