"""Preprocessing of a pretrained encoder against timm's own evaluation transform."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from vlm.checkpoint import load as ckpt
from vlm.config.build import build
from vlm.config.compose import compose
from vlm.data.images.image import Preprocess
from vlm.errors import UserError
from vlm.tasks.captioning.predict import Captioner
from vlm.training.config.check import check
from vlm.training.run.build import fill_preprocessing
from vlm.training.run.fit import main

TIMM = ["model/encoder=timm", "data.image_size=96"]


MODELS = [
    "resnet10t",
    "resnet18",
    "vit_small_patch16_224",
    "convnext_atto",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
]


def config(*overrides, name="resnet10t", weights="model.encoder.pretrained=true"):
    return fill_preprocessing(compose([*TIMM, f"model.encoder.name={name}", weights, *overrides], check))


def preprocess(found):
    nodes = found["data"]["preprocess"], found["task"]["fields"]["images"]["preprocess"]
    assert nodes[0] == nodes[1]
    return build(nodes[0], "data.preprocess")


@pytest.mark.parametrize("data", ["data=shapes", "data=flickr8k"])
@pytest.mark.parametrize("weights", ["model.encoder.pretrained=true", "model.encoder.weights=weights.pth"])
@pytest.mark.sample(plain=2, slow=6)
@pytest.mark.parametrize("name", MODELS)
def test_pixels_are_those_of_timms_own_transform(name, weights, data):
    ours = preprocess(config(data, name=name, weights=weights))
    about = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    theirs = create_transform(**{**about, "input_size": (3, 96, 96)})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)).resize((400, 300))
    found = ours.normalize(ours(image)[None])[0]
    assert (ours.mean, ours.std) == (list(about["mean"]), list(about["std"]))
    # Of a smooth image torch and Pillow differ by two grey levels at most; another crop, by far more.
    assert (found - theirs(image)).abs().max() < 2.5 / 255 / min(ours.std)


@pytest.mark.parametrize("weights", ["model.encoder.pretrained=false", "model.encoder.weights=null"])
@pytest.mark.parametrize(("data", "mean"), [("shapes", 0.5), ("flickr8k", 0.485)])
def test_without_pretrained_weights_it_is_the_usual_one(weights, data, mean):
    ours = preprocess(config(f"data={data}", name="resnet18", weights=weights))
    assert (ours.mean[0], ours.crop, ours.resize, ours.interpolation) == (mean, 1.0, "crop", "bicubic")


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("data", ["data=flickr8k", "data=image_folder"])
def test_stated_colours_win(name, data):
    given = ["task=classification", "data.root=photos"] if data == "data=image_folder" else []
    found = preprocess(config(*given, data, f"data.preprocess.{name}=[0.1,0.2,0.3]"))
    assert getattr(found, name) == [0.1, 0.2, 0.3]
    assert found.crop == timm.get_pretrained_cfg("resnet10t").crop_pct < 1  # all the same


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(
    ("stated", "name", "value"),
    [("resize=pad", "resize", "pad"), ("interpolation=box", "interpolation", "box"), ("crop=0.5", "crop", 0.5)],
)
def test_stated_geometry_wins_and_training_shows_the_same(stated, name, value):
    found = config("data=flickr8k", f"data.preprocess.{stated}")
    augment = build(found["task"]["fields"]["images"]["augment"], "augment")
    assert getattr(preprocess(found), name) == getattr(augment, name) == value
    plain = config("data=flickr8k")
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (200, 300, 3), np.uint8))
    augment = build(plain["data"]["augment"], "augment")
    assert torch.equal(augment(image, (0, 0, 0)), preprocess(plain)(image))


@pytest.mark.parametrize("crop", [0, 0.1, 1.5, float("nan"), "a"])
def test_a_stored_crop_out_of_range_is_refused(crop):
    with pytest.raises(UserError, match=r"crop=.*is invalid"):
        Preprocess.from_state({"image_size": 8, "crop": crop})


@pytest.mark.slow
def test_checkpoints_keep_it_and_use_it(tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("resnet10t").state_dict(), file)
    small = ["trainer=cpu", "trainer.max_steps=1", "data.num_workers=0", "callbacks.progress=null", "data.batch_size=4"]
    small += [f"data.source.{split}_scenes=4" for split in ("train", "val", "test")] + ["model.size.decoder_depth=1"]
    small += ["model.size.dim=32", "model.size.num_heads=2"]
    encoder = ["model/encoder=timm", "model.encoder.name=resnet10t", f"model.encoder.weights={file}"]
    assert main([*small, *encoder, f"runs={tmp_path / 'runs'}"]) == 0
    (path,) = tmp_path.glob("runs/*/*/checkpoints/best.ckpt")
    file.unlink()
    state = ckpt.read(path)["vlm"]["preprocess"]
    known = timm.get_pretrained_cfg("resnet10t")
    assert (state["mean"], state["std"], state["crop"]) == ([*known.mean], [*known.std], known.crop_pct)
    assert Captioner(str(path)).preprocess.state() == state
    assert main([f"resume={path.parent.parent}", "trainer.max_steps=2"]) == 0
    assert ckpt.read(path)["vlm"]["preprocess"] == state
