"""--json-schema, --regex and --choice: in each command and in Python, for each kind of tokenizer, and wrong input."""

import builtins
import json
import re
import warnings
from typing import Any

import hugging
import pytest
import torch
import transformers
from chats import saved_chat
from tiny_checkpoints import FILES, IMAGES

import vlm
from vlm.cli.main import run
from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.subwords import WordPieceTokenizer
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from vlm.decoding.continuation import continue_texts
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.command_options import GenerationOptions
from vlm.models.decoder import Decoder
from vlm.models.pretrained.folder import Folder
from vlm.nn.position import RotaryPositions

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
GENERATE = ["generate", "--prompt", "A large", "--prompt", "a", "-c", str(FILES / "language_modeling.ckpt")]
CAPTION = ["caption", *IMAGES, "-c", str(FILES / "captioning.ckpt")]
ANSWER = ["answer", *IMAGES, "--question", "a cross?", "-c", str(FILES / "image_questions.ckpt")]
EXACT = ["--device", "cpu", "--precision", "fp32", "--format", "jsonl"]


def run_command(capsys: Any, *words: str) -> list[dict[str, Any]]:
    assert run([*words, *EXACT]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def schema(tmp_path: Any) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


@pytest.mark.parametrize(("command", "field"), [(GENERATE, "text"), (CAPTION, "caption"), (ANSWER, "answer")])
def test_commands_write_one_of_the_choices(capsys: Any, command: list[str], field: str) -> None:
    records = run_command(capsys, *command, "--choice", "no, never", "--choice", "yes é")
    assert len(records) == len(IMAGES if command is not GENERATE else "AB")
    assert {record[field] for record in records} <= {"no, never", "yes é"}


def test_a_command_writes_json_of_a_schema(capsys: Any, schema: str) -> None:
    for record in run_command(capsys, *GENERATE, "--json-schema", schema, "--max-tokens", "500"):
        jsonschema.validate(json.loads(record["text"]), SCHEMA)


def test_each_of_several_texts_matches_a_pattern(capsys: Any) -> None:
    for command, field in ((GENERATE, "text"), (CAPTION, "caption")):
        records = run_command(capsys, *command, "--regex", "[a-z]{2}[0-9]", "--results", "3", "--sample")
        assert all(re.fullmatch("[a-z]{2}[0-9]", record[field]) for record in records)
        assert len(records) in (6, 9) and len({record[field] for record in records}) > 1


def test_python_takes_dictionaries_and_lists_and_gives_the_texts_of_the_command(capsys: Any, schema: str) -> None:
    model = vlm.load(FILES / "language_modeling.ckpt", device="cpu", precision="fp32")
    texts = model.generate(["A large", "a"], json_schema=SCHEMA, max_tokens=500)
    records = run_command(capsys, *GENERATE, "--json-schema", schema, "--max-tokens", "500")
    assert [text.text for text in texts] == [record["text"] for record in records]
    assert model.generate("x", choice=["yes"]).text == "yes"
    captioner = vlm.load(FILES / "captioning.ckpt", device="cpu", precision="fp32")
    plain, masked = captioner.caption(IMAGES[0]), captioner.caption(IMAGES[0], regex="(?s).*")
    assert plain.text == masked.text  # a mask that allows all changes nothing
    assert masked.logprob == pytest.approx(plain.logprob, abs=1e-4)


def test_a_conversation_in_the_terminal_and_in_a_batch_keeps_to_its_grammar(tmp_path: Any) -> None:
    torch.manual_seed(5)
    saved_chat(tmp_path, "chatml", room=512)
    chat = vlm.load(tmp_path, device="cpu", precision="fp32").chat(choice=["left", "right"], seed=1)
    assert {chat.say(question) for question in ("a", "b", "c")} <= {"left", "right"}
    assert chat.reply.ended and len(chat.exchanges) == 3


def test_texts_that_are_cut_are_counted(capsys: Any) -> None:
    assert run([*GENERATE, *EXACT, "--regex", "a{40}b", "--max-tokens", "9"]) == 0
    assert "note: 2 of 2 texts end before they match --regex; a larger --max-tokens" in capsys.readouterr().err
    model = vlm.load(FILES / "language_modeling.ckpt", device="cpu")
    with pytest.warns(UserWarning, match="1 of 1 texts end before they match --regex"):
        model.generate("x", regex="a{40}b", max_tokens=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("x", regex="a{8}b", max_tokens=9)


TOKENIZERS = {
    "bytes": lambda folder: ByteTokenizer(),
    "characters": lambda folder: CharTokenizer().fit(['{"name": truefalse}é 日']),
    "SentencePiece": lambda folder: SentencePieceTokenizer(vocab_size=320).fit(hugging.TEXTS),
    "SentencePiece without bytes": lambda folder: SentencePieceTokenizer(
        vocab_size=120, model_type="unigram", byte_fallback=False
    ).fit([*hugging.TEXTS, '{"name": "", "ok": true, false}é']),
    "byte-level BPE": lambda folder: _save_model(folder, hugging.byte_pairs()),
    "Llama": lambda folder: _save_model(folder, _llama()),
}


def _llama() -> Any:
    """A BPE with byte fallback whose decoder removes a space at the beginning."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz!"]
    pieces += ["▁a", "an", "▁m", "▁man"]
    merges = [("▁", "a"), ("a", "n"), ("▁", "m"), ("▁m", "an")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names)


def _save_model(folder: Any, tokenizer: Any) -> Any:
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 32, "n_embd": 24, "n_layer": 1, "n_head": 3}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    hugging.wide(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))).save_pretrained(folder)
    return read_tokenizer(Folder(folder))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_of_every_kind_of_tokenizer_match(name: str, tmp_path: Any) -> None:
    tokenizer = TOKENIZERS[name](tmp_path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "max_len": 1024, "dim": 16, "depth": 1, "num_heads": 2}
    decoder = Decoder(**sizes, positions=RotaryPositions(head_dim=8)).eval()
    cases: list[dict[str, Any]] = [{"json_schema": SCHEMA}, {"choice": ["a man", "é"]}, {"regex": "a[a-z ]{3,9}!"}]
    for values in cases:
        grammar = GenerationOptions(**values).build_grammar(tokenizer, [tokenizer.eos_id])
        tokens: list[list[int]] = [[] for _ in range(6)]
        for step in continue_texts(
            decoder,
            [[number + 5] for number in range(6)],
            sampling=Sampling(),
            max_tokens=900,
            eos_id=tokenizer.eos_id,
            seed=0,
            grammars=[grammar] * 6,
        ):
            for item in step:
                tokens[item.prompt].append(item.token)
        for text in map(tokenizer.decode, tokens):
            if "json_schema" in values:
                jsonschema.validate(json.loads(text), SCHEMA)
            elif "choice" in values:
                assert text in values["choice"]
            else:
                assert re.fullmatch(values["regex"], text)


def test_a_tokenizer_that_adds_spaces_is_refused() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "red", "circle"]
    ids = {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "mask": 4}
    options = {"clean_text": True, "chinese_chars": True, "strip_accents": None, "lower": True, "longest_word": 100}
    tokenizer = WordPieceTokenizer.of(pieces, special=range(5), **ids, **options)
    with pytest.raises(UserError, match="--choice: this model's tokenizer adds spaces"):
        GenerationOptions(choice=["red circle"]).build_grammar(tokenizer, [3])


WRONG = {
    "two grammars": (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
    "beams": (["--regex", "a", "--beam", "2"], "--regex and --beam exclude each other"),
    "words": (["--choice", "a", "--ban", "b"], "--choice and --ban exclude each other"),
    "minimum": (["--choice", "a", "--min-tokens", "3"], "--choice and --min-tokens exclude each other"),
    "pattern": (["--regex", "(a"], "--regex: cannot be used: unclosed group"),
    "no file": (["--json-schema", "absent.json"], "--json-schema absent.json: cannot be read (No such file"),
    "no JSON": (["--json-schema", "broken.json"], "--json-schema broken.json: is not JSON ("),
    "no object": (["--json-schema", "list.json"], "--json-schema list.json: is not a JSON object"),
    "keyword": (["--json-schema", "unique.json"], 'cannot be used: Unimplemented keys: ["uniqueItems"]'),
    "replaced": (["--json-schema", "good.json", "--out", "good.json"], "good.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_refused_in_a_line(name: str, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "unique.json").write_text('{"type": "array", "uniqueItems": true}')
    (tmp_path / "good.json").write_text("{}")
    words, line = WRONG[name]
    assert run([*GENERATE, *words]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
    assert (tmp_path / "good.json").read_text() == "{}"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: Any, capsys: Any) -> None:
    imported = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert run([*GENERATE, "--choice", "a"]) == 2
    assert 'need the package llguidance; pip install "vlm-lightning[structured]"' in capsys.readouterr().err


def test_python_refuses_other_types() -> None:
    model = vlm.load(FILES / "language_modeling.ckpt", device="cpu")
    for values in ({"json_schema": "schema.json"}, {"choice": "yes"}, {"regex": 3}):
        with pytest.raises(vlm.Error, match=f"^{next(iter(values))}: "):
            model.generate("x", **values)
