"""The tokenizer of a checkpoint, for a training that starts from it."""

import pytest
import sentencepiece
from captioned import refusal
from hugging import TEXTS as LINES
from varied import varied_lines

from vlm.checkpoint.load import read
from vlm.checkpoint.pretrained_tokenizer import PretrainedTokenizer
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError

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


def piece_model(path, **options):
    """A model of SentencePiece, trained by itself."""
    options = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_prefix=str(path), **options)
    return sentencepiece.SentencePieceProcessor(model_file=f"{path}.model")


@pytest.mark.parametrize(
    ("options", "ids", "starts"),
    [
        ({"model_type": "bpe", "byte_fallback": True, "vocab_size": 500}, (2, 1, 2), [1]),  # as Llama has it
        ({"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, (0, 1, 1), []),  # as T5
    ],
)
def test_a_model_of_sentencepiece_alone_is_a_tokenizer(tmp_path, options, ids, starts):
    truth = piece_model(tmp_path / "a", **options)
    ours = PretrainedTokenizer(path=str(tmp_path / "a.model")).fit([])
    again = tokenizer_from_state(ours.state())
    assert (ours.pad_id, ours.bos_id, ours.eos_id) == ids and list(again.starts) == starts
    assert ours.vocab_size == truth.get_piece_size() and again.fingerprint == ours.fingerprint
    for line in [*LINES, *varied_lines(200)]:
        assert ours.encode(line) == again.encode(line) == truth.encode(line)
        assert ours.decode(ours.encode(line)) == truth.decode(truth.encode(line))


def test_a_model_that_is_none_is_a_line(tmp_path):
    piece_model(tmp_path / "endless", eos_id=-1)
    (tmp_path / "text.model").write_text("no model")
    for name, line in (("none", "No such file"), ("text", "not a SentencePiece model"), ("endless", "no end token")):
        with pytest.raises(UserError, match=rf"{name}\.model.*{line}") as caught:
            PretrainedTokenizer(path=str(tmp_path / f"{name}.model")).fit([])
        assert "\n" not in str(caught.value)
