"""BLEU and CIDEr against the examples of their papers and plain computations from their definitions."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.evaluation.metrics.ngrams import Bleu, Cider, DocumentFrequencies, ReferenceCounts

Captions = list[list[str]]


def bleu(candidates: Captions, references: list[Captions]) -> tuple[np.ndarray, np.ndarray]:
    counts = ReferenceCounts(references)
    return Bleu(counts)(counts.vocabulary.encode(candidates))


def cider(candidates: Captions, references: list[Captions], known: DocumentFrequencies | None = None) -> np.ndarray:
    counts = ReferenceCounts(references, [gram.split() for gram in known.counts] if known else [])
    return Cider(counts, known)(counts.vocabulary.encode(candidates))


def split(*captions: str) -> Captions:
    return [caption.split() for caption in captions]


def grams(tokens: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def bleu_by_hand(candidates: Captions, references: list[Captions]) -> list[float]:
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


def cider_by_definition(candidates: Captions, references: list[Captions]) -> list[float]:
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


def test_the_only_reference_of_an_image_scores_ten() -> None:
    references = [split("a red cube stands there"), split("two green balls roll away"), split("one blue cone")]
    scores = cider([captions[0] for captions in references], references)
    # The last has no 4-gram.
    assert scores == pytest.approx([10, 10, 7.5])


caption = st.lists(st.sampled_from("abcde"), max_size=9)
image = st.tuples(caption | st.lists(st.sampled_from("abxy"), max_size=5), st.lists(caption, min_size=1, max_size=4))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(image, min_size=1, max_size=5))
def test_scores_agree_with_the_definitions(images: list[tuple[list[str], Captions]]) -> None:
    candidates, references = [list(c) for c, _ in images], [r for _, r in images]
    corpus, per_image = bleu(candidates, references)
    assert corpus == pytest.approx(bleu_by_hand(candidates, references), rel=1e-12)
    for row, candidate, captions in zip(per_image, candidates, references, strict=True):
        assert row == pytest.approx(bleu_by_hand([candidate], [captions]), rel=1e-12)
    expected = cider_by_definition(candidates, references)
    assert cider(candidates, references) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=25)
@given(st.lists(st.lists(caption, min_size=1, max_size=3), min_size=1, max_size=5), st.lists(caption, max_size=4))
def test_constants_score_as_if_given_for_every_image(references: list[Captions], constants: Captions) -> None:
    constants = [*constants, ["zz", "a", "a"]]
    counts = ReferenceCounts(references)
    entries = counts.vocabulary.encode(constants)
    for constant, row, score in zip(
        constants, Bleu(counts).of_constants(entries), Cider(counts).of_constants(entries), strict=True
    ):
        repeated = [constant] * len(references)
        assert row == pytest.approx(bleu_by_hand(repeated, references), rel=1e-12)
        assert score == pytest.approx(np.mean(cider_by_definition(repeated, references)), rel=1e-9, abs=1e-12)


REFERENCES = [split("a dog runs", "the dog is here"), split("a cat sleeps"), split("a dog and a cat", "two pets")]
CANDIDATES = split("a dog sleeps", "a cat is new", "two dogs and a cat")


def test_frequencies_of_the_references_change_nothing() -> None:
    frequencies = DocumentFrequencies.from_references(REFERENCES)
    assert frequencies.images == 3
    assert frequencies.counts["a"] == 3 and frequencies.counts["a dog"] == 2 and "dog here" not in frequencies.counts
    assert cider(CANDIDATES, REFERENCES, frequencies) == pytest.approx(cider(CANDIDATES, REFERENCES))
