"""Checkpoints: whole or not at all, verified, and rebuilt from nothing but names."""

import errno
import multiprocessing
import os
import resource
import stat
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from vlm import checkpoint as ckpt
from vlm.errors import UserError
from vlm.models import timm_encoder
from vlm.models.vision_language import VisionLanguageModel

VIT = {"image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "num_heads": 2}
DECODER = {"vocab_size": 9, "max_len": 6, "dim": 8, "depth": 1, "num_heads": 2, "context_dim": 8}
SPEC = {
    "name": "models.vision_language.VisionLanguageModel",
    "args": {
        "encoder": {"name": "models.vit.ViT", "args": VIT},
        "decoder": {"name": "models.decoder.Decoder", "args": DECODER},
    },
}


def vit_spec(**changes):
    return {"name": "models.vit.ViT", "args": VIT | changes}


def saved(spec=SPEC, model=None, **extra):
    """A checkpoint of a model, as training writes it."""
    model = ckpt.rebuild(spec) if model is None else model
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {"format": ckpt.FORMAT, "vlm": {"model": spec}, "state_dict": state, "epoch": 3, "global_step": 70, **extra}


@pytest.fixture
def checkpoint(scramble):
    return saved(model=scramble(ckpt.rebuild(SPEC)))


@pytest.fixture
def path(tmp_path, checkpoint):
    path = tmp_path / "run" / "last.ckpt"
    ckpt.write(path, checkpoint)
    return path


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


# Writing and reading


def test_what_is_written_is_read(path, checkpoint):
    assert same(ckpt.read(path), checkpoint)
    assert same(ckpt.read(str(path)), checkpoint)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_model_is_rebuilt_with_its_weights(tmp_path, scramble):
    model = scramble(ckpt.rebuild(SPEC))
    ckpt.write(tmp_path / "model.ckpt", saved(model=model))
    loaded = ckpt.load_model(ckpt.read(tmp_path / "model.ckpt"))
    assert isinstance(loaded, VisionLanguageModel)
    assert not loaded.training
    inputs = torch.randn(2, 3, 8, 8), torch.tensor([[1, 4, 5], [1, 7, 2]])
    assert torch.equal(loaded(*inputs), model(*inputs))


def test_moving_averages_stand_before_weights_and_counters_stay():
    stored = {
        "state_dict": {"model.weight": 1, "model.batches": 2, "metric.total": 3},
        "ema": {"model.weight": 4, "metric.total": 5},
    }
    assert ckpt.weights(stored) == {"weight": 4, "batches": 2}
    del stored["ema"]
    assert ckpt.weights(stored) == {"weight": 1, "batches": 2}


def test_a_model_with_batch_norm_is_rebuilt_from_its_moving_average():
    spec = {"name": "models.timm_encoder.TimmEncoder", "args": {"name": "resnet10t", "dim": 4, "image_size": 32}}
    whole = saved(spec)
    whole["ema"] = {name: t + 1 for name, t in whole["state_dict"].items() if t.is_floating_point()}
    assert torch.equal(ckpt.load_model(whole).proj.bias, whole["ema"]["model.proj.bias"])


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(path, checkpoint, monkeypatch, step):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ckpt.os, step, full)
    with pytest.raises(UserError, match=r"last\.ckpt: cannot write .*No space left on device.*free space") as caught:
        ckpt.write(path, saved(epoch=99))
    assert caught.value.status == 1
    assert same(ckpt.read(path), checkpoint)
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(path, checkpoint, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ckpt.torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ckpt.write(path, saved(epoch=99))
    assert same(ckpt.read(path), checkpoint)
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/last\.ckpt: cannot write"):
        ckpt.write(tmp_path / "file" / "last.ckpt", {})


def write_without_end(path, pipe):
    """Writes a checkpoint as far as its last byte, and stays there."""

    def hang(handle):
        pipe.send("writing")
        time.sleep(60)

    os.fsync = hang
    ckpt.write(path, saved(epoch=99))


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file_whole(path, checkpoint):
    process = multiprocessing.get_context("fork")
    ours, theirs = process.Pipe()
    child = process.Process(target=write_without_end, args=(path, theirs), daemon=True)
    child.start()
    assert ours.poll(30)
    child.kill()
    child.join()
    assert same(ckpt.read(path), checkpoint)
    ckpt.write(path, saved(epoch=100))  # which clears away what the killed process left
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert ckpt.read(path)["epoch"] == 100


# Damage


def flip(path, place, bit, into):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    into.write_bytes(data)
    return into


def test_a_flipped_bit_of_a_weight_is_found(path, checkpoint, tmp_path):
    rng, data = np.random.default_rng(0), path.read_bytes()
    for tensor in checkpoint["state_dict"].values():
        content = tensor.numpy().tobytes()
        place = data.find(content) + int(rng.integers(len(content)))
        broken = flip(path, place, int(rng.integers(8)), tmp_path / "broken.ckpt")
        with pytest.raises(UserError, match=r"broken\.ckpt: is damaged"):
            ckpt.read(broken)


def test_a_flipped_bit_anywhere_is_found_or_harmless(path, checkpoint, tmp_path):
    rng, found = np.random.default_rng(1), 0
    for place in rng.integers(path.stat().st_size, size=150):
        broken = flip(path, int(place), int(rng.integers(8)), tmp_path / "broken.ckpt")
        try:
            assert same(ckpt.read(broken), checkpoint)  # in padding, or in a date
        except UserError:
            found += 1
    assert found > 20


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=r"last\.ckpt: is (not a checkpoint, or was cut short|damaged)"):
        ckpt.read(path)


class Command:
    """Pickles as a call of a function, as malware does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(path, tmp_path, checkpoint):
    torch.save({**checkpoint, "vlm": Command(tmp_path / "executed")}, path)
    with pytest.raises(UserError, match="is damaged or is no checkpoint of vlm"):
        ckpt.read(path)
    assert not (tmp_path / "executed").exists()


def text_file(path):
    path.write_text("weights\n" * 100)


def zip_file(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "weights")


FOREIGN = {
    "text": (text_file, "is not a checkpoint"),
    "zip": (zip_file, "is no checkpoint of vlm"),
    "state dict": (lambda path: torch.save(nn.Linear(2, 2).state_dict(), path), "was not written by vlm"),
    "tensor": (lambda path: torch.save(torch.zeros(3), path), "was not written by vlm"),
    "module": (lambda path: torch.save(nn.Linear(2, 2), path), "is no checkpoint of vlm"),
    "legacy": (lambda path: torch.save({"format": 1}, path, _use_new_zipfile_serialization=False), "not a checkpoint"),
    "format": (lambda path: torch.save({"format": 2, "vlm": {}}, path), "has format 2, this vlm reads 1"),
    "folder": (lambda path: path.mkdir(), "no such checkpoint"),
    "nothing": (lambda path: None, "no such checkpoint"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_not_ours_is_refused(tmp_path, kind):
    make, message = FOREIGN[kind]
    make(tmp_path / "model.ckpt")
    with pytest.raises(UserError, match=rf"model\.ckpt: .*{message}") as caught:
        ckpt.read(tmp_path / "model.ckpt")
    assert caught.value.status == 2


# Rebuilding


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "os.system",
        "torch.nn.Linear",
        "torch.nn.modules.linear.Linear",
        "models.vit.Block",  # defined in nn.blocks
        "models.vit.nn.Linear",
        "models.vit.torch.hub.load",
        "models.decoder.positions_within",  # a function
        "nn.blocks.init_weights",
        "models.context.Context",  # a class, but no module
        "models.vit",
        "models.vit.Nothing",
        "models.vit.ViT.forward",
        "vlm.models.vit.ViT",
        "tasks.captioning.Captioning",
        "checkpoint.Path",
        "models.__init__.ViT",
        "models/vit.ViT",
        "..models.vit.ViT",
        "ViT",
        "",
        None,
        7,
    ],
)
def test_only_module_classes_of_ours_are_built(name):
    for spec in ({"name": name, "args": {}}, {**SPEC, "args": {**SPEC["args"], "encoder": {"name": name, "args": {}}}}):
        with pytest.raises(UserError, match="the checkpoint names"):
            ckpt.rebuild(spec)


def test_a_backbone_is_built_bare(monkeypatch):
    asked = []

    def create(name, image_size, pretrained, weights):
        asked.append((name, pretrained, weights))
        backbone = nn.Identity()
        backbone.num_features = 3
        return backbone

    monkeypatch.setattr(timm_encoder, "_create", create)
    args = {"name": "resnet10t", "dim": 4, "image_size": 32, "pretrained": True, "weights": "/etc/passwd"}
    ckpt.rebuild({"name": "models.timm_encoder.TimmEncoder", "args": args})
    assert asked == [("resnet10t", False, None)]


@pytest.mark.parametrize("name", ["hf-hub:someone/model", "hf_hub:someone/model", "local-dir:/tmp", "someone/model"])
def test_a_backbone_from_elsewhere_is_refused(name):
    args = {"name": name, "dim": 4, "image_size": 32, "pretrained": True}
    with pytest.raises(UserError, match="timm has no backbone"):
        ckpt.load_model(saved({"name": "models.timm_encoder.TimmEncoder", "args": args}, nn.Identity()))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's own package."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "nets.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n"
        "    def __init__(self, *, dim):\n        super().__init__()\n        self.fc = nn.Linear(dim, dim)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine.nets.Net"
    for name in ("mine", "mine.nets"):
        sys.modules.pop(name, None)


def test_a_class_of_another_package_needs_trust(package):
    whole = saved({"name": package, "args": {"dim": 3}}, nn.ModuleDict({"fc": nn.Linear(3, 3)}))
    for trust in (None, "", "min", "nets", "other", "vlm"):
        with pytest.raises(UserError, match=r"--trust PACKAGE"):
            ckpt.load_model(whole, trust=trust)
    assert "mine" not in sys.modules
    for trust in ("mine", "mine.nets"):
        assert type(ckpt.load_model(whole, trust=trust)).__name__ == "Net"
    with pytest.raises(UserError, match="no module class"):
        ckpt.rebuild({"name": "mine.nets.nn", "args": {}}, trust="mine")


def test_a_trusted_package_that_is_not_installed_is_named():
    with pytest.raises(UserError, match="--trust absent: No module named 'absent'; install"):
        ckpt.load_model(saved({"name": "absent.Net", "args": {}}, nn.Identity()), trust="absent")


GIANT = 10**12
HUGE = {
    "image": {"image_size": 4 * GIANT},
    "patch": {"image_size": 10**6, "patch_size": 10**6},
    "width": {"dim": GIANT},
    "width of heads": {"head_dim": GIANT},
    "heads": {"num_heads": GIANT, "head_dim": 1},
    "depth": {"depth": GIANT},
    "depth of nothing": {"depth": GIANT, "dim": 0, "num_heads": 1, "head_dim": 1, "mlp_ratio": 0.0},
    "many small blocks": {"depth": 10**6, "dim": 1, "num_heads": 1},
    "mlp": {"mlp_ratio": 1e12},
}


def refused_quickly(whole):
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="asks for more than the stored weights"):
        ckpt.load_model(whole)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", HUGE)
def test_a_specification_larger_than_its_weights_is_refused_quickly(kind):
    refused_quickly(saved(vit_spec(**HUGE[kind]), ckpt.rebuild(vit_spec())))


@pytest.mark.parametrize(
    "claim", [torch.zeros(1).expand(GIANT), torch.empty(GIANT, device="meta")], ids=["expanded", "meta"]
)
def test_weights_that_only_claim_to_be_large_do_not_help(claim, tmp_path):
    whole = saved(vit_spec(dim=10**5, mlp_ratio=1.0), ckpt.rebuild(vit_spec()))
    whole["state_dict"]["model.claim"] = claim
    ckpt.write(tmp_path / "model.ckpt", whole)
    assert (tmp_path / "model.ckpt").stat().st_size < 100_000
    refused_quickly(ckpt.read(tmp_path / "model.ckpt"))


@pytest.mark.parametrize(
    "args",
    [
        VIT | {"dim": 12},
        VIT | {"depth": 2},
        VIT | {"num_heads": 0},
        VIT | {"mlp_ratio": float("inf")},
        VIT | {"patch_size": 3},
        VIT | {"image_size": "8"},
        VIT | {"surprise": 1},
        {"image_size": 8},
        {},
        None,
        [1],
    ],
)
def test_a_specification_that_does_not_fit_is_refused(args):
    whole = saved({"name": "models.vit.ViT", "args": args}, ckpt.rebuild(vit_spec()))
    with pytest.raises(UserError, match="do not fit"):
        ckpt.load_model(whole)


@pytest.mark.parametrize("missing", ["state_dict", "vlm"])
def test_a_checkpoint_without_its_parts_is_refused(checkpoint, missing):
    del checkpoint[missing]
    with pytest.raises(UserError, match="do not fit"):
        ckpt.load_model(checkpoint)
