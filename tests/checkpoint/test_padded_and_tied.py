"""Rows of the weights beyond the tokenizer, and tied weights that are stored under another of their names."""

from functools import partial
from pathlib import Path
from typing import Any

import hugging as hf
import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from translators import saved_marian, saved_t5

import vlm
from vlm.checkpoint.load import read


def test_padded_rows_of_gpt2_are_read(tmp_path: Path) -> None:
    tokenizer = hf.byte_pairs()
    model = hf.gpt2(len(tokenizer) + 20, tokenizer.eos_token_id)
    hf.save_parts(tmp_path, (model, tokenizer))
    prompt = "a man in a red"
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    (truth,) = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    found = vlm.load(str(tmp_path), precision="fp32").generate(prompt, sample=False, max_tokens=8).text
    assert found == tokenizer.decode([id for id in truth[ids.shape[1] :] if id < len(tokenizer)])


def test_padded_rows_of_bert_are_read(tmp_path: Path) -> None:
    tokenizer = hf.word_pieces()
    config = t.BertConfig(vocab_size=len(tokenizer) + 7, max_position_embeddings=64, **hf.SIZES, **hf.LABELS)
    model = hf.wide(t.BertForSequenceClassification(config))
    hf.save_parts(tmp_path, (model, tokenizer))
    truth = model(**tokenizer("two dogs run", return_tensors="pt")).logits.softmax(-1)[0]
    found = dict(vlm.load(str(tmp_path), precision="fp32").classify("two dogs run").top)
    assert found
    for name, share in found.items():
        assert share == pytest.approx(truth[hf.LABELS["label2id"][name]].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("save", "stored", "other"),
    [
        (hf.saved_gpt2, "transformer.wte.weight", "lm_head.weight"),
        (partial(hf.saved_decoder, name="qwen2"), "model.embed_tokens.weight", "lm_head.weight"),
        (
            partial(hf.saved_reader, kind=t.BertForMaskedLM),
            "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.weight",
        ),
        (saved_marian, "model.shared.weight", "model.encoder.embed_tokens.weight"),
        (saved_t5, "shared.weight", "lm_head.weight"),
    ],
    ids=["gpt2", "qwen2", "bert", "marian", "t5"],
)
def test_tied_weights_are_read_under_any_name(tmp_path: Path, save: Any, stored: str, other: str) -> None:
    save(tmp_path)
    truth, path = read(tmp_path)["state_dict"], tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {other: tensors.pop(stored)}, path, {"format": "pt"})
    assert stored not in load_file(path)
    found = read(tmp_path)["state_dict"]
    assert found.keys() == truth.keys()
    assert all(found[name].equal(truth[name]) for name in truth)
