"""Samples that are held out: shares that are fair, and stable when others are added."""

from collections import Counter

import pytest

from vlm.data.hold_out import HELD_OUT, draw_splits, draw_validation_indices, sample_stratified
from vlm.errors import UserError


@pytest.mark.parametrize("leave", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 5, 13, 40, 77])
def test_shares_are_fair_to_within_one(count, leave):
    sizes = [1, 2, 5, 29, 40]
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    names = [f"image {i}" for i in range(len(labels))]
    taken = sample_stratified(labels, names, count, seed=3, keep_per_class=leave)
    assert taken == sorted(set(taken))
    found = Counter(labels[index] for index in taken)
    for label, size in enumerate(sizes):
        assert found[label] <= size - leave
        assert abs(found[label] - count * size / 77) < 1 or found[label] == size - leave
    assert len(taken) == count if leave == 0 else len(taken) >= min(count, 77 - 5) - len(sizes)
    # Names, not places, decide.
    turned = sample_stratified(labels[::-1], names[::-1], count, seed=3, keep_per_class=leave)
    assert {names[i] for i in taken} == {names[::-1][i] for i in turned}


def test_equal_classes_share_what_cannot_be_divided_by_the_seed():
    labels, names = [index % 50 for index in range(500)], [str(index) for index in range(500)]
    chosen = [frozenset(labels[i] for i in sample_stratified(labels, names, 10, seed=seed)) for seed in range(5)]
    assert {len(classes) for classes in chosen} == {10} and len(set(chosen)) == 5


def test_validation_stays_where_it_is_when_rows_are_added():
    names = [f"images/{number}.jpg" for number in range(600)]
    before = {names[index] for index in draw_validation_indices(names[:500], None, 0)}
    # Ahead of the others, as a sorted folder has them, and in another order.
    after = {names[::-1][index] for index in draw_validation_indices(names[::-1], None, 0)}
    assert before <= after and len(after - before) <= 10
    assert len(before) == pytest.approx(HELD_OUT * 500, abs=9)  # three standard deviations
    assert before != {names[index] for index in draw_validation_indices(names[:500], None, 1)}
    # It is drawn apart from the test.
    train = [
        f"{index}.jpg"
        for index in draw_splits([f"{n}.jpg" for n in range(1000)], {"val": 0.0, "test": 0.1}, 0)["train"]
    ]
    assert len(draw_validation_indices(train, None, 0)) == pytest.approx(HELD_OUT * len(train), abs=13)


def test_validation_by_classes_keeps_most_where_they_are():
    names, labels = [f"{number}.jpg" for number in range(1100)], [number % 2 for number in range(1100)]
    before = draw_validation_indices(names[:1000], labels[:1000], 0)
    assert Counter(labels[index] for index in before) == {0: 10, 1: 10}
    assert len({*before} & {*draw_validation_indices(names, labels, 0)}) >= 18


@pytest.mark.parametrize("labels", [None, [0, 0, 1, 1]])
def test_a_few_samples_still_hold_one_out(labels):
    held = [draw_validation_indices(["a", "b", "c", "d"], labels, seed) for seed in range(20)]
    assert {len(indices) for indices in held} == {1} and len({index for (index,) in held}) > 1


@pytest.mark.parametrize(("names", "labels"), [(["a"], None), (["a", "b"], [0, 1])])
def test_too_few_to_hold_any_out(names, labels):
    with pytest.raises(UserError, match="too few training samples"):
        draw_validation_indices(names, labels, 0)
    with pytest.raises(UserError, match=r"too few .* \(2 problems; the first: a\.csv, line 2: no text\); add samples"):
        draw_validation_indices(names, labels, 0, skipped=["a.csv, line 2: no text", "a.csv, line 3: no text"])
