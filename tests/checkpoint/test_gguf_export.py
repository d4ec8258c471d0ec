"""Export to GGUF: it is read again as the same model, and has the keys and tensors that llama.cpp reads."""

import json
from copy import deepcopy

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import LLAMA3
from hugging import TEXTS, byte_pairs, gpt2, wide
from llama_cpp_models import LINES, PLAIN, sentence_pieces
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

import vlm
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.models.pretrained.gguf.config import make_tokenizer_files
from vlm.models.pretrained.gguf.write import MAX_F16
from vlm.tasks.language_modeling.predict import TextGenerator

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 128}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 2.0}
FAMILIES = {
    "llama": ("Llama", {"head_dim": 24, "rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {"head_dim": 24, "rope_parameters": PLAIN}),
    "gpt2": ("GPT2", {}),
}
ARCHITECTURES = {"llama3": "llama", "linear": "llama"}


def language_model(name, tokenizer, **options):
    kind, own = FAMILIES[name]
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if name == "gpt2":
        return gpt2(len(tokenizer), tokenizer.eos_token_id, **options)
    config = getattr(transformers, f"{kind}Config")(**SIZES | deepcopy(own | options), vocab_size=len(tokenizer), **ids)
    return wide(getattr(transformers, f"{kind}ForCausalLM")(config), std=0.15, norms="RMSNorm")


def save_model(folder, model, tokenizer, template=None):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def export(folder, out, outtype="f32"):
    assert command(["export", str(out), "-c", str(folder), "--to", "gguf", "--outtype", outtype]) == 0
    return out / f"model-{outtype.upper()}.gguf"


def logits(path, tokens):
    ours = load_model(read(path))
    return ours.head(ours(tokens))


def expected_tensors(architecture, config, *, extra=()):
    """Names of tensors that the library's tables give an architecture, with the suffixes of its parameters."""
    kind = gguf.MODEL_ARCH[architecture.upper()]
    names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]} - {"output", "rope_freqs"}
    names -= {name for name in names if "rot_embd" in name or "exp" in name or "gate_inp" in name}
    if architecture == "llama":
        names -= {"blk.{bid}.attn_rot_embd"}
    numbered = {name.format(bid=bid) for name in names for bid in range(config.num_hidden_layers)}
    return {f"{name}.weight" for name in numbered} | set(extra)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_as_the_same_model(tmp_path, name):
    torch.manual_seed(1)
    tokenizer = byte_pairs(320)
    theirs = language_model(name, tokenizer)
    path = export(save_model(tmp_path / "theirs", theirs, tokenizer, "{{ messages[0]['content'] }}"), tmp_path / "out")
    tokens = torch.randint(len(tokenizer), (2, 30))
    truth = theirs(tokens).logits
    torch.testing.assert_close(logits(path, tokens), truth, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(path, tokens), logits(tmp_path / "theirs", tokens), rtol=0, atol=1e-5)
    ours = TextGenerator(path).tokenizer
    for line in LINES:
        assert ours.encode(line) == tokenizer(line).input_ids
    reader = gguf.GGUFReader(path)
    architecture = ARCHITECTURES.get(name, name)
    value = {key: field.contents() for key, field in reader.fields.items()}
    stated = {
        gguf.Keys.General.ARCHITECTURE: architecture,
        gguf.Keys.General.FILE_TYPE: gguf.LlamaFileType.ALL_F32,
        gguf.Keys.LLM.BLOCK_COUNT.format(arch=architecture): 2,
        gguf.Keys.LLM.EMBEDDING_LENGTH.format(arch=architecture): theirs.config.hidden_size,
        gguf.Keys.LLM.CONTEXT_LENGTH.format(arch=architecture): theirs.config.max_position_embeddings,
        gguf.Keys.LLM.VOCAB_SIZE.format(arch=architecture): len(tokenizer),
        gguf.Keys.Attention.HEAD_COUNT.format(arch=architecture): theirs.config.num_attention_heads,
        gguf.Keys.Tokenizer.MODEL: "gpt2",
        gguf.Keys.Tokenizer.PRE: "gpt-2",
        gguf.Keys.Tokenizer.BOS_ID: tokenizer.bos_token_id,
        gguf.Keys.Tokenizer.EOS_ID: tokenizer.eos_token_id,
        gguf.Keys.Tokenizer.ADD_BOS: False,
        gguf.Keys.Tokenizer.CHAT_TEMPLATE: "{{ messages[0]['content'] }}",
    }
    if name != "gpt2":
        head = getattr(theirs.config, "head_dim", None) or 16
        stated |= {gguf.Keys.Attention.KEY_LENGTH.format(arch=architecture): head}
        stated |= {gguf.Keys.Attention.VALUE_LENGTH.format(arch=architecture): head}
        stated |= {gguf.Keys.Attention.HEAD_COUNT_KV.format(arch=architecture): 2}
    assert stated.items() <= value.items()
    rope = gguf.Keys.Rope.SCALING_FACTOR.format(arch=architecture)
    assert value.get(rope) == (2.0 if name == "linear" else None)
    extra = {"rope_freqs.weight"} if name == "llama3" else set()
    extra |= {"output.weight"} if name in ("llama", "qwen3") else set()
    written = {tensor.name for tensor in reader.tensors}
    assert {tensor for tensor in written if tensor.endswith(".weight")} == expected_tensors(
        architecture, theirs.config, extra=extra
    )
    if name == "qwen2":
        assert {f"blk.1.attn_{part}.bias" for part in "qkv"} <= written
    if name == "gemma":  # llama.cpp multiplies by the weights of norms without adding 1
        stored = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
        np.testing.assert_allclose(stored.data, theirs.model.norm.weight.numpy() + 1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama-cli -m model-F32.gguf" in card and "library_name: gguf" in card


@torch.no_grad()
@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_matrices_are_stored_in_fewer_bits(tmp_path, outtype):
    torch.manual_seed(2)
    tokenizer = byte_pairs(320)
    theirs = language_model("qwen3", tokenizer, intermediate_size=80)  # rows of 80 are no multiple of 32
    path = export(save_model(tmp_path / "theirs", theirs, tokenizer), tmp_path / "out", outtype)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == outtype.upper()
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.1.attn_q_norm.weight"] == "F32"
    assert kinds["blk.1.ffn_down.weight"] == "F16"
    tokens = torch.randint(len(tokenizer), (2, 30))
    ours = load_model(read(path))
    with torch.no_grad():  # the library's own rounding of the folder's weights
        number = gguf.GGMLQuantizationType[outtype.upper()]
        for key, weight in theirs.named_parameters():
            if weight.ndim > 1:
                kind = gguf.GGMLQuantizationType.F16 if weight.shape[-1] % 32 else number
                rounded = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
                assert (torch.from_numpy(rounded) != weight).any(), key
                weight.copy_(torch.from_numpy(rounded))
    torch.testing.assert_close(ours.head(ours(tokens)), theirs(tokens).logits, rtol=0, atol=1e-4)


def pre_tokenizer(name):
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "smollm": lambda: pre_tokenizers.Sequence([digits, whole]),
        "llama-bpe": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(words + "{1,3}" + rest), "isolated"), bare]
        ),
        "qwen2": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words + rest), "isolated"), bare]),
    }[name.replace("smaug-bpe", "llama-bpe")]()


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "smaug-bpe", "qwen2"])
def test_tokenizers_go_out_by_llama_cpps_names_and_come_back(tmp_path, pre):
    theirs = byte_pairs(400, [*TEXTS, *LINES])
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    theirs.add_tokens([AddedToken("<tool>", normalized=False)])
    content = json.loads(theirs.backend_tokenizer.to_str())
    content["model"]["ignore_merges"] = pre == "llama-bpe"
    inner = Tokenizer.from_str(json.dumps(content))
    inner.pre_tokenizer = pre_tokenizer(pre)
    end = theirs.eos_token
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    if pre == "llama-bpe":
        start = [(end, theirs.eos_token_id)]
        inner.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=start)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=end, eos_token=end, unk_token=end)
    path = export(save_model(tmp_path / "a", language_model("qwen2", theirs), theirs), tmp_path / "out")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert fields["tokenizer.ggml.pre"] == pre
    assert fields["tokenizer.ggml.add_bos_token"] == (pre == "llama-bpe")
    kinds = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    assert (kinds["<|im_start|>"], kinds["<tool>"], kinds["a"]) == (3, 4, 1)
    ours = TextGenerator(path).tokenizer
    for line in LINES:
        assert [*ours.starts, *ours.encode(line)] == theirs(line).input_ids, line


@pytest.mark.parametrize("given", ["tokenizer.json", "tokenizer.model"])
def test_sentencepieces_go_out_with_scores(tmp_path, given):
    folder = tmp_path / "a"
    folder.mkdir()
    model, theirs = sentence_pieces(folder)
    language_model("llama", theirs).save_pretrained(folder)
    if given == "tokenizer.json":
        theirs.save_pretrained(folder)
        (folder / "tokenizer.model").unlink()
    path = export(folder, tmp_path / "out")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<0x41>": 6, "\u2581the": 1}
    stated = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    assert kinds.items() <= stated.items()
    ours = TextGenerator(path).tokenizer
    for line in LINES[:-2]:
        expected = [model.bos_id(), *model.encode(line)]
        assert [*ours.starts, *ours.encode(line)] == theirs(line).input_ids == expected, line


def test_pieces_for_prompts_with_images_are_a_tokenizer_json(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    _, theirs = sentence_pieces(folder)
    language_model("llama", theirs).save_pretrained(folder)
    path = export(folder, tmp_path / "out")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    files = make_tokenizer_files(fields, len(theirs), [theirs.eos_token_id], marked=True)
    ours = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    for line in LINES[:-2]:
        assert ours.encode(line).ids == theirs(line).input_ids
        assert ours.decode(ours.encode(line).ids) == line


def test_greedy_texts_are_those_of_the_folder(tmp_path):
    torch.manual_seed(3)
    tokenizer = byte_pairs(320)
    folder = save_model(tmp_path / "a", language_model("gemma", tokenizer), tokenizer)
    path = export(folder, tmp_path / "out")
    texts = [vlm.load(place).predict(LINES[:4], max_tokens=12) for place in (folder, path)]
    assert texts[0] == texts[1]


def test_what_gguf_cannot_express_is_refused_before_anything_is_written(tmp_path, capsys):
    tokenizer = byte_pairs(320)
    cases = {
        "hidden_act gelu": language_model("llama", tokenizer, hidden_act="gelu"),
        "tie_word_embeddings false": language_model("gemma", tokenizer, tie_word_embeddings=False),
        "activation_function relu": language_model("gpt2", tokenizer, activation_function="relu"),
        "rope_scaling llama3": language_model("qwen2", tokenizer, rope_parameters=LLAMA3),
    }
    for number, (words, model) in enumerate(cases.items()):
        folder = save_model(tmp_path / f"theirs{number}", model, tokenizer)
        assert command(["export", str(tmp_path / "out"), "-c", str(folder), "--to", "gguf"]) == 2
        message = capsys.readouterr().err
        assert words in message and "use --to safetensors" in message, message
        assert not (tmp_path / "out").exists()


def test_a_weight_too_large_for_16_bits_is_refused(tmp_path, capsys):
    tokenizer = byte_pairs(320)
    model = language_model("qwen2", tokenizer)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 2 * MAX_F16
    folder = save_model(tmp_path / "theirs", model, tokenizer)
    assert command(["export", str(tmp_path / "out"), "-c", str(folder), "--to", "gguf"]) == 2
    assert "blk.1.ffn_up.weight has the weight 131008" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    export(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer"),
        (lambda content: content.update(normalizer={"type": "NFKC"}), "normalizer"),
        (lambda content: content["model"].update(ignore_merges=True), "pre_tokenizer"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tmp_path, capsys, change, words):
    tokenizer = byte_pairs(320)
    folder = save_model(tmp_path / "theirs", language_model("qwen2", tokenizer), tokenizer)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert command(["export", str(tmp_path / "out"), "-c", str(folder), "--to", "gguf"]) == 2
    message = capsys.readouterr().err
    assert words in message and "use --to huggingface" in message
    assert not (tmp_path / "out").exists()


def test_the_type_belongs_to_gguf(tmp_path, capsys):
    tokenizer = byte_pairs(320)
    folder = save_model(tmp_path / "theirs", language_model("gpt2", tokenizer), tokenizer)
    assert command(["export", str(tmp_path / "out"), "-c", str(folder), "--outtype", "f16"]) == 2
    assert "--outtype f16: is an option of --to gguf" in capsys.readouterr().err
