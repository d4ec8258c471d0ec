"""Batches: texts end to end in rows, and values that move together."""

import pytest
import torch

from vlm.data.batch import IGNORE, PADDING, BadSample, Batch, Targets, TextRows, pack
from vlm.models.frozen_features import Features


def test_pack_lays_sequences_end_to_end():
    tokens, segments = pack([[[1, 5, 2], [1, 2]], [[1, 6, 7, 8, 9, 2]], []], pad_id=3)
    assert tokens.tolist() == [[1, 5, 2, 1, 2, 3], [1, 6, 7, 8, 9, 2], [3] * 6]
    assert segments.tolist() == [[1, 1, 1, 2, 2, PADDING], [1] * 6, [PADDING] * 6]
    assert tokens.dtype == segments.dtype == torch.long


def test_pack_of_nothing():
    tokens, segments = pack([], pad_id=0)
    assert tokens.shape == segments.shape == (0, 0)
    assert tokens.dtype == torch.long


@pytest.fixture
def batch() -> Batch:
    targets = Targets.of(torch.tensor([[1, IGNORE]]))
    text = TextRows(torch.ones(1, 2), None, targets, torch.ones(1, 2, dtype=torch.bool), references=[["a"]])
    values = {"images": torch.ones(1, 3), "features": Features(torch.ones(1, 2, 3)), "text": text, "names": ["x"]}
    return Batch(["x"], values, [BadSample("y", "cut short")])


def test_all_tensors_of_a_batch_are_pinned(batch, monkeypatch):
    """On a machine without a GPU, whose tensors cannot be: `pinned` says which were asked to."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    text = batch.pin_memory()["text"]
    whole = [batch["images"], batch["features"].values, text.tokens, text.targets.labels, text.targets.places]
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in [*whole, text.scored]}
    assert text.references == [["a"]]


def test_all_tensors_of_a_batch_move_and_nothing_else_changes(batch):
    moved = batch.to("meta")
    assert moved["images"].device == moved["features"].values.device == torch.device("meta")
    parts = moved["text"].tokens, moved["text"].scored, moved["text"].targets.labels, moved["text"].targets.places
    assert {part.device for part in parts} == {torch.device("meta")}
    assert (moved["text"].segments, moved["text"].references) == (None, [["a"]])
    assert (moved.ids, moved.bad, moved["names"]) == (batch.ids, batch.bad, ["x"])
    assert batch["images"].device == torch.device("cpu")
