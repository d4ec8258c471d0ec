"""GGUF files: the logits, ids and texts of `transformers` with the same weights, at every place that takes a folder."""

import weakref

import chats
import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from gguf_files import DECODERS, decoder, dequantise, save_gguf
from hugging import TEXTS, byte_pairs
from tokenizers import normalizers, pre_tokenizers

import vlm
from vlm.checkpoint.file import write
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.pretrained.gguf import file as gguf_file
from vlm.models.pretrained.gguf.file import TYPES
from vlm.tasks.language_modeling.predict import TextGenerator

KINDS = [kind for kind in TYPES if kind in gguf.GGMLQuantizationType.__members__]  # older versions have fewer
LINES = [
    *TEXTS[:4],
    "  two  spaces\ttab\r\n\n lines   12 and 3456 7",
    "Zürich Ελλάδα 東京 हिन्दी \U0001f642\u200d e\u0301 don't WE'LL",
    "x" * 90,
]


def logits(path, tokens):
    ours = load_model(read(path))
    return ours.head(ours(tokens))


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_theirs(tmp_path, name):
    torch.manual_seed(1)
    theirs, tokenizer = decoder(name)
    save_gguf(tmp_path / "a.gguf", theirs, tokenizer)
    tokens = torch.randint(len(tokenizer), (2, 100))
    truth = theirs(tokens).logits
    torch.testing.assert_close(logits(tmp_path / "a.gguf", tokens), truth, rtol=0, atol=1e-4)
    if name == "llama3":  # which matters at this length
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(decoder("tied", head_dim=16)[0].config)
        assert (theirs(tokens).logits - truth).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_those_of_the_library(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(gguf_file, "VALUES_AT_ONCE", 5000)  # so that even these tensors are dequantised in parts
    torch.manual_seed(2)
    theirs, tokenizer = decoder("tied", width=256, num_hidden_layers=1, head_dim=64)
    exact = {name: weight.clone() for name, weight in theirs.named_parameters()}
    save_gguf(tmp_path / "a.gguf", theirs, tokenizer, kind=kind)
    tokens = torch.randint(len(tokenizer), (2, 40))
    truth = dequantise(tmp_path / "a.gguf", theirs)(tokens).logits
    torch.testing.assert_close(logits(tmp_path / "a.gguf", tokens), truth, rtol=0, atol=1e-4)
    assert truth.isfinite().all() and truth.std() > 0.1
    steps = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 2**-7, "Q4_0": 2**-3, "Q4_1": 2**-3}
    steps |= {"Q5_0": 2**-4, "Q5_1": 2**-4}
    if kind in steps:
        for name, weight in theirs.named_parameters():
            assert (weight - exact[name]).abs().max() <= steps[kind] * exact[name].abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.qint8])
def test_few_tensors_are_in_memory_while_they_are_converted(tmp_path, dtype, monkeypatch):
    theirs, tokenizer = decoder("tied", num_hidden_layers=12)
    save_gguf(tmp_path / "a.gguf", theirs, tokenizer)
    original, alive, counts = gguf_file.read_tensor, weakref.WeakSet(), []

    def count_alive(location):
        tensor = original(location)
        alive.add(tensor)
        counts.append(len(alive))
        return tensor

    monkeypatch.setattr(gguf_file, "read_tensor", count_alive)
    read(tmp_path / "a.gguf", dtype=dtype)
    assert len(counts) > 100
    assert max(counts) <= 9  # three tensors are joined at most; they are in use, read, and being read


def test_a_tokenizer_that_was_read_is_built_once(tmp_path):
    theirs, tokenizer = decoder("tied")
    save_gguf(tmp_path / "a.gguf", theirs, tokenizer)
    loaded = read(tmp_path / "a.gguf")
    write(tmp_path / "a.ckpt", loaded)  # without the tokenizer itself
    state = loaded["vlm"]["tokenizer"]
    tokenizers = [*(tokenizer_from_state(state) for _ in range(3))]
    tokenizers.append(tokenizer_from_state(read(tmp_path / "a.ckpt")["vlm"]["tokenizer"]))
    assert len({id(built) for built in tokenizers}) == 4  # each user may change its own
    for built in tokenizers:
        assert [built.encode(line) for line in LINES] == [
            tokenizer(line, add_special_tokens=False)["input_ids"] for line in LINES
        ]
        assert built.state() == state


def test_every_type_that_the_library_dequantises_is_read():
    def is_dequantised(kind):
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    assert set(KINDS) == {kind.name for kind in gguf.GGMLQuantizationType if is_dequantised(kind)}


def cut(pre):
    """The pre-tokenizer of a name, by the library's own parts; and the normaliser."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = {
        "gpt-2": [whole],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), whole],
        "refact": [pre_tokenizers.Digits(individual_digits=True), whole],
        "smaug-bpe": [pre_tokenizers.Split(tokenizers.Regex(words + "{1,3}" + rest), "isolated")],
        "llama-bpe": [pre_tokenizers.Split(tokenizers.Regex(words + "{1,3}" + rest), "isolated")],
        "qwen2": [pre_tokenizers.Split(tokenizers.Regex(words + rest), "isolated")],
    }[pre]
    if pre in ("llama-bpe", "smaug-bpe", "qwen2"):
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(parts), normalizers.NFC() if pre == "qwen2" else None


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "refact", "llama-bpe", "smaug-bpe", "qwen2"])
def test_ids_are_those_of_the_named_pre_tokenizer(tmp_path, pre):
    texts = [*TEXTS, *LINES * 3, "e\u0301 12 345 6789   10"]
    theirs, others = byte_pairs(400, texts), byte_pairs(400, texts)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    theirs.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    inner = theirs.backend_tokenizer
    inner.pre_tokenizer, normal = cut(pre)
    if normal:
        inner.normalizer = normal
    save_gguf(tmp_path / "a.gguf", decoder(tokenizer=theirs)[0], theirs, pre=pre)
    ours = TextGenerator(tmp_path / "a.gguf").tokenizer
    differ = 0
    for line in [*LINES, "a <tool> b"]:
        ids = theirs(line).input_ids
        assert ours.encode(line) == ids, line
        assert ours.decode(ids) == theirs.decode(ids)
        differ += ids != others(line).input_ids
    assert differ > (pre != "gpt-2")
    assert theirs.convert_tokens_to_ids("<|im_start|>") not in ours.encode("<|im_start|>")  # in a text it is text
    assert ours.decode([theirs.convert_tokens_to_ids("<|im_start|>")]) == ""
    assert ours.starts == ([theirs.bos_token_id] if pre == "llama-bpe" else [])


def test_pieces_are_those_of_sentencepiece(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXTS))
    options = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(input=str(corpus), model_prefix=str(tmp_path / "m"), **options)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    save_gguf(tmp_path / "a.gguf", decoder(vocab_size=theirs.get_piece_size())[0], theirs)
    ours = TextGenerator(tmp_path / "a.gguf").tokenizer
    assert ours.starts == [theirs.bos_id()] and ours.eos_id == theirs.eos_id()
    for line in LINES:
        assert ours.encode(line) == theirs.encode(line)
        assert ours.decode(theirs.encode(line)) == theirs.decode(theirs.encode(line)) == line


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(4)
    model, tokenizer = decoder("tied")
    save_gguf(tmp_path / "small.gguf", model, tokenizer, kind="Q8_0")
    return tmp_path / "small.gguf"


@pytest.mark.slow
def test_every_command_takes_a_file(file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(TEXTS)
    (tmp_path / "a.txt").write_text(lines)
    assert command(["info", "-c", str(file)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert command(["generate", "-c", str(file), "--prompt", "a man", "--greedy", "--max-tokens", "9"]) == 0
    text = capsys.readouterr().out
    assert command(["import", str(file), "--out", "one.ckpt"]) == 0
    assert command(["export", "out", "-c", str(file)]) == 0
    capsys.readouterr()
    for place in ("one.ckpt", "out"):
        assert command(["generate", "-c", place, "--prompt", "a man", "--greedy", "--max-tokens", "9"]) == 0
        assert capsys.readouterr().out == text
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    tokens = torch.randint(300, (1, 60))
    with torch.no_grad():
        torch.testing.assert_close(logits(file, tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    scores = []
    data = ["data=text", f"data.path={tmp_path / 'a.txt'}", "data.max_len=32", "trainer=cpu"]
    for place in (str(file), "one.ckpt"):
        assert command(["evaluate", "-c", place, "task=language_modeling", *data]) == 0
        printed = capsys.readouterr().out
        scores.append([line for line in printed.splitlines() if "bits" in line])
        assert "was selected by" not in printed
    assert scores[0] == scores[1] and scores[0]


def test_a_file_converses_as_its_folder_does(tmp_path):
    folder = tmp_path / "folder"
    tokenizer = chats.saved_chat(folder, "chatml")
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    values = {"tokenizer.chat_template": tokenizer.chat_template}
    save_gguf(tmp_path / "a.gguf", model, tokenizer, pre="smollm", values=values)
    said = []
    for path in (folder, tmp_path / "a.gguf"):
        chat = vlm.load(path, device="cpu", precision="fp32").chat(sample=False, max_tokens=12)
        said.append([chat.say("what is it?"), chat.say("why 3?"), chat.tokens()])
    assert said[0] == said[1]


@torch.no_grad()
def test_any_part_names_a_split_file(tmp_path):
    torch.manual_seed(5)
    theirs, tokenizer = decoder("llama")
    save_gguf(tmp_path / "a.gguf", theirs, tokenizer, split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"a-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    tokens = torch.randint(len(tokenizer), (2, 40))
    for part in parts:
        torch.testing.assert_close(logits(part, tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    parts[1].rename(tmp_path / "b.gguf")
    for part in (parts[0], parts[2]):
        with pytest.raises(UserError, match=r"is one of 3 parts; put a-00002-of-00003.gguf next to it"):
            read(part)
    with pytest.raises(UserError, match=r"split.count is 3, but its name does not end with -NNNNN-of-00003.gguf"):
        read(tmp_path / "b.gguf")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_with_the_token_that_the_header_names(tmp_path, pre, begins):
    values = {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.bos_token_id": 5}
    save_gguf(tmp_path / "a.gguf", *decoder("tied"), pre=pre, values=values)
    assert [*TextGenerator(tmp_path / "a.gguf").tokenizer.starts] == ([5] if begins else [])


def test_recommended_sampling_options_are_defaults(tmp_path):
    """The converter makes them of generation_config.json, so the folder of the same model has the same ones."""
    options = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    names = dict(zip(options, ("temp", "top_k", "top_p", "min_p", "penalty_repeat"), strict=True))
    model, tokenizer = decoder("tied")
    values = {f"general.sampling.{names[name]}": value for name, value in options.items()}
    save_gguf(tmp_path / "a.gguf", model, tokenizer, values=values | {"tokenizer.ggml.suppress_tokens": [3, 9]})
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    model.generation_config.bad_words_ids = [[3], [9]]
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    ours, folder = (read(tmp_path / name)["vlm"]["decoding"] for name in ("a.gguf", "folder"))
    assert ours | {"sample": True} == folder and ours["never"] == [3, 9]


@torch.no_grad()
def test_a_factor_without_a_type_scales_linearly(tmp_path):
    """As llama.cpp has it."""
    model, tokenizer = decoder("tied")
    save_gguf(tmp_path / "a.gguf", model, tokenizer, values={"llama.rope.scaling.factor": 2.0})
    model.config.rope_parameters |= {"rope_type": "linear", "factor": 2.0}
    tokens = torch.randint(300, (2, 40))
    truth = type(model)(model.config).eval()
    truth.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(tmp_path / "a.gguf", tokens), truth(tokens).logits, rtol=0, atol=1e-4)
