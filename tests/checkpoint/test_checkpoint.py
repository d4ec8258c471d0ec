"""Checkpoint files: written whole or not at all, and verified when they are read."""

import copy
import errno
import multiprocessing
import os
import re
import stat
import time

import numpy as np
import pytest
import torch
from tiny_checkpoints import EXACT, FILES, IMAGES

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.file import write
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.stored import FORMAT
from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.models.encoder_decoder import VisionLanguageModel

VIT = {"image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "num_heads": 2}
DECODER = {"vocab_size": 9, "max_len": 6, "dim": 8, "depth": 1, "num_heads": 2, "context_dim": 8}
SPEC = {
    "name": "VisionLanguageModel",
    "args": {"encoder": {"name": "ViT", "args": VIT}, "decoder": {"name": "Decoder", "args": DECODER}},
}


def make_checkpoint(spec=SPEC, model=None, **extra):
    """A checkpoint of a model, as training writes it."""
    model = rebuild(spec) if model is None else model
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {"format": FORMAT, "vlm": {"model": spec}, "state_dict": state, "epoch": 3, "global_step": 70, **extra}


@pytest.fixture
def checkpoint(scramble):
    return make_checkpoint(model=scramble(rebuild(SPEC)))


@pytest.fixture
def path(tmp_path, checkpoint):
    path = tmp_path / "run" / "last.ckpt"
    write(path, checkpoint)
    return path


def is_same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return a == b


# Writing and reading


def test_what_is_written_is_read(path, checkpoint):
    assert is_same(ckpt.read(path), checkpoint)
    assert is_same(ckpt.read(str(path)), checkpoint)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_model_is_rebuilt_with_its_weights_without_draws_or_copies(path, checkpoint):
    whole, before = ckpt.read(path), torch.get_rng_state()
    model = ckpt.load_model(whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model, VisionLanguageModel) and not model.training
    held = {tensor.data_ptr() for tensor in whole["state_dict"].values()}
    assert {tensor.data_ptr() for tensor in model.state_dict().values()} <= held
    assert is_same({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, checkpoint["state_dict"])


def test_weights_of_fewer_bits_are_loaded_as_the_model_has_them(tmp_path, scramble):
    model = scramble(rebuild(SPEC))
    write(tmp_path / "model.ckpt", make_checkpoint(model=copy.deepcopy(model).bfloat16()))
    for name, tensor in ckpt.load_model(ckpt.read(tmp_path / "model.ckpt")).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float())


def test_moving_averages_stand_before_weights_and_counters_stay():
    stored = {
        "state_dict": {"model.weight": 1, "model.batches": 2, "metric.total": 3},
        "ema": {"model.weight": 4, "metric.total": 5},
    }
    assert ckpt.inference_weights(stored) == {"weight": 4, "batches": 2}
    del stored["ema"]
    assert ckpt.inference_weights(stored) == {"weight": 1, "batches": 2}


def test_a_model_with_batch_norm_is_rebuilt_from_its_moving_average():
    spec = {"name": "TimmEncoder", "args": {"name": "resnet10t", "dim": 4, "image_size": 32}}
    whole = make_checkpoint(spec)
    whole["ema"] = {name: t + 1 for name, t in whole["state_dict"].items() if t.is_floating_point()}
    assert torch.equal(ckpt.load_model(whole).proj.bias, whole["ema"]["model.proj.bias"])


@pytest.mark.parametrize("module, step", [(os, "fsync"), (os, "replace"), (torch, "save")])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(path, checkpoint, monkeypatch, module, step):
    """For the disk is full, or by Ctrl-C."""
    fault = KeyboardInterrupt() if module is torch else OSError(errno.ENOSPC, "No space left on device")

    def fail(*args, **kwargs):
        raise fault

    monkeypatch.setattr(module, step, fail)
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        write(path, make_checkpoint(epoch=99))
    if module is os:
        assert re.search(r"last\.ckpt: cannot write .*No space left on device.*free space", str(caught.value))
        assert caught.value.status == 1
    assert is_same(ckpt.read(path), checkpoint)
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/last\.ckpt: cannot write"):
        write(tmp_path / "file" / "last.ckpt", {})


def write_without_end(path, pipe):
    """Writes a checkpoint as far as its last byte, and stays there."""

    def hang(handle):
        pipe.send("writing")
        time.sleep(60)

    os.fsync = hang
    write(path, make_checkpoint(epoch=99))


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file_whole(path, checkpoint):
    process = multiprocessing.get_context("fork")
    ours, theirs = process.Pipe()
    child = process.Process(target=write_without_end, args=(path, theirs), daemon=True)
    child.start()
    assert ours.poll(30)
    child.kill()
    child.join()
    assert is_same(ckpt.read(path), checkpoint)
    write(path, make_checkpoint(epoch=100))  # which clears away what the killed process left
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert ckpt.read(path)["epoch"] == 100


# Damage


@pytest.mark.slow
def test_a_flipped_bit_is_found_in_weights_and_elsewhere_found_or_harmless(path, checkpoint, tmp_path):
    rng, whole, found = np.random.default_rng(1), path.read_bytes(), 0
    contents = [tensor.numpy().tobytes() for tensor in checkpoint["state_dict"].values()]
    weights = [whole.find(content) + int(rng.integers(len(content))) for content in contents]
    for place in [*weights, *rng.integers(len(whole), size=150).tolist()]:
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "broken.ckpt").write_bytes(data)
        try:
            assert is_same(ckpt.read(tmp_path / "broken.ckpt"), checkpoint)  # in padding, or in a date
        except UserError as fault:
            found += 1
            assert place not in weights or "broken.ckpt: is damaged" in str(fault)
        else:
            assert place not in weights
    assert found > 20 + len(weights)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=r"last\.ckpt: is (not a checkpoint, or is incomplete|damaged)"):
        ckpt.read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["state_dict", "ema"])
def test_weights_that_are_not_finite_are_refused_by_their_name(value, part, tmp_path):
    content = make_checkpoint()
    content[part] = content.get(part, {}) | {"model.decoder.norm.weight": torch.full((8,), value)}
    torch.save(content, tmp_path / "model.ckpt")
    with pytest.raises(UserError, match=r"model\.ckpt: its weights are not finite .*\(model\.decoder\.norm\.weight\)"):
        ckpt.read(tmp_path / "model.ckpt")


def test_an_average_has_the_mean_weights_for_inference(path, checkpoint, scramble, tmp_path):
    """Those of a moving average, where there is one."""
    other, third = (scramble(rebuild(SPEC)).state_dict() for _ in range(2))
    averaged = {f"model.{name}": tensor for name, tensor in third.items()}
    write(tmp_path / "other.ckpt", make_checkpoint(model=rebuild(SPEC), ema=averaged))
    state = {f"model.{name}": tensor for name, tensor in other.items()}
    write(tmp_path / "third.ckpt", checkpoint | {"state_dict": state, "vlm": {"model": SPEC, "scores": {"loss": 1.0}}})
    places = [str(path), str(tmp_path / "other.ckpt"), str(tmp_path / "third.ckpt")]
    mean = ckpt.average_checkpoints(places)
    assert mean["vlm"] == {"model": SPEC, "scores": {}}
    assert mean["state_dict"].keys() == checkpoint["state_dict"].keys()
    for name, tensor in mean["state_dict"].items():
        parts = [checkpoint["state_dict"][name], third[name.removeprefix("model.")], other[name.removeprefix("model.")]]
        expected = np.mean([part.numpy().astype(np.longdouble) for part in parts], axis=0)
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.numpy(), expected.astype(np.float32), rtol=1.2e-7, atol=0)
    assert ckpt.average_checkpoints([places[2], places[0]])["vlm"]["scores"] == {}  # they are of other weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda other: other["vlm"].update(max_len=7), "has another max_len than"),
        (lambda other: other["vlm"].update(model={**SPEC, "args": {}}), "has another model than"),
        (lambda other: other["state_dict"].update({"model.w": torch.ones(2)}), "its w does not match that of"),
        (lambda other: other["state_dict"].update({"model.head.bias": torch.ones(2)}), "does not match that of"),
    ],
)
def test_checkpoints_of_other_models_are_not_averaged(path, checkpoint, tmp_path, change, message):
    other = copy.deepcopy(checkpoint)
    change(other)
    write(tmp_path / "other.ckpt", other)
    with pytest.raises(UserError, match=message):
        ckpt.average_checkpoints([str(path), str(tmp_path / "other.ckpt")])


def test_whole_numbers_are_not_averaged(path, checkpoint, tmp_path):
    for number, name in ((1, "one"), (2, "two")):
        state = checkpoint["state_dict"] | {"model.count": torch.tensor(number)}
        write(tmp_path / f"{name}.ckpt", checkpoint | {"state_dict": state})
    one, two = str(tmp_path / "one.ckpt"), str(tmp_path / "two.ckpt")
    assert ckpt.average_checkpoints([one, one])["state_dict"]["model.count"] == 1
    with pytest.raises(UserError, match=r"two\.ckpt: its count, whole numbers, differs"):
        ckpt.average_checkpoints([one, two])


def test_the_command_writes_an_average_that_other_commands_use(tmp_path, capsys):
    """The average of a checkpoint with itself captions as it does."""
    (image, *_), tiny, out = IMAGES, str(FILES / "captioning.ckpt"), str(tmp_path / "average.ckpt")
    assert vlm(["average", tiny, tiny, "--out", out]) == 0
    assert "captioning" in capsys.readouterr().out
    captions = []
    for path in (tiny, out):
        assert vlm(["caption", image, "-c", path, *EXACT]) == 0
        captions.append(capsys.readouterr().out)
    assert captions[0] == captions[1]
    assert vlm(["average", tiny, "--out", out]) == 2
    assert "an average needs two or more" in capsys.readouterr().err
    assert vlm(["average", tiny, str(FILES / "classification.ckpt"), "--out", out]) == 2
    assert "average checkpoints of the same model" in capsys.readouterr().err
