"""Features that are made of images, and what makes them be made anew."""

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from caption_data import captions, picture
from PIL import Image
from torch import nn

from vlm.config.compose import compose
from vlm.data import features as feature_file
from vlm.data.features import FeatureField, check_split, find_augment_problem
from vlm.data.fields import CaptionField, ImageField, ImageViewsField
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import ImageError, Preprocess
from vlm.data.records import ListSplit, Record, Source, Split
from vlm.data.samples import SampleKey
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.errors import UserError
from vlm.models.context import Context, Features, encode
from vlm.training.data_module import Data
from vlm.training.image_cache import FeatureCacheBuilder, as_read, feature_faults

COLORS = ["red", "green", "blue", "white", "black", "gray", "navy", "pink", "lime", "teal", "gold"]


class Cells(nn.Module):
    """The mean of each quarter of an image, scaled."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return Context(nn.functional.adaptive_avg_pool2d(images, 2).flatten(2).transpose(1, 2) * self.scale)


class Projecting(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.backbone, self.proj = Cells(), nn.Linear(3, 5)
        nn.init.constant_(self.proj.weight, weight)

    def features(self, images):
        return self.backbone(images).states

    def project(self, features):
        return Context(self.proj(features))

    def forward(self, images):
        return self.project(self.features(images))


@pytest.fixture
def root(tmp_path):
    lines = [f"{color}.png,a picture,train" for color in COLORS]
    for color in [*COLORS, "val"]:
        picture(tmp_path / "data" / f"{color}.png", "brown" if color == "val" else color)
    (tmp_path / "data" / "red.png").write_bytes(b"no image")
    text = "\n".join(["image,caption,split", *lines, "val.png,a picture,val"])
    captions(tmp_path / "data", text)
    return tmp_path / "data"


def data(root, size=8, mean=(0.5, 0.5, 0.5)):
    given = {"image_size": size}
    images = ImageField(preprocess=Preprocess(mean=mean, **given), augment=Augment(**given))
    fields = {"images": images, "captions": CaptionField(tokenizer=ByteTokenizer(), max_len=16)}
    sizes = {"batch_size": 4, "eval_batch_size": 4, "num_workers": 0, "order_seed": 0}
    found = Data(source=captions(root, path=str(root / "captions.csv")), fields=fields, **sizes)
    found.prepare()
    return found


def builder(given, encoder=None, *, args=None, precision="32-true"):
    encoder = encoder or Cells()
    about = {"spec": {"name": type(encoder).__name__, "args": args or {}}, "device": torch.device("cpu")}
    return FeatureCacheBuilder(encoder=encoder, data=given, precision=precision, context=nullcontext, **about)


def test_features_are_what_the_encoder_makes_of_each_image(root, tmp_path):
    given, encoder, said = data(root), Cells(), []
    plain = given.samples("train", training=True)
    made = builder(given, encoder)
    file = made.build(tmp_path / "cache", said.append)
    given.replace_images(FeatureField(given.images[1], file, made.first, complete=True))
    kept = given.samples("train", training=True)
    keys = [SampleKey(3, index) for index in range(len(COLORS))]
    pixels, features = (samples.__getitems__(keys) for samples in (plain, kept))
    images = as_read(pixels["images"], given.images[1].preprocess)
    assert isinstance(as_read(features["images"], given.images[1].preprocess), Features)
    for index, values in enumerate(features["images"].values):
        assert torch.equal(values, encoder(images[index : index + 1]).states[0].detach())
    assert torch.equal(features["captions"].tokens, pixels["captions"].tokens)
    assert "11 images x 4 x 3 float32" in said[0] and "0 are in" in said[0]
    assert features.bad == pixels.bad and features.bad[0].id == "red.png"  # the reason is the same
    assert features.ids == pixels.ids == [f"{color}.png" for color in COLORS[1:]]
    none = kept.__getitems__(keys[:1])
    assert none["images"].values.shape == (0, 4, 3) and len(none.bad) == 1
    assert given.samples("train").__getitems__(keys)["images"].dtype == torch.uint8  # an evaluation of it sees pixels


def test_they_are_made_once(root, tmp_path):
    builder(data(root)).build(tmp_path, lambda line: None)
    encoder, said = Cells(), []
    builder(data(root), encoder).build(tmp_path, said.append)
    assert encoder.calls == 1 and "10 are in" in said[0]  # a blank image, whose features tell the shape


@pytest.mark.parametrize("writes", [1, 4, 7, 12], ids=["first", "within a batch", "before they count", "while they do"])
def test_killed_while_writing_it_goes_on_where_it_was(writes, root, tmp_path, monkeypatch):
    builder(data(root)).build(tmp_path / "whole", lambda line: None)
    child = os.fork()
    if not child:
        done, write = [], feature_file._write_fully

        def dying(*given):
            done.append(given)
            if len(done) > writes:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*given)

        torch.set_num_threads(1)  # OpenMP's other threads are not in the child
        feature_file._write_fully = dying
        builder(data(root)).build(tmp_path / "cut", lambda line: None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    said = []
    file = builder(data(root)).build(tmp_path / "cut", said.append)
    # Of the first batch seven images can be read: as many writes of features, then as many that say they are there.
    assert f"{max(0, writes - 7)} are in" in said[0]
    (whole,) = (tmp_path / "whole").glob("*.features")
    assert file.path.read_bytes() == whole.read_bytes()


def test_whatever_changes_has_a_file_of_its_own(root):
    def source(*given, **options):
        return builder(data(root), *given, **options).source()

    known = source()
    assert source() == known
    others = [source(Cells(2.5)), source(args={"depth": 3}), source(precision="bf16-mixed")]
    others += [builder(data(root, size=6)).source(), builder(data(root, mean=(0.4, 0.5, 0.5))).source()]
    before = (root / "blue.png").stat().st_mtime_ns
    os.utime(root / "blue.png", ns=(0, before + 10**9))
    others += [source()]
    os.utime(root / "blue.png", ns=(0, before))
    (root / "captions.csv").write_text((root / "captions.csv").read_text().replace("teal.png,a picture,train\n", ""))
    others += [source()]
    assert len({known, *others}) == 8


def test_a_projection_that_learns_shares_the_features_of_its_backbone(root, tmp_path):
    one, other = Projecting(1.0), Projecting(2.0)
    builders = builder(data(root), one, args={"dim": 5}), builder(data(root), other, args={"dim": 7})
    assert builders[0].source() == builders[1].source()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(encode(other, images).states, encode(other, Features(other.features(images))).states)


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (Augment(image_size=8), None),
        (ClassAugment(image_size=8), None),
        (Augment(image_size=8, min_scale=0.5, horizontal_flip=True), "min_scale=0.5, horizontal_flip=True"),
        (ClassAugment(image_size=8, min_ratio=0.75), "min_ratio=0.75"),
        (ClassAugment(image_size=8, policy="randaugment"), "policy=randaugment"),
        (ClassAugment(image_size=8, pad_crop=1, erase=0.1), "pad_crop=1, erase=0.1"),
        (type("Own", (Augment,), {})(image_size=8), "Own"),
    ],
)
def test_random_transforms_are_refused(augment, said):
    found = find_augment_problem(augment)
    assert found is None if said is None else said in found


@pytest.mark.slow
def test_configs_that_cannot_keep_features_say_why():
    config = compose(["data=flickr8k", "data.cache_features=true", "task.freeze=[encoder]"])
    assert not list(feature_faults(config))
    config["data"]["augment"]["horizontal_flip"] = True
    config["task"] |= {"freeze": ["decoder"], "mixup": 0.2}
    frozen, drawn, mixed = feature_faults(config)
    assert "task.freeze=[encoder]" in frozen and "horizontal_flip=True" in drawn and "task.mixup" in mixed
    config["model"]["encoder"]["_target_"] = "vlm.models.timm_encoder.TimmEncoder"
    assert "task.freeze=[encoder.backbone]" in next(feature_faults(config))
    config["task"]["freeze"] = ["encoder.backbone"]
    assert not any("freeze" in fault for fault in feature_faults(config))
    config["data"]["cache_features"] = False
    assert not list(feature_faults(config))


def test_images_that_are_never_the_same_are_refused():
    split, images = ListSplit([0], lambda item, epoch: Record("a.png")), ImageField(preprocess=Preprocess(image_size=8))
    with pytest.raises(UserError, match="records have no read_stamp"):
        check_split(split, images)
    split.fresh = True
    with pytest.raises(UserError, match=r"new images in every epoch; .*data.train_samples"):
        check_split(split, images)


def test_records_without_an_image_are_passed_over():
    numbers = [ListSplit([*range(count)], lambda item, epoch: Record(str(item))) for count in (1, 2)]
    images = ImageViewsField(preprocess=Preprocess(image_size=8))
    with pytest.raises(UserError, match="no training sample has an image"):
        check_split(numbers[0], images)
    read = numbers[1].read
    numbers[1].read = lambda item, epoch: replace(read(item, epoch), **({"open_image": picture} if item else {}))
    with pytest.raises(UserError, match="records have no read_stamp"):
        check_split(numbers[1], images)


class SeveralImages(Source):
    """Records of no image, of one or of several, one of which cannot be read."""

    splits = ("train", "val")
    SIZES: ClassVar = {"none": [], "one": [(8, 8)], "cut": [(24, 8)], "two": [(8, 8), (8, 20)], "bad": [None, (8, 8)]}

    def open(self, name: str) -> Split:
        return ListSplit([*self.SIZES] if name == "train" else ["one"], self.record)

    def record(self, name: str, epoch: int) -> Record:
        record = Record(name, {"captions": [name], "references": [name]}, read_stamp=lambda: name)
        if self.SIZES[name]:
            record.open_image, *record.open_more = [partial(self.draw, name, size) for size in self.SIZES[name]]
        return record

    def draw(self, name: str, size: tuple[int, int] | None) -> Image.Image:
        if size is None:
            raise ImageError(f"{name}: cannot be read")
        return Image.linear_gradient("L").resize(size).convert("RGB")


@pytest.mark.parametrize("tiles", [False, True])
def test_records_of_several_images_and_squares_have_a_place_for_each(tmp_path, tiles):
    preprocess = Preprocess(image_size=8, longest_edge=24, tiles=tiles)
    images = ImageViewsField(preprocess=preprocess)
    fields = {"images": images, "captions": CaptionField(tokenizer=ByteTokenizer(), max_len=16)}
    sizes = {"batch_size": 4, "eval_batch_size": 4, "num_workers": 0, "order_seed": 0}
    given, encoder = Data(source=SeveralImages(), fields=fields, **sizes), Cells()
    given.prepare()
    check_split(given.split("train"), images)
    plain = given.samples("train", training=True)
    made = builder(given, encoder)
    file = made.build(tmp_path, lambda line: None)
    given.replace_images(FeatureField(images, file, made.first, complete=True))
    keys = [SampleKey(3, index) for index in range(len(SeveralImages.SIZES))]
    for chosen in (keys, keys[:1], keys[-1:], keys[1:2] * 2, keys[::-1]):
        pixels, kept = (samples.__getitems__(chosen) for samples in (plain, given.samples("train", training=True)))
        assert kept.ids == pixels.ids and kept.bad == pixels.bad
        assert kept["images"].complete and len(kept["images"]) == len(pixels["images"])
        for values, image in zip(kept["images"].values, as_read(pixels["images"], preprocess), strict=True):
            torch.testing.assert_close(values, encoder(image[None]).states[0].detach(), rtol=0, atol=1e-6)
    # In squares: 3 x 3, 1 x 3, and 3 x 3 with 3 x 2, each with the image itself.
    assert made.first.tolist() == ([0, 0, 10, 14, 31, 32] if tiles else [0, 0, 1, 2, 4, 6])
    assert file.missing() == ([31] if tiles else [4, 5])  # tried again when a run begins
