"""ROUGE against the example of its paper, the textbook recursion, brute force and torchmetrics."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.text import rouge_score

from vlm.evaluation.metrics.coco import RougeL, rouge


def rouge_l(candidate: list[str], references: list[list[str]]) -> float:
    return float(RougeL([references])([candidate])[0])


def common(first: list[str], second: list[str]) -> int:
    rows = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first, 1):
        for j, b in enumerate(second, 1):
            rows[i][j] = rows[i - 1][j - 1] + 1 if a == b else max(rows[i - 1][j], rows[i][j - 1])
    return rows[-1][-1]


def measure(precision: float, recall: float) -> float:
    return 2.44 * precision * recall / (recall + 1.44 * precision) if precision and recall else 0.0


def test_the_example_of_the_paper() -> None:
    # Lin 2004, section 3.1: three words of four in order, then two.
    reference = ["police", "killed", "the", "gunman"]
    assert rouge_l(["police", "kill", "the", "gunman"], [reference]) == pytest.approx(3 / 4)
    assert rouge_l(["the", "gunman", "kill", "police"], [reference]) == pytest.approx(2 / 4)


def test_captions_without_words_agree_with_each_other_alone() -> None:
    assert rouge_l([], [["a"], []]) == pytest.approx(1.0)
    assert rouge_l([], [["a"]]) == 0.0
    assert rouge_l(["a"], [[]]) == 0.0


caption = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@settings(max_examples=60)
@given(caption, st.lists(caption, min_size=1, max_size=6))
def test_agrees_with_the_recursion(candidate: list[str], references: list[list[str]]) -> None:
    lengths = [common(candidate, reference) for reference in references]
    precision = max(lengths) / len(candidate)
    recall = max(length / len(reference) for length, reference in zip(lengths, references, strict=True))
    assert rouge_l(candidate, references) == pytest.approx(measure(precision, recall), rel=1e-12)


def test_references_longer_than_a_machine_word() -> None:
    reference = [f"w{i}" for i in range(200)]
    assert rouge_l(reference[::3], [reference, reference[::-1]]) == pytest.approx(measure(1.0, 67 / 200))


class TestOfTexts:
    def test_counts_characters_of_a_script_without_spaces(self) -> None:
        assert rouge("猫が寝る", "犬が寝る") == pytest.approx((3 / 4, 2 / 3, 3 / 4))

    @settings(max_examples=40, deadline=None)
    @given(st.text("ab1 _'.", max_size=16), st.text("ab1 _'.", max_size=16))
    def test_equals_the_library_and_brute_force(self, text: str, reference: str) -> None:
        keys = ("rouge1", "rouge2", "rougeL")
        truth = rouge_score(text, reference, rouge_keys=keys)
        assert rouge(text, reference) == pytest.approx([float(truth[f"{key}_fmeasure"]) for key in keys], abs=1e-6)
        one, other = ("".join(c if c in "ab1" else " " for c in side).split() for side in (text, reference))
        sizes = range(min(len(one), len(other)), -1, -1)
        inside = [{*combinations(one, n)} & {*combinations(other, n)} for n in sizes]
        longest = next(n for n, shared in zip(sizes, inside, strict=True) if shared)
        assert rouge(text, reference)[2] == pytest.approx(2 * longest / max(1, len(one) + len(other)))
