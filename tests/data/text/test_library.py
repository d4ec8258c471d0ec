"""Tokenizers of published kinds, trained here with their exact parts: ids and texts as `transformers` has them."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from hugging import TEXTS, byte_pairs, word_pieces
from text_lines import varied_lines
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vlm.data.text.hugging_face import make_tokenizer_files, read_tokenizer
from vlm.data.text.library import PATTERNS, JsonTokenizer
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder

LLAMA3 = next(one for one in PATTERNS if r"\p{N}{1,3}|" in one)
QWEN = next(one for one in PATTERNS if r"\p{L}+|\p{N}| ?" in one)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
IDS = {"pad": 0, "bos": 1, "eos": 2}
LINES = [
    *TEXTS,
    "A man's 2 dogs don't run 12345 times; they'LL WAIT...",
    "  two  spaces\ttab\r\nlines\n\n",
    "Zürich naïve Ελλάδα Привет 東京 العربية हिन्दी \U0001f642\u200d e\u0301 ﬁ",
    "",
    "x" * 50,
]


JOIN = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def bpe(pre, normalizer=None, decoder=None, *, begins=False):
    """Of bytes, or where texts have a decoder of their own, of characters with bytes for others."""
    fallback = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True} if decoder else {}
    made = Tokenizer(models.BPE(**fallback))
    made.pre_tokenizer, made.decoder = pre, decoder or decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = ["<pad>", "<s>", "</s>", *(["<unk>", *(f"<0x{b:02X}>" for b in range(256))] if fallback else [])]
    start = [] if fallback else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=start, special_tokens=special, show_progress=False)
    made.train_from_iterator(LINES * 3, trainer)
    content = json.loads(made.to_str())  # bytes are pieces of the model, none that is special
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))


def isolate(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


def smollm():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return bpe(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def llama2():
    normal = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    join = decoders.Sequence([*JOIN, decoders.Strip(" ", 1, 0)])
    return bpe(pre_tokenizers.Sequence([]), normal, join, begins=True)


def gemma():
    pre = pre_tokenizers.Split(" ", "merged_with_previous")
    return bpe(pre, normalizers.Replace(" ", "\u2581"), decoders.Sequence(JOIN))


def unigram():
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(LINES * 3, trainer)
    return made


KINDS = {"smollm": smollm, "llama2": llama2, "gemma": gemma, "unigram": unigram}
KINDS |= {"llama3": lambda: bpe(isolate(LLAMA3), begins=True), "qwen": lambda: bpe(isolate(QWEN), normalizers.NFC())}


def saved_tokenizer(kind: str, folder: Path):
    """A tokenizer with added tokens that are found in texts, and no special ones."""
    made = KINDS[kind]()
    made.add_tokens([AddedToken("<tool>", normalized=False), "zebra"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.sample(slow=6)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = saved_tokenizer(kind, tmp_path)
    ours = read_tokenizer(Folder(tmp_path), IDS)
    assert isinstance(ours, JsonTokenizer)
    again = tokenizer_from_state(ours.state())
    assert again.fingerprint == ours.fingerprint and ours.vocab_size == len(theirs)
    (tmp_path / "out").mkdir()
    for name, content in make_tokenizer_files(ours).items():
        (tmp_path / "out" / name).write_text(str(content), encoding="utf-8")
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    special = {"<pad>", "<s>", "</s>"}  # text to ours
    lines = [line for line in varied_lines(400) if not any(one in line for one in special)]
    for line in [*LINES, *lines, "a <tool> in a zebra<tool>"]:
        ids = theirs(line, add_special_tokens=False).input_ids
        assert ours.encode(line) == again.encode(line) == ids
        assert ours.decode([1, *ids, 2]) == theirs.decode([1, *ids, 2], skip_special_tokens=True)
        if kind in ("smollm", "llama2", "llama3", "gemma") and not {"\u2581", "<"} & set(line):  # others change a text
            assert b"".join(map(ours.bytes_of, ids)).removeprefix(b" " * (kind == "llama2")) == line.encode()
        assert exported.decode(ids) == theirs.decode(ids)
        assert [*ours.starts, *ids] == theirs(line).input_ids
    assert kind == "unigram" or b"".join(ours._row(id)[0] for id in ours.encode(LINES[-2])) == LINES[-2].encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "gpt2", "bert"])
def test_ids_of_10_000_lines_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    own = {"gpt2": byte_pairs, "bert": word_pieces}  # which ours reads without the library
    theirs = own[kind]() if kind in own else saved_tokenizer(kind, tmp_path)
    theirs.save_pretrained(tmp_path)
    ours, lines = read_tokenizer(Folder(tmp_path), IDS), varied_lines(10_000)
    # The name of a special token in a text is text, as to ours.
    ids = theirs(lines, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    assert [line for line, row in zip(lines, ids, strict=True) if ours.encode(line) != row] == []


def test_rows_of_weights_that_no_piece_has_decode_to_nothing(tmp_path: Path) -> None:
    content = json.loads(smollm().to_str())
    tokenizer = JsonTokenizer.of_file(content, size=700, pad=0, bos=1, eos=2)
    assert tokenizer.vocab_size == 700 and tokenizer.decode([699, *tokenizer.encode("a man"), 650]) == "a man"
    assert tokenizer.encode("a </s>") != [*tokenizer.encode("a "), 2]  # a special token in a text is text


def test_a_sentencepiece_model_alone(tmp_path: Path) -> None:
    model = io.BytesIO()
    options = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "pad_id": 3, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **options)
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    ours = read_tokenizer(Folder(tmp_path), {"pad": 3, "bos": 1, "eos": 2})
    again = tokenizer_from_state(ours.state())
    truth = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for line in [*LINES, *varied_lines(100)]:
        ids = truth.encode(line)
        assert ours.encode(line) == again.encode(line) == ids
        assert ours.decode([1, *ids, 2]) == truth.decode(ids)
    assert list(ours.starts) == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}}), "unsupported pattern"),
        (lambda c: c["model"].update(type="Neural"), "cannot be used"),
        (lambda c: c["added_tokens"].append({**c["added_tokens"][0], "id": 2**31, "content": "far"}), "cannot be used"),
        (lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "cannot be used"),
    ],
    ids=["pattern", "model", "far id", "map"],
)
def test_what_cannot_be_read_is_a_line(tmp_path: Path, change, words: str) -> None:
    content = json.loads(smollm().to_str())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=words) as caught:
        read_tokenizer(Folder(tmp_path), IDS)
    assert "\n" not in str(caught.value)
