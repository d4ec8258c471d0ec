"""Folders whose layers are stored in 8 bits while they are read are those that are quantised afterwards."""

import json
from pathlib import Path

import pytest
import torch
from hugging import saved_captioner, saved_gpt2
from safetensors.torch import load_file, save_file

from vlm.checkpoint.load import load_model, read
from vlm.errors import UserError
from vlm.models.decoder import TextDecoder
from vlm.models.pretrained import load
from vlm.nn.device import explain_int8
from vlm.nn.step.packed import Int8Linear, list_int8_weights, quantize

pytestmark = pytest.mark.skipif(not explain_int8("cpu")[0], reason="this build of torch has no FBGEMM")


def load_quantized(folder, dtype):
    model = load_model(read(folder, dtype=dtype))
    count = quantize(model, [module for module in model.modules() if isinstance(module, TextDecoder)])
    return model, count


@torch.no_grad()
@pytest.mark.parametrize("save", [saved_gpt2, saved_captioner], ids=["GPT-2", "captioner"])
def test_layers_are_the_same_as_quantized_afterwards(folder, save):
    save(folder)
    (early, count), (late, later) = load_quantized(folder, torch.qint8), load_quantized(folder, torch.float32)
    assert count == later > 8
    pairs = zip(early.named_modules(), late.named_modules(), strict=True)
    layers = [(a, b) for (_, a), (_, b) in pairs if isinstance(a, Int8Linear) or isinstance(b, Int8Linear)]
    for a, b in layers:
        x = torch.randn(3, b.in_features)
        assert torch.equal(a(x), b(x))
    rest, truth = early.state_dict(), late.state_dict()
    assert rest.keys() == truth.keys()
    assert all(torch.equal(rest[name], truth[name]) for name in rest)
    assert [name for name, tensor in rest.items() if tensor.dtype == torch.bfloat16] == [
        name for name in rest if name.endswith("token_embed.weight")
    ]


@torch.no_grad()
def test_an_embedding_takes_half_the_memory_and_its_vectors_are_rounded(folder):
    saved_gpt2(folder)
    model, _ = load_quantized(folder, torch.qint8)
    embed, truth = model.token_embed, load_model(read(folder)).token_embed.weight
    vectors = embed(torch.arange(len(truth)))
    assert embed.weight.nbytes == truth.nbytes // 2
    assert vectors.dtype == torch.float32
    assert ((vectors - truth).abs() <= truth.abs() * 2**-8).all()
    assert not torch.equal(vectors, truth)


def test_only_layers_of_blocks_are_quantized_while_reading(folder):
    saved_gpt2(folder)
    stored = read(folder, dtype=torch.qint8)
    names = {name.removeprefix("model.") for name, tensor in stored["state_dict"].items() if tensor.is_quantized}
    assert names == list_int8_weights(load_model(read(folder)))
    assert {name.split(".", 2)[2] for name in names} == {
        f"{layer}.weight" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(folder, value):
    saved_gpt2(folder)
    file = f"{folder}/model.safetensors"
    tensors = load_file(file)
    tensors[next(name for name in tensors if name.endswith("h.0.mlp.c_fc.weight"))][2, 3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"not finite numbers \(model\.blocks\.0\.mlp\.fc1\.weight\)"):
        read(folder, dtype=torch.qint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.qint8])
def test_no_memory_is_taken_for_sizes_that_the_weights_lack(folder, dtype, monkeypatch):
    saved_gpt2(folder)
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_inner": 10**6}))
    taken, allocate = [], load._allocate
    monkeypatch.setattr(
        load, "_allocate", lambda like, *options: taken.append(like.numel()) or allocate(like, *options)
    )
    with pytest.raises(UserError, match=r"mlp\.fc1\.weight is \(1000000, \d+\)"):
        read(folder, dtype=dtype)
    assert 0 < max(taken) < 10**6
