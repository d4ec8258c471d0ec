"""Folders of quantised weights: FP8 has the values that transformers dequantises, other kinds are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging import saved_decoder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from vlm.checkpoint.load import read
from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import dequantise, read_quantisation

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
UP = "model.layers.0.mlp.up_proj"


def config_of(quantisation: Any) -> Fields:
    return Fields({"quantization_config": quantisation}, "config.json")


def quantise(folder: Path, block: tuple[int, int] | None, config: Any) -> dict[str, Tensor]:
    """Makes an FP8 folder of one; returns its weights as transformers dequantises them."""
    path, exact = folder / "model.safetensors", {}
    stored = load_file(path)
    for name in [one for one in stored if one.endswith("_proj.weight")]:
        weight = stored[name].float()
        sides = block or weight.shape
        grid = [whole // side for whole, side in zip(weight.shape, sides, strict=True)]
        scale = torch.rand(grid) / 50 + 0.01
        blocks = scale.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)
        stored[name] = (weight / blocks).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale if block else scale.reshape(())
        exact[name] = Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.float32)
    save_file(stored, path, {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return exact


@pytest.mark.parametrize("block", [None, (8, 4)], ids=["tensor", "block"])
@pytest.mark.parametrize("stated", [True, False])
def test_fp8_is_dequantised_as_by_transformers(tmp_path: Path, block: Any, stated: bool) -> None:
    saved_decoder(tmp_path, "qwen3")
    config = FP8 | {"weight_block_size": block and [*block]}
    exact = quantise(tmp_path, block, config if stated else None)
    if block and not stated:  # then nothing says of which blocks the scales are
        with pytest.raises(UserError, match=r"weight_scale_inv is \(\d+, \d+\) .*, not one scale .*weight_block_size"):
            read(tmp_path)
        return
    ours = read(tmp_path)["state_dict"]
    up, gate = exact[f"{UP}.weight"], exact[f"{UP.replace('up', 'gate')}.weight"]
    torch.testing.assert_close(ours["model.blocks.0.mlp.fc1.weight"], torch.cat([gate, up]), rtol=0, atol=0)
    assert read(tmp_path, dtype=torch.bfloat16)["state_dict"]["model.blocks.0.mlp.fc1.weight"].dtype == torch.bfloat16


def test_blocks_at_the_edges_are_cut_off() -> None:
    weight, scale = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.rand(3, 2)
    stored = {"a.weight": weight, "a.weight_scale_inv": scale, "a.activation_scale": torch.ones(())}
    config = FP8 | {"weight_block_size": [2, 4], "activation_scheme": "static"}
    assert [*dequantise(stored, config_of(config), torch.float32)] == [] and stored.keys() == {"a.weight"}
    for row in range(5):
        for column in range(7):
            truth = weight[row, column].float() * scale[row // 2, column // 4]
            assert stored["a.weight"][row, column] == truth


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        *(
            ({"quant_method": one}, f"quant_method is '{one}'")
            for one in ("gptq", "awq", "compressed-tensors", "mxfp4")
        ),
        ({"load_in_8bit": True}, "quant_method is None, where vlm supports fp8"),
        (FP8 | {"fmt": "e3m4"}, "fmt is 'e3m4'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is"),
        (FP8 | {"weight_block_size": [1.5, 2]}, "not two integers"),
        (FP8 | {"activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        (FP8 | {"rows": 3}, "rows is 3, an unknown key of fp8"),
        ([8], "quantization_config is"),
    ],
)
def test_other_quantisations_are_refused_by_name(quantisation: Any, words: str) -> None:
    with pytest.raises(UserError, match=r"config\.json: quantization_config") as caught:
        read_quantisation(config_of(quantisation))
    assert words in str(caught.value)


def test_a_part_that_states_its_own_is_refused() -> None:
    config = Fields({"text_config": {"quantization_config": FP8}}, "config.json")
    with pytest.raises(UserError, match=r"text_config\.quantization_config is"):
        read_quantisation(config)
