"""Batches: texts end to end in rows, and values that move together."""

import pytest
import torch

from vlm.data.batch import IGNORE, PADDING, BadSample, Batch, Targets, TextRows, pack
from vlm.models.context import Features


def test_pack_lays_sequences_end_to_end():
    tokens, segments = pack([[[1, 5, 2], [1, 2]], [[1, 6, 7, 8, 9, 2]], []], pad_id=3)
    assert tokens.tolist() == [[1, 5, 2, 1, 2, 3], [1, 6, 7, 8, 9, 2], [3] * 6]
    assert segments.tolist() == [[1, 1, 1, 2, 2, PADDING], [1] * 6, [PADDING] * 6]
    none, no_segments = pack([], pad_id=0)
    assert none.shape == no_segments.shape == (0, 0)
    assert {one.dtype for one in (tokens, segments, none, no_segments)} == {torch.long}


@pytest.fixture
def batch() -> Batch:
    targets = Targets.from_labels(torch.tensor([[1, IGNORE]]))
    text = TextRows(torch.ones(1, 2), None, targets, torch.ones(1, 2, dtype=torch.bool), references=[["a"]])
    values = {"images": torch.ones(1, 3), "features": Features(torch.ones(1, 2, 3)), "text": text, "names": ["x"]}
    return Batch(["x"], values, [BadSample("y", "cut short")])


def tensors(batch):
    text = batch["text"]
    parts = [text.tokens, text.scored, text.targets.labels, text.targets.places]
    return [batch["images"], batch["features"].values, *parts]


def test_all_tensors_of_a_batch_are_pinned(batch, monkeypatch):
    """On a machine without a GPU, whose tensors cannot be: `pinned` says which were asked to."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert batch.pin_memory()["text"].references == [["a"]]
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in tensors(batch)}


def test_all_tensors_of_a_batch_move_and_nothing_else_changes(batch):
    moved = batch.to("meta")
    assert {tensor.device for tensor in tensors(moved)} == {torch.device("meta")}
    assert (moved["text"].segments, moved["text"].references) == (None, [["a"]])
    assert (moved.ids, moved.bad, moved["names"]) == (batch.ids, batch.bad, ["x"])
    assert batch["images"].device == torch.device("cpu")
