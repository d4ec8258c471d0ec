"""Models rebuilt from what a checkpoint names, and what may not be named."""

import re
import resource
import sys
import time
from typing import Any

import pytest
import torch
from tiny_checkpoints import FILES, IMAGES
from torch import nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.file import write
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.stored import FORMAT, GROUPS, thaw
from vlm.cli.main import run
from vlm.config import target
from vlm.errors import UserError
from vlm.models import timm_encoder

VIT = {"image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "num_heads": 2}


def vit_spec(**changes):
    return {"name": "ViT", "args": VIT | changes}


def make_checkpoint(spec, model):
    """A checkpoint with the specification of one model and the weights of another."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {"format": FORMAT, "vlm": {"model": spec}, "state_dict": state}


# Of others, a function, a class that is no module, modules that are no models, and paths to what a name alone finds.
STRANGE = "builtins.eval os.system torch.nn.Linear torch.nn.modules.linear.Linear load_hugging_face Context Placed"
STRANGE += " Captioning SentencePieceTokenizer Path Linear Nothing ViT.forward models.vit.ViT vlm.models.vit.ViT"


@pytest.mark.parametrize("name", [*STRANGE.split(), "models/vit.ViT", "..models.vit.ViT", "", None, 7])
def test_only_module_classes_of_ours_are_built(name):
    part = {"name": name, "args": {}}
    for spec in (part, {"name": "VisionLanguageModel", "args": {"encoder": part}}):
        with pytest.raises(UserError, match="the checkpoint names"):
            rebuild(spec)


def test_a_backbone_is_built_bare(monkeypatch):
    asked = []

    def create(name, image_size, pretrained, weights):
        asked.append((name, pretrained, weights))
        backbone = nn.Identity()
        backbone.num_features = 3
        return backbone

    monkeypatch.setattr(timm_encoder, "_create", create)
    monkeypatch.setattr(timm_encoder, "_freeze_unused", lambda backbone, image_size: None)
    args = {"name": "resnet10t", "dim": 4, "image_size": 32, "pretrained": True, "weights": "/etc/passwd"}
    rebuild({"name": "TimmEncoder", "args": args})
    assert asked == [("resnet10t", False, None)]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's own package."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    lines = ["from torch import nn", "class Net(nn.Module):", "    def __init__(self, *, dim):"]
    lines += ["        super().__init__()", "        self.fc = nn.Linear(dim, dim)"]
    (tmp_path / "mine" / "nets.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine.nets.Net"
    for name in ("mine", "mine.nets"):
        sys.modules.pop(name, None)


def test_a_class_of_another_package_needs_trust(package):
    whole = make_checkpoint({"name": package, "args": {"dim": 3}}, nn.ModuleDict({"fc": nn.Linear(3, 3)}))
    for trust in (None, "", "min", "nets", "other", "vlm"):
        with pytest.raises(UserError, match="add --trust mine"):
            ckpt.load_model(whole, trust=trust)
    assert "mine" not in sys.modules
    for trust in ("mine", "mine.nets"):
        assert type(ckpt.load_model(whole, trust=trust)).__name__ == "Net"
    with pytest.raises(UserError, match="not a module class"):
        rebuild({"name": "mine.nets.nn", "args": {}}, trust="mine")
    with pytest.raises(UserError, match="--trust absent: No module named 'absent'; install"):
        ckpt.load_model(make_checkpoint({"name": "absent.Net", "args": {}}, nn.Identity()), trust="absent")


GIANT = 10**12
HUGE = {
    "image": {"image_size": 4 * GIANT},
    "patch": {"image_size": 10**6, "patch_size": 10**6},
    "width": {"dim": GIANT},
    "width of heads": {"head_dim": GIANT},
    "heads": {"num_heads": GIANT, "head_dim": 1},
    "depth": {"depth": GIANT},
    "depth of nothing": {"depth": GIANT, "dim": 0, "num_heads": 1, "head_dim": 1, "mlp_ratio": 0.0},
    "many small blocks": {"depth": 10**6, "dim": 4, "num_heads": 1},
    "mlp": {"mlp_ratio": 1e12},
}


def refused_quickly(whole):
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="needs more weights than are stored"):
        ckpt.load_model(whole)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", HUGE)
def test_a_specification_larger_than_its_weights_is_refused_quickly(kind):
    refused_quickly(make_checkpoint(vit_spec(**HUGE[kind]), rebuild(vit_spec())))


@pytest.mark.parametrize(
    "claim", [torch.zeros(1).expand(GIANT), torch.empty(GIANT, device="meta")], ids=["expanded", "meta"]
)
def test_weights_that_only_claim_to_be_large_do_not_help(claim, tmp_path):
    whole = make_checkpoint(vit_spec(dim=10**5, mlp_ratio=1.0), rebuild(vit_spec()))
    whole["state_dict"]["model.claim"] = claim
    write(tmp_path / "model.ckpt", whole)
    assert (tmp_path / "model.ckpt").stat().st_size < 100_000
    refused_quickly(whole)
    with pytest.raises(UserError, match=r"model\.ckpt: is damaged or not a checkpoint of vlm \("):
        ckpt.read(tmp_path / "model.ckpt")


CHANGES = ({"dim": 12}, {"depth": 2}, {"num_heads": 0}, {"mlp_ratio": float("inf")}, {"patch_size": 3})
CHANGES += ({"image_size": "8"}, {"surprise": 1})


@pytest.mark.parametrize("args", [*(VIT | change for change in CHANGES), {"image_size": 8}, {}, None, [1]])
def test_a_specification_that_does_not_fit_is_refused(args):
    with pytest.raises(UserError, match="do not match its specification"):
        ckpt.load_model(make_checkpoint({"name": "ViT", "args": args}, rebuild(vit_spec())))


@pytest.mark.parametrize("missing", ["state_dict", "vlm"])
def test_a_checkpoint_without_its_parts_is_refused(missing):
    whole = make_checkpoint(vit_spec(), rebuild(vit_spec()))
    del whole[missing]
    with pytest.raises(UserError, match="do not match its specification"):
        ckpt.load_model(whole)


def test_the_advice_names_the_package_and_its_folder_until_both_are_given(monkeypatch, capsys):
    """With --trust alone, the advice was to use --trust."""
    config: dict[str, Any] = dict.fromkeys(("seed", "name", "runs", "task_name"), "") | {"seed": 0}
    config |= {key: {} for key in GROUPS} | {"task": {"_class_": "absent.Task"}}
    folder = "add --trust absent (to vlm train: trust=absent), with PYTHONPATH set to the folder that contains absent"
    with pytest.raises(UserError, match=re.escape(folder)):
        thaw(config)
    monkeypatch.setattr(target, "_allowed", [*target._allowed, "absent"])
    with pytest.raises(UserError) as fault:
        thaw(config)
    assert "--trust" not in str(fault.value)
    checkpoint = str(FILES / "classification.ckpt")
    missing = "no such package; install it, or set PYTHONPATH to the folder that contains it"
    for command in (["classify", *IMAGES[:1]], ["evaluate"]):
        assert run([*command, "-c", checkpoint, "--trust", "absent"]) == 2
        assert capsys.readouterr().err.startswith(f"error: --trust absent: {missing}")
    assert run(["evaluate", "-c", checkpoint, "trust=absent"]) == 2
    assert capsys.readouterr().err == "error: trust=absent: is an option of vlm train; use --trust absent\n"
