"""The tokenizer of a checkpoint, for a training that starts from it."""

import pytest
from captioned import refusal

from vlm.checkpoint.load import read
from vlm.checkpoint.pretrained_tokenizer import PretrainedTokenizer
from vlm.data.text.tokenizer import tokenizer_from_state

FILES = "tests/checkpoint/files"


@pytest.mark.parametrize("task", ["masked_language_modeling", "translation", "tagging"])
def test_it_is_that_of_the_checkpoint(task, pytestconfig):
    path = pytestconfig.rootpath / FILES / f"{task}.ckpt"
    ours = PretrainedTokenizer(path=str(path)).fit(["other words"])
    theirs = tokenizer_from_state(read(path)["vlm"]["tokenizer"])
    assert ours.fingerprint == theirs.fingerprint and ours.state() == theirs.state()
    for name in ("vocab_size", "pad_id", "bos_id", "eos_id", "unk_id", "mask_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    ids = ours.encode("a small red circle, new words")
    assert ids == theirs.encode("a small red circle, new words") and ours.decode(ids) == theirs.decode(ids)
    assert [ours.piece(id) for id in range(ours.vocab_size)] == [theirs.piece(id) for id in range(ours.vocab_size)]


def test_a_checkpoint_without_one_is_refused(pytestconfig):
    path = pytestconfig.rootpath / FILES / "classification.ckpt"
    assert "the checkpoint has no tokenizer" in refusal(PretrainedTokenizer(path=str(path)).fit, [])
    assert "no such checkpoint" in refusal(PretrainedTokenizer(path="nowhere").fit, [])


def test_masked_words_need_an_id_for_masks(pytestconfig):
    path, masked = (pytestconfig.rootpath / FILES / f"{task}.ckpt" for task in ("tagging", "masked_language_modeling"))
    assert "no mask id" in refusal(PretrainedTokenizer(path=str(path), mask=True).fit, [])
    assert PretrainedTokenizer(path=str(masked), mask=True).fit([]).mask_id is not None
