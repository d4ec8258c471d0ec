"""The tokenizer of a checkpoint, for a training that starts from it."""

import json

import hugging
import image_text
import pytest
import sentencepiece
import transformers as t
import translators
from caption_data import refusal
from hugging import END
from hugging import TEXTS as LINES
from text_lines import varied_lines
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
    assert "nowhere: no such file or folder; give a folder" in refusal(PretrainedTokenizer(path="nowhere").fit, [])


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


def t5(folder):
    folder.mkdir()
    return translators.t5_tokenizer(folder)


def xlm(folder):
    folder.mkdir()
    return hugging._xlm_tokenizer(folder)


def write_custom(folder):
    """A tokenizer that the library trained, with names and components of its own."""
    made = Tokenizer(models.WordPiece(unk_token="<nothing>"))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()])
    made.decoder = decoders.WordPiece()
    special = ["<nothing>", "<begin>", "<end>"]
    made.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special))
    names = {"bos_token": "<begin>", "eos_token": "<end>", "unk_token": "<nothing>"}
    return t.PreTrainedTokenizerFast(tokenizer_object=made, **names)


SAVED = {
    "byte_pairs": (lambda folder: hugging.byte_pairs(), (END, END, END)),
    "bert": (lambda folder: hugging.word_pieces(), ("[PAD]", "[CLS]", "[SEP]")),
    "chat": (lambda folder: image_text.byte_pairs(), ("<pad>", "<bos>", "<eos>")),
    "pieces": (lambda folder: image_text.pieces(), ("<pad>", "<bos>", "<eos>")),
    "t5": (t5, ("<pad>", "</s>", "</s>")),
    "xlm": (xlm, ("<pad>", "<s>", "</s>")),
    "own": (write_custom, ("<end>", "<begin>", "<end>")),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_tokenizer_is_read_without_a_model(tmp_path, name):
    make, ends = SAVED[name]
    theirs = make(tmp_path / "made")
    theirs.save_pretrained(tmp_path / "saved")
    theirs = t.AutoTokenizer.from_pretrained(tmp_path / "saved")
    ours = PretrainedTokenizer(path=str(tmp_path / "saved")).fit([])
    again = tokenizer_from_state(ours.state())
    assert (ours.pad_id, ours.bos_id, ours.eos_id) == tuple(theirs.convert_tokens_to_ids(one) for one in ends)
    assert ours.vocab_size == len(theirs)
    special = [*filter(None, theirs.all_special_tokens)]  # which are ordinary text in our texts
    lines = [line for line in [*LINES, *varied_lines(200)] if not any(one in line for one in special)]
    assert len(lines) > 150
    for line in lines:
        ids = theirs.encode(line, add_special_tokens=False)
        assert ours.encode(line) == again.encode(line) == ids
        if name != "bert":  # whose texts are joined by our own rules
            text = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids).strip() == text.strip()


@pytest.mark.parametrize("name", ["byte_pairs", "bert", "xlm"])
def test_a_tokenizer_json_is_enough(tmp_path, name):
    """The usual names of special tokens are found in a file of its own."""
    theirs = SAVED[name][0](tmp_path / "made")
    theirs.backend_tokenizer.save(str(tmp_path / "mine.json"))
    theirs.save_pretrained(tmp_path / "saved")
    ours = PretrainedTokenizer(path=str(tmp_path / "mine.json")).fit([])
    whole = PretrainedTokenizer(path=str(tmp_path / "saved")).fit([])
    assert ours.fingerprint == whole.fingerprint and ours.eos_id == whole.eos_id and ours.pad_id == whole.pad_id
    inside = PretrainedTokenizer(path=str(tmp_path / "saved" / "tokenizer.json")).fit([])
    assert inside.fingerprint == whole.fingerprint


def test_a_folder_of_an_unknown_model_has_a_tokenizer(tmp_path):
    hugging.byte_pairs().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert PretrainedTokenizer(path=str(tmp_path)).fit([]).eos_id == hugging.byte_pairs().eos_token_id


def test_what_cannot_be_represented_is_named(tmp_path):
    path = tmp_path / "saved"
    fit = PretrainedTokenizer(path=str(path)).fit
    hugging.byte_pairs().save_pretrained(path)
    settings, whole = path / "tokenizer_config.json", path / "tokenizer.json"
    stated, content = json.loads(settings.read_text()), json.loads(whole.read_text())
    settings.write_text(json.dumps(stated | {"eos_token": "<none>"}))
    assert "its vocabulary has no '<none>', its eos_token" in refusal(fit, [])
    settings.write_text(json.dumps(dict.fromkeys(stated)))
    whole.write_text(whole.read_text().replace(END, "<|stop|>"))
    assert "has no end token; add eos_token or sep_token to tokenizer_config.json" in refusal(fit, [])
    settings.write_text(json.dumps(stated))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    whole.write_text(json.dumps(content | {"pre_tokenizer": split}))
    assert "its pre_tokenizer has the unsupported pattern '(a+)+b'" in refusal(fit, [])
    whole.write_text(json.dumps(content | {"model": {"type": "Oracle"}}))
    assert "cannot be read" in refusal(fit, []) or "cannot be used" in refusal(fit, [])
    whole.unlink()
    settings.write_text(json.dumps(stated | {"tokenizer_class": "ByT5Tokenizer"}))
    assert "ByT5Tokenizer has no supported vocabulary" in refusal(fit, [])


def test_a_model_that_is_none_is_a_line(tmp_path):
    piece_model(tmp_path / "endless", eos_id=-1)
    (tmp_path / "text.model").write_text("no model")
    for name, line in (("none", "No such file"), ("text", "not a SentencePiece model"), ("endless", "no end token")):
        with pytest.raises(UserError, match=rf"{name}\.model.*{line}") as caught:
            PretrainedTokenizer(path=str(tmp_path / f"{name}.model")).fit([])
        assert "\n" not in str(caught.value)
