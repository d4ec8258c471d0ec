"""Compares adapters with the peft library: what vlm exports, and what peft writes.

`peft_adapters.py FOLDER FIXTURES` makes small random models in FOLDER. It writes to FIXTURES the adapters that peft
made for each of them, and the logits that peft computes with those and with the exported ones, which tests read.
"""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

import peft
import peft_models as models
import torch
import transformers

from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run
from vlm.models.pretrained.place import join_adapters

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True, "modules_to_save": ["lm_head"]},
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True, "modules_to_save": ["wte", "lm_head"]},
    "smolvlm": {"target_modules": r".*(text_model.*(q_proj|k_proj)|vision_model.*fc1|modality_projection\.proj)"},
    "llava_clip": {"target_modules": "all-linear", "modules_to_save": ["multi_modal_projector"]},
}


def compare(folder: Path, name: str, expected: torch.Tensor, *others: torch.Tensor) -> list[str]:
    worst = [float((other - expected).abs().max()) for other in others]
    assert all(difference < 1e-5 for difference in worst), (name, worst)
    return [f"{difference:.1e}" for difference in worst]


def check_export(name: str, folder: Path, saved: Sequence[str] = ()) -> torch.Tensor:
    """Compares exported adapters in peft, merged and not, with our model; returns peft's logits.

    Args:
        saved: Parts that were trained without adapters.
    """
    out = folder / f"out{len(saved)}"
    models.save_adapters(folder / "base", folder / "adapters.ckpt", saved)
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(["export", str(out), "-c", str(folder / "adapters.ckpt"), "--to", "peft"]) == 0
    theirs = models.load_theirs(folder / "base")
    plain, inputs = models.last_logits(theirs), theirs
    ours = models.our_logits(load_model(read(folder / "adapters.ckpt")), inputs)
    model = peft.PeftModel.from_pretrained(theirs, out).eval()
    separate = models.last_logits(model)
    merged = models.last_logits(model.merge_and_unload())
    assert (separate - plain).abs().max() > 0.05  # the adapters change something
    assert bool(saved) == bool(model.peft_config["default"].modules_to_save)
    back = models.our_logits(load_model(read(join_adapters(folder / "base", out))), inputs)
    words = f"out, with {', '.join(saved)}:" if saved else "out:"
    differences = compare(folder, name, separate, ours, merged, back)
    print(name, words, "largest difference of ours to peft, merged, and read again:", *differences)
    return separate


def check_import(name: str, folder: Path, fixtures: Path) -> torch.Tensor:
    """Lets peft write random adapters, and compares our model that reads them; returns peft's logits."""
    theirs = models.load_theirs(folder / "base")
    plain = models.last_logits(theirs)
    model = peft.get_peft_model(theirs, peft.LoraConfig(r=2, lora_alpha=3, **TARGETS[name])).eval()
    torch.manual_seed(8)
    for key, tensor in model.named_parameters():
        if tensor.requires_grad:
            tensor.data = torch.randn(tensor.shape) * 0.3 if "lora_" in key else tensor.data * 1.25
    path = fixtures / name
    model.save_pretrained(path)
    config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": "base"}
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (path / "README.md").unlink(missing_ok=True)
    separate = models.last_logits(model)
    ours = models.our_logits(load_model(read(join_adapters(folder / "base", path))), theirs)
    merged = models.last_logits(model.merge_and_unload())
    assert (separate - plain).abs().max() > 0.05
    print(name, "in:  largest difference of ours to peft, and merged:", *compare(folder, name, separate, ours, merged))
    return separate


def main(folder: Path, fixtures: Path) -> None:
    fixtures.mkdir(exist_ok=True)
    print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    logits = {}
    for name in models.NAMES:
        models.save_base(name, folder / name / "base")
        out = check_export(name, folder / name)
        saved = check_export(name, folder / name, models.SAVED[name])
        read_back = check_import(name, folder / name, fixtures)
        # Every 16th logit of the last token.
        logits[name] = {
            kind: [round(value, 5) for value in tensor[::16].tolist()]
            for kind, tensor in (("out", out), ("saved", saved), ("in", read_back))
        }
    (fixtures / "logits.json").write_text(json.dumps(logits, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
