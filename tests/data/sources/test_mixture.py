"""Mixtures of sources."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlm.data.sources.mixture import Mixture, share_exactly
from vlm.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two tables of 7 and 4 conversations about as many images."""
    for name, count in (("a", 7), ("b", 4)):
        rows = []
        for number in range(count):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{name}{number}.png")
            texts = [{"user": "what?", "assistant": f"{name}{number}"}]
            rows.append({"image": f"{name}{number}.png", "texts": texts, "split": "val" if number > 5 else "train"})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def mixture(root: Path, *entries: dict[str, Any], **options: Any) -> Mixture:
    tables = [{"root": str(root), **entry} for entry in entries]
    return Mixture(mix=tables, **options)


def answers(source: Mixture, epoch: int) -> list[str]:
    split = source.split("train")
    return [split.record(index, epoch)["questions"][0].answer for index in range(len(split))]


@pytest.mark.parametrize(("weight", "size", "counts"), [(1, None, [5, 5]), (3, 8, [6, 2]), (0.5, 9, [3, 6])])
def test_each_epoch_has_exact_shares(root: Path, weight: float, size: int | None, counts: list[int]) -> None:
    source = mixture(root, {"path": "a.jsonl", "weight": weight}, {"path": "b.jsonl"}, size=size)
    for epoch in range(4):
        read = Counter(answer[0] for answer in answers(source, epoch))
        assert [read["a"], read["b"]] == counts
    assert len(source.split("val")) == 1


def test_a_table_is_read_entirely_before_a_sample_is_repeated(root: Path) -> None:
    source = mixture(root, {"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl"}, size=6)  # 4 of 6 and 2 of 4
    read = [answer for epoch in range(6) for answer in answers(source, epoch)]
    first, second = ([answer for answer in read if answer[0] == name] for name in "ab")
    assert all({*first[at : at + 6]} == {f"a{n}" for n in range(6)} for at in range(0, 24, 6))
    assert all({*second[at : at + 4]} == {f"b{n}" for n in range(4)} for at in range(0, 12, 4))
    assert first[:6] != first[6:12]


def test_a_sample_depends_on_seed_epoch_and_index_only(root: Path) -> None:
    entries = {"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 5}
    whole = [answers(mixture(root, *entries, seed=1), epoch) for epoch in range(5)]
    assert answers(mixture(root, *entries, seed=1), 4) == whole[4]
    assert [answers(mixture(root, *entries, seed=2), epoch) for epoch in range(5)] != whole


def test_ids_of_tables_with_the_same_images_differ(root: Path) -> None:
    split = mixture(root, {"path": "a.jsonl"}, {"path": "a.jsonl"}).split("val")
    assert [record.id for record in split.records()] == ["0/a6.png", "1/a6.png"]


def test_tables_of_questions_and_conversations_are_mixed(root: Path) -> None:
    rows = ["image,question,answer,split", *(f"a{number}.png,who?,c{number},train" for number in range(3))]
    (root / "c.csv").write_text("\n".join(rows))
    source = mixture(root, {"data": "questions", "path": "c.csv", "weight": 2}, {"path": "b.jsonl"}, size=6)
    assert source.has_turns
    for epoch in range(3):
        assert Counter(answer[0] for answer in answers(source, epoch)) == {"c": 4, "b": 2}


def test_captions_are_mixed_for_a_task_that_reads_them(root: Path) -> None:
    for name in "ab":
        lines = ["image,caption", *(f"{name}{number}.png,{name} {number}" for number in range(4))]
        (root / f"{name}.csv").write_text("\n".join(lines))
    entries = [{"data": "captions", "path": f"{name}.csv", "val_fraction": 0, "test_fraction": 0} for name in "ab"]
    source = mixture(root, entries[0], {**entries[1], "weight": 3}, needs=("image", "captions"), size=4)
    split = source.split("train")
    assert Counter(split.record(at)["captions"][0][0] for at in range(4)) == {"a": 1, "b": 3}
    with pytest.raises(UserError, match=r"data.mix\[1\]: data=conversations holds image and questions, and the task"):
        mixture(root, entries[0], {"path": "b.jsonl"}, needs=("image", "captions"))


def test_pairs_of_answers_are_mixed(root: Path) -> None:
    for name in "pq":
        rows = [{"prompt": "what?", "chosen": f"{name}{n}", "rejected": "no", "split": "train"} for n in range(4)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [
        {"data": "preferences", "path": f"{name}.jsonl", "weight": weight} for name, weight in (("p", 1), ("q", 3))
    ]
    split = mixture(root, *entries, needs=("pairs",), size=4).split("train")
    assert Counter(split.record(at)["pairs"][0].chosen[0] for at in range(4)) == {"p": 1, "q": 3}
    with pytest.raises(UserError, match=r"data.mix\[1\]: data=conversations holds .*, and the task also reads pairs"):
        mixture(root, entries[0], {"path": "b.jsonl"}, needs=("pairs",))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], r"data.mix: is empty"),
        ([{"weight": 1}], r"data.mix\[0\].path: missing"),
        ([{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 0}], r"data.mix\[1\]: is .* a weight above 0"),
        ([{"path": "a.jsonl", "image_colum": "x"}], r"data.mix\[0\].image_colum: .* did you mean image_column"),
        ([{"path": "c.jsonl"}], r"c.jsonl: no such file"),
        ([{"data": "easyvqa", "path": "a.jsonl"}], r"data.mix\[0\].data: is 'easyvqa'; .* did you mean easy_vqa"),
        ([{"path": "a.jsonl"}, {"data": "flickr8k"}], r"data.mix\[1\]: data=flickr8k holds .* also reads questions"),
    ],
)
def test_an_invalid_entry_is_named(root: Path, entries: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mixture(root, *entries)


@pytest.mark.parametrize(("total", "weights"), [(10, [1, 1, 1]), (7, [0.2, 0.5, 0.3]), (1, [3, 2]), (100, [1, 1e-9])])
def test_shares_sum_to_the_total_and_are_within_one_of_their_quota(total: int, weights: list[float]) -> None:
    counts = share_exactly(total, weights)
    assert sum(counts) == total
    assert all(abs(n - total * weight / sum(weights)) < 1 for n, weight in zip(counts, weights, strict=True))
