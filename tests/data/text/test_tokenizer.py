"""Tokenizers: nothing is lost, nothing depends on chance, and a state that is not whole is refused."""

import io
import itertools
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_data import SHARED, needs_shared

from vlm.data.text import tokenizer as module
from vlm.data.text.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    tokenizer_from_state,
)
from vlm.errors import UserError

ROOT = Path(__file__).parents[3]
CAPTIONS = ["Two red squares above a café.", "A small blue circle, left of a <s> sign", "你好，世界 مرحبا"]
MARK, TRAINER_UNKNOWN = "\u2581", "\u2585"
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<0x41>", "<0x0A>"]
AWKWARD = [
    *SPECIALS, MARK, TRAINER_UNKNOWN, " ", "  ", "\n", "\r\n", "\t", "\0", "\u2028", "\ufeff", "\ufffd", "\U0010ffff",
    "e\u0301", "é", "İ", "ß", "👩‍👩‍👧‍👦", "你好", "مرحبا", "a", "Red", "square",
]  # fmt: skip
CLASSES = (ByteTokenizer, CharTokenizer, SentencePieceTokenizer)
MAKERS = {"bytes": ByteTokenizer, "char": CharTokenizer}
MAKERS |= {name: partial(SentencePieceTokenizer, model_type=name) for name in ("unigram", "bpe")}
FITTED = {name: make().fit(CAPTIONS) for name, make in MAKERS.items()}
LOWERED = {name: make(lowercase=True).fit(CAPTIONS) for name, make in MAKERS.items()}
any_text = st.text() | st.lists(st.sampled_from(AWKWARD) | st.text(max_size=3), max_size=12).map("".join)
each = pytest.mark.parametrize("name", MAKERS)
modest = settings(derandomize=True, max_examples=40)


def content_ids(tokenizer: Tokenizer) -> set[int]:
    specials = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id}
    return set(range(tokenizer.vocab_size)) - specials


@each
@modest
@given(text=any_text)
@example(text="a".join(piece * 2 for piece in AWKWARD))
def test_any_text_comes_back(name, text):
    ids = FITTED[name].encode(text)
    assert FITTED[name].decode(ids) == text
    assert set(ids) <= content_ids(FITTED[name])
    # Lower-casing loses case alone.
    assert LOWERED[name].decode(LOWERED[name].encode(text)) == text.lower()


@each
@settings(modest, max_examples=15)
@given(captions=st.lists(any_text, min_size=1, max_size=4), text=any_text)
def test_any_captions_can_be_learnt(name, captions, text):
    tokenizer = MAKERS[name]().fit([*captions, "x"])  # SentencePiece needs one character that it does not reserve
    for sample in (*captions, text):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample


@pytest.mark.parametrize("name", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_special_strings_in_captions_are_text(name, byte_fallback):
    # The trainer skips these strings, so their characters stand elsewhere too.
    captions = [f"a {special} b" for special in SPECIALS] * 20 + [" ".join("".join(SPECIALS))]
    tokenizer = MAKERS[name](byte_fallback=byte_fallback).fit(captions)
    for text in (*captions, *SPECIALS):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) > 1 and set(ids) <= content_ids(tokenizer)
    # The byte 0x41 is the letter A; the six characters "<0x41>" are not.
    assert tokenizer.encode("<0x41>") != tokenizer.encode("A")


def test_bytes_are_those_of_utf8_and_characters_positions_in_the_sorted_set():
    text = "".join(AWKWARD)
    first = min(content_ids(FITTED["bytes"]))
    assert [id - first for id in FITTED["bytes"].encode(text)] == list(text.encode())
    assert FITTED["bytes"].vocab_size == 256 + 3
    tokenizer, chars = FITTED["char"], sorted(set("".join(CAPTIONS)))
    first = tokenizer.vocab_size - len(chars)
    for caption in CAPTIONS:
        assert [id - first for id in tokenizer.encode(caption)] == [chars.index(char) for char in caption]
    assert len(tokenizer.encode("🦊")) == len("🦊".encode())


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_sentencepiece_itself_reads_the_model_alike(name):
    tokenizer = FITTED[name]
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.state()["learned"].encode("latin1"))
    for caption in CAPTIONS:
        assert tokenizer.encode(caption) == model.encode(caption)
        assert model.decode(tokenizer.encode(caption)) == caption
    assert tokenizer.vocab_size == model.vocab_size()
    for special in ("pad_id", "bos_id", "eos_id", "unk_id"):
        assert getattr(tokenizer, special) == getattr(model, special)()


@each
def test_special_ids_decode_to_nothing_and_others_are_checked(name):
    tokenizer = FITTED[name]
    pad, bos, eos = tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id
    assert len({pad, bos, eos}) == 3
    assert tokenizer.decode([bos, *tokenizer.encode("a b"), eos, pad, pad]) == "a b"
    assert tokenizer.decode([]) == "" and tokenizer.encode("") == []
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"id {id} is outside"):
            tokenizer.decode([id])
        with pytest.raises(ValueError, match=f"id {id} is outside"):
            tokenizer.piece(id)


@each
def test_bytes_that_are_no_utf8_do_not_raise(name):
    ids = FITTED[name].encode("🦊")
    assert len(ids) == 4
    assert FITTED[name].decode(ids[:3]) == "\ufffd"
    assert FITTED[name].decode([*ids[3:], *FITTED[name].encode("a")]) == "\ufffda"


def test_pieces_are_printable():
    for tokenizer in FITTED.values():
        pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
        assert all(piece.isprintable() and piece for piece in pieces) and pieces[tokenizer.pad_id] == "<pad>"
    shown = {"char": ["é", MARK, "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"], "bytes": ["a", "\\n", "<0xC3>", "<0xA9>"]}
    for (name, pieces), text in zip(shown.items(), ("é 🦊", "a\né"), strict=True):
        assert [FITTED[name].piece(id) for id in FITTED[name].encode(text)] == pieces


@each
def test_lone_surrogates_are_refused(name):
    for use in (FITTED[name].encode, lambda text: CharTokenizer().fit(["a", text])):
        with pytest.raises(UserError, match=r"'\\ud83d', half of a surrogate pair") as caught:
            use("a \ud83d b")
        str(caught.value).encode()  # stderr could not print the surrogate itself


@pytest.mark.parametrize("cls", [CharTokenizer, SentencePieceTokenizer])
def test_no_captions_is_the_users_to_mend(cls):
    with pytest.raises(UserError, match="no text to learn a tokenizer from; add text"):
        cls().fit([])
    with pytest.raises(RuntimeError, match="call fit first"):
        cls().encode("a")
    if cls is SentencePieceTokenizer:
        with pytest.raises(UserError, match="texts are empty"):
            cls().fit(["", "\n"])


WRONG = [({"model_type": "word"}, "tokenizer.model_type: 'word'.*unigram or bpe")]
WRONG += [({"vocab_size": 261}, "tokenizer.vocab_size: 261 does not exceed")]
WRONG += [({"vocab_size": 6, "byte_fallback": False}, "tokenizer.vocab_size: 6 does not exceed")]
WRONG += [({"character_coverage": share}, f"tokenizer.character_coverage: {share}") for share in (0.9, 1.01)]
WRONG += [({"vocab_size": 262}, r"tokenizer.vocab_size: 262 is too small .* set tokenizer.vocab_size=1\d{3}, or")]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_name_their_key(options, message):
    with pytest.raises(UserError, match=message):
        SentencePieceTokenizer(**options).fit(CAPTIONS)


@each
def test_fitting_is_deterministic(name):
    again = MAKERS[name]().fit(iter(CAPTIONS))
    assert again.state() == FITTED[name].state()
    assert again.fingerprint != LOWERED[name].fingerprint
    assert len({tokenizer.fingerprint for tokenizer in FITTED.values()}) == len(FITTED)


def test_fitting_is_the_same_in_another_process():
    code = (
        "import sys; from vlm.data.text.tokenizer import *\n"
        "assert not {'torch', 'numpy', 'sentencepiece'} & set(sys.modules)\n"
        f"for cls in (CharTokenizer, SentencePieceTokenizer): print(cls().fit({CAPTIONS!r}).fingerprint)"
    )
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [FITTED["char"].fingerprint, FITTED["bpe"].fingerprint], done.stderr


def test_training_is_quiet(capfd):
    for name in MAKERS:
        MAKERS[name]().fit([*CAPTIONS, "x" * 20_000, ""])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("make", [MAKERS["unigram"], MAKERS["bpe"]])
@pytest.mark.parametrize(
    "around", ["{}", "<s>{}", "\t{}\n", f"{MARK}{{}}", f"{TRAINER_UNKNOWN} {{}}", "好" * 9000 + " {}"]
)
def test_no_training_text_is_dropped(make, around):
    # A word that only these captions hold becomes a piece, whatever stands beside it.
    tokenizer = make(character_coverage=1.0).fit(["a b", *[around.format("zebra zebras")] * 3])
    assert any("zebra" in tokenizer.piece(id) for id in range(tokenizer.vocab_size))


def test_byte_fallback_off_saves_its_ids_and_has_an_unknown():
    tokenizer = SentencePieceTokenizer(byte_fallback=False, character_coverage=1.0).fit(["a dog", "a cat\n"])
    assert tokenizer.vocab_size < 30
    assert tokenizer.decode(tokenizer.encode("a dog\na cat")) == "a dog\na cat"
    a = tokenizer.encode("a")
    for unknown in ("ж", MARK):
        assert tokenizer.encode(f"a{unknown}a") == [*a, tokenizer.unk_id, *a]
        assert tokenizer.decode(tokenizer.encode(f"a{unknown}a")) == "a\ufffda"
        assert tokenizer.unk_id not in FITTED["unigram"].encode(unknown)


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_vocabulary_is_bounded_and_pieces_are_longer_than_letters(name):
    words = ["".join(pair) for pair in itertools.product(("ba", "ko", "ri", "mu"), ("lint", "dras", "fep"))]
    captions = [" ".join(pair) for pair in itertools.permutations(words, 2)]
    tokenizer = MAKERS[name](vocab_size=300).fit(captions)
    assert tokenizer.vocab_size <= 300
    assert sum(len(tokenizer.encode(caption)) for caption in captions) <= 5 * len(captions)


@each
def test_state_survives_a_checkpoint(name):
    for tokenizer in (FITTED[name], LOWERED[name]):
        torch.save(tokenizer.state(), file := io.BytesIO())
        rebuilt = tokenizer_from_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        assert type(rebuilt) is type(tokenizer)
        assert rebuilt.state() == tokenizer.state() and rebuilt.fingerprint == tokenizer.fingerprint
        for text in (*CAPTIONS, "".join(AWKWARD)):
            assert rebuilt.encode(text) == tokenizer.encode(text)
        assert pickle.loads(pickle.dumps(tokenizer)).encode("A dog") == tokenizer.encode("A dog")


DAMAGES = [
    lambda state: state | {"learned": state["learned"][:-1] + "!"},
    lambda state: state | {"learned": state["learned"].encode("latin1")},
    lambda state: state | {"fingerprint": "0" * 64},
    lambda state: state | {"options": state["options"] | {"lowercase": True}},
    lambda state: state | {"options": state["options"] | {"depth": 3}},
    lambda state: state | {"options": None},
    lambda state: {key: value for key, value in state.items() if key != "fingerprint"},
    lambda state: {},
    lambda state: None,
]
FOREIGN = ["Tokenizer", "Path", "os:system", "vlm.data.text.tokenizer.CharTokenizer", ["x"], None]


@each
def test_damaged_states_are_refused(name):
    for damage in DAMAGES:
        with pytest.raises(UserError, match="tokenizer is damaged"):
            tokenizer_from_state(damage(FITTED[name].state()))
    for foreign in FOREIGN:
        with pytest.raises(UserError, match="tokenizer"):
            tokenizer_from_state(FITTED[name].state() | {"class": foreign})


@pytest.mark.parametrize("cls", CLASSES)
def test_contents_that_fit_only_their_fingerprint_are_refused(cls):
    # Somebody else's model with a right hash: every class checks what it is given, and none crashes.
    for learned in (b"ba", b"\xff\xfe", b"\0" * 64):
        state = {"class": cls.__name__, "options": {"lowercase": False}, "learned": learned.decode("latin1")}
        fingerprint = module.compute_fingerprint(cls.__name__, {"lowercase": False}, learned)
        with pytest.raises(UserError, match="tokenizer is damaged"):
            tokenizer_from_state(state | {"fingerprint": fingerprint})


@pytest.mark.parametrize("name", ["char", "unigram", "bpe"])
def test_cache_is_read_instead_of_learning_and_a_damaged_one_is_learnt_again(name, tmp_path, monkeypatch):
    first = MAKERS[name]().fit(CAPTIONS, cache=tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-9], whole[:80] + b"?" + whole[81:]):
        file.write_bytes(damaged)
        assert MAKERS[name]().fit(CAPTIONS, cache=tmp_path / "new").state() == FITTED[name].state()
        assert file.read_bytes() == whole
    monkeypatch.setattr(type(first), "_learn", lambda *_: pytest.fail("the cache was not used"))
    assert MAKERS[name]().fit(iter(CAPTIONS), cache=tmp_path / "new").state() == FITTED[name].state()


def test_cache_is_keyed_by_captions_and_every_option(tmp_path):
    variants = [{}, {"lowercase": True}, {"model_type": "unigram"}, {"vocab_size": 400}]
    variants += [{"byte_fallback": False}, {"character_coverage": 0.99}]
    for captions in (CAPTIONS, CAPTIONS[::-1], ["".join(CAPTIONS)]):
        for options in variants:
            SentencePieceTokenizer(**options).fit(captions, cache=tmp_path)
        CharTokenizer().fit(captions, cache=tmp_path)
    SentencePieceTokenizer(lowercase=False, vocab_size=8000).fit(CAPTIONS, cache=tmp_path)
    names = [file.name for file in tmp_path.iterdir()]
    assert len(names) == 3 * (len(variants) + 1)
    assert all(re.fullmatch(r"[0-9a-f]{64}\.tokenizer", name) for name in names)


def test_cache_that_cannot_be_written_costs_only_time(tmp_path, capsys):
    (tmp_path / "file").touch()
    tokenizer = CharTokenizer().fit(CAPTIONS, cache=tmp_path / "file")
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and "the tokenizer could not be cached (" in said and said.count("\n") == 1
    assert tokenizer.state() == FITTED["char"].state()


# A pretrained one has its files for options; words are other values of sentencepiece.
CONFIGS = [ROOT / "conf" / "tokenizer" / f"{name}.yaml" for name in ("bytes", "char", "sentencepiece")]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_configs_say_every_option_and_its_default(file):
    options = yaml.safe_load(file.read_text())
    cls = {f"{module.__name__}.{cls.__name__}": cls for cls in CLASSES}[options.pop("_target_")]
    assert options.pop("mask") is False  # kept where it is true alone: other tokenizers keep their fingerprints
    assert cls(**options)._options == cls()._options == options


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_space_is_one_id_even_where_training_had_none(name):
    tokenizer = MAKERS[name]().fit(["你好" * 5000 + " 世"])
    assert len(tokenizer.encode("你 好")) == 3
    assert tokenizer.decode(tokenizer.encode(f"你 {MARK}")) == f"你 {MARK}"
    assert len(MAKERS[name]().fit(["x"]).encode(" ")) == 1


@pytest.mark.slow
@needs_shared("flickr8k")
def test_photo_captions_come_back():
    file = SHARED / "flickr8k" / "Flickr8k.token.txt"
    captions = [line.partition("\t")[2] for line in file.read_text().splitlines()][:12_000]
    tokenizer = SentencePieceTokenizer().fit(captions[:10_000])
    encoded = [tokenizer.encode(caption) for caption in captions]
    assert 2000 < tokenizer.vocab_size <= 8000 and [tokenizer.decode(ids) for ids in encoded] == captions
    # About one id a word: what the subwords are for.
    assert sum(map(len, encoded)) < 1.4 * sum(len(caption.split()) for caption in captions)
