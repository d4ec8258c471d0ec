"""Faults of texts with their translations, each found once."""

from vlm.data.records import ListSplit, Record
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.evaluation.data_check.faults import LIMITS, REMEDIES, Faults
from vlm.evaluation.data_check.texts import find_pair_faults

TRAIN = [("a dog", "ein Hund"), ("a cat sleeps under a tree", "@@"), ("a dog", "ein Hund"), ("a dog", "der Hund")]
TEST = [("a fox", "ein Fuchs"), ("a dog", "ein Hund"), ("x" * 40, "y" * 40)]


def split(name, pairs):
    known = [dict(zip(("text", "translation"), pair, strict=True)) for pair in pairs]
    return ListSplit(range(len(pairs)), lambda at, epoch: Record(f"{name}-{at + 1}", known[at]))


def found(is_generated=False):
    faults = Faults()
    splits = {"train": split("train", TRAIN), "test": split("test", TEST)}
    find_pair_faults(splits, ByteTokenizer(), 40, faults, limit=None, is_generated=is_generated)
    return faults


def test_each_fault_is_named_with_its_pair():
    lines = found().by_kind
    assert lines["duplicate pair"] == ["train: train-1 = train: train-3: a dog | ein Hund"]
    assert lines["pair in two splits"] == ["train: train-1 = test: test-2: a dog | ein Hund"]
    assert lines["pair of unlike lengths"] == ["train: train-2: 25 and 2 characters: a cat sleeps under a tree | @@"]
    assert [line.split(",")[0] for line in lines["over-long text"]] == ["test: test-3: 42 tokens"]
    assert set(found().spoiling) >= {"pair in two splits", "duplicate pair"}


def test_sentences_that_are_drawn_may_come_again():
    assert "duplicate pair" not in found(is_generated=True).by_kind


def test_each_kind_that_may_spoil_a_run_has_a_remedy():
    assert not LIMITS.keys() - REMEDIES.keys()
