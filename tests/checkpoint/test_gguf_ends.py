"""End tokens of GGUF files: those of llama.cpp, which infers them from the texts of tokens, and of the same folder."""

import chats
import pytest
import torch
import transformers
from gguf_files import decoder, save_gguf
from hugging import byte_pairs
from tokenizers import AddedToken

import vlm
from vlm.checkpoint.load import read
from vlm.models.pretrained.load import open_folder

KEY = "tokenizer.ggml."
# llama.cpp as llama-cpp-python 0.3.36 ships it, src/llama-vocab.cpp from `special_eog_ids` on.
TEXTS = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
]
OTHERS = ["<|im_start|>", "<|user|>", "<end_of_turn", "<|fim_prefix|>", "<unk>", "<pad>", "eos", "<|plamo:eos|>"]
# Tokens of the vocabulary, and those of them that end a generation.
GROUPS = {
    "harmony": ("<|return|> <|call|> <|end|>", "<|return|> <|call|>"),
    "half of harmony": ("<|return|> <|end|>", "<|return|> <|end|>"),
    "solar": ("<|calls|> <|flush|> <|end|>", "<|calls|> <|flush|>"),
    "solar with call": ("<|call|> <|flush|> <|end|>", "<|call|> <|flush|>"),
    "half of solar": ("<|flush|> <|end|>", "<|flush|> <|end|>"),
    "gemma 4": ("<|tool_response> </s> <turn|>", "<|tool_response> <turn|>"),
    "one token of a group fills gaps": ("<|fim_pad|> <PAD> [PAD]", "<|fim_pad|>"),
}


def write_file(path, texts, *, special=False, values=(), plain=False):
    """Saves a file whose vocabulary has these texts; returns the ids of all tokens."""
    tokenizer = byte_pairs(300)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    model, _ = decoder("tied", tokenizer=tokenizer)
    types = {f"{KEY}token_type": [1] * len(tokenizer)} if plain else {}
    save_gguf(path, model, tokenizer, values=types | dict(values))
    return tokenizer.get_vocab()


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_a_text_ends_a_generation_as_in_llama_cpp(tmp_path, plain):
    ids = write_file(tmp_path / "a.gguf", OTHERS, plain=plain)
    assert open_folder(tmp_path / "a.gguf").end_ids == [ids["<|endoftext|>"]]  # named by the header
    for text in TEXTS:
        ids = write_file(tmp_path / "a.gguf", [*OTHERS, text], plain=plain)
        assert open_folder(tmp_path / "a.gguf").end_ids == [ids["<|endoftext|>"], ids[text]], text


@pytest.mark.parametrize("name", GROUPS)
def test_exceptions_are_those_of_llama_cpp(tmp_path, name):
    held, ends = (texts.split() for texts in GROUPS[name])
    ids = write_file(tmp_path / "a.gguf", held)
    assert set(open_folder(tmp_path / "a.gguf").end_ids) == {ids[text] for text in ["<|endoftext|>", *ends]}


def test_a_named_token_ends_first_and_exceptions_hold_for_it_too(tmp_path):
    held = ["<|fim_pad|>", "<|end|>", "<|call|>", "<|return|>", "<mine>", "<yours>", "<plug>"]
    ids = write_file(tmp_path / "a.gguf", held)
    named = {"eos_token_id": ids["<mine>"], "eom_token_id": ids["<|end|>"], "fim_pad_token_id": ids["<plug>"]}
    write_file(tmp_path / "a.gguf", held, values={f"{KEY}{name}": id for name, id in named.items()})
    ends = ["<mine>", "<plug>", "<|endoftext|>", "<|call|>", "<|return|>"]
    assert open_folder(tmp_path / "a.gguf").end_ids == [ids[text] for text in ends]


@torch.no_grad()
def test_an_answer_ends_where_the_folder_ends_it(tmp_path):
    tokenizer = byte_pairs(300)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    model, _ = decoder("llama", tokenizer=tokenizer, tie_word_embeddings=False)
    for layer in model.model.layers:  # each token depends only on the one before it
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    *_, last = tokenizer("a man").input_ids
    (middle,) = tokenizer("!").input_ids
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.lm_head.weight.zero_()
    for before, after in ((last, middle), (middle, end), (end, middle)):
        model.lm_head.weight[after] += model.model.embed_tokens.weight[before]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    model.generation_config.bos_token_id = end
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    save_gguf(tmp_path / "a.gguf", model, tokenizer)  # its header names <|im_end|> only
    ids = tokenizer("a man", return_tensors="pt").input_ids
    row = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=end)[0, ids.shape[1] :]
    assert row.tolist() == [middle, end]
    for path in ("folder", "a.gguf"):
        assert vlm.load(tmp_path / path, precision="fp32").generate("a man", sample=False, max_tokens=9).text == "!"


def test_an_end_token_of_normal_type_is_read_in_a_template(tmp_path):
    """llama.cpp takes such tokens for control tokens, whatever their type is in the file."""
    tokenizer = chats.saved_chat(tmp_path / "folder", "chatml")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "folder")
    values = {"tokenizer.chat_template": tokenizer.chat_template}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    save_gguf(tmp_path / "a.gguf", model, tokenizer, pre="smollm", values=values)
    forms = [read(tmp_path / "a.gguf")["vlm"]["form"]]
    types = [
        1 if id == end else 3 if token.startswith("<|") else 1
        for token, id in sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    ]
    save_gguf(tmp_path / "a.gguf", model, tokenizer, pre="smollm", values=values | {f"{KEY}token_type": types})
    forms.append(read(tmp_path / "a.gguf")["vlm"]["form"])
    assert forms[0] == forms[1]
