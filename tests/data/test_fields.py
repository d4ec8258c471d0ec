"""Fields: values of a record, encoded and collated, and what a checkpoint must agree with."""

from functools import partial

import pytest
import torch
from caption_data import refusal
from PIL import Image
from rows import RowSource, open_fields

from vlm.data.fields import CaptionField, ImageField, LabelField, PairedImageField
from vlm.data.images.augment import Augment
from vlm.data.images.image import CachedImages, Preprocess
from vlm.data.records import ListSplit, Record
from vlm.data.text.tokenizer import CharTokenizer
from vlm.training.image_cache import DeviceImageField

TRAIN = [["a cat", "cats"], ["a dog"]]
ROWS = {"train": [{"captions": texts, "references": texts} for texts in TRAIN], "val": [{"captions": ["xyz"]}]}
SOURCE = RowSource(ROWS, classes=("cat", "dog"))


def open_field(field):
    open_fields(SOURCE, field)
    return field


@pytest.fixture
def captions():
    return open_field(CaptionField(tokenizer=CharTokenizer(), max_len=5))


def test_captions_lie_end_to_end_and_are_cut_with_their_end_kept(captions):
    bos, eos = captions.tokenizer.bos_id, captions.tokenizer.eos_id
    records = list(SOURCE.split("train").records())
    rows = captions.collate([captions.encode(record, (0, 0, 0)) for record in records])
    ids = captions.tokenizer.encode
    first = [bos, *ids("a cat")[:3], eos, bos, *ids("cats")[:3], eos]
    assert rows.tokens.tolist() == [first, [bos, *ids("a dog")[:3], eos, *[captions.tokenizer.pad_id] * 5]]
    assert rows.segments.tolist() == [[1] * 5 + [2] * 5, [1] * 5 + [0] * 5]
    assert [captions.length(record) for record in records] == [10, 5]
    assert rows.references == [[], []] and not rows.indices and rows.partners is None


def test_evaluation_has_references_and_the_captions_of_partners(captions):
    split = captions.view("val", SOURCE.split("train"), training=False)
    rows = captions.collate([captions.encode(record, None) for record in split.records()])
    assert rows.references == [["a cat", "cats"], ["a dog"]]
    assert (rows.indices, rows.partners.indices) == ([0, 1], [1, 0])
    assert torch.equal(rows.partners.tokens, rows.tokens.flip(0))
    assert torch.equal(rows.partners.segments, rows.segments.flip(0))
    assert rows.partners.targets.count == rows.targets.count
    assert captions.collate([]).tokens.shape == (0, 0)


def test_a_tokenizer_is_learned_from_train_alone_and_restored(captions):
    alone = CharTokenizer().fit(text for texts in TRAIN for text in texts)
    assert captions.tokenizer.fingerprint == alone.fingerprint
    other = CharTokenizer().fit(["entirely other"])
    record = SOURCE.split("train").record(0)
    before = captions.encode(record, (0, 0, 0))
    captions.restore({"tokenizer": other.state()})
    assert captions.tokenizer.fingerprint == other.fingerprint
    assert captions.encode(record, (0, 0, 0)) != before  # ids that were kept are forgotten
    assert captions.sizes == {"vocab_size": other.vocab_size}


def test_labels_ask_for_the_checkpoints_classes():
    labels = open_field(LabelField())
    labels.restore(labels.state())
    message = refusal(labels.restore, {"classes": ["cat", "wolf", "dog"]})
    assert "only in the checkpoint: wolf" in message
    assert "only in the data" not in message
    assert "order" in refusal(labels.restore, {"classes": ["dog", "cat"]})
    assert labels.collate([1, 0]).dtype == labels.collate([]).dtype == torch.int64


def test_images_are_cached_unless_they_are_fresh():
    def read(index, epoch):
        return Record(f"{index}", open_image=lambda: opens.append(index) or square(epoch))

    opens, split = [], ListSplit([0, 1], read)
    images = images_of(cache_images=True)
    cached = images.view("train", split, training=True)
    assert isinstance(cached, CachedImages)
    assert cached.record(1).image() == cached.record(1).image() and opens == [1]
    split.fresh = True
    fresh = images.view("train", split, training=True)
    assert fresh.record(1).image() != fresh.record(1, 9).image()


def square(red):
    return Image.new("RGB", (4, 4), (red, 0, 0))


def several(*colors):
    """A record of images of these levels of red."""
    first, *more = (partial(square, red) for red in colors)
    return Record(f"{colors[0]}", open_image=first, open_more=more)


def images_of(**options):
    return ImageField(preprocess=Preprocess(image_size=4), **options)


def test_all_images_of_a_record_are_read_in_order():
    images = images_of(cache_images=True)
    batch = images.collate([images.encode(several(10, 20, 30), None)] * 2)
    assert batch.shape == (2, 3, 3, 4, 4) and batch[1, :, 0, 0, 0].tolist() == [10, 20, 30]
    cached = images.view("train", ListSplit([0], lambda index, epoch: several(10, 20)), training=True)
    assert images.encode(cached.record(0), None)[:, 0, 0, 0].tolist() == [10, 20]
    one, two = (images.encode(several(*colors), None) for colors in ((1,), (1, 2)))
    assert "records have 1 and 2 images" in refusal(images.collate, [one, two])


def test_each_image_of_a_record_has_its_own_augmentation():
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    record = Record("a", open_image=lambda: noise, open_more=[lambda: noise])
    images = images_of(augment=Augment(image_size=16, min_scale=0.2))
    first, second = images.encode(record, (0, 0, 0))
    assert not torch.equal(first, second)
    assert torch.equal(images.encode(record, (0, 0, 0))[1], second)
    assert torch.equal(images.encode(Record("a", open_image=lambda: noise), (0, 0, 0)), first)


@pytest.mark.parametrize(
    ("known", "mirrored"),
    [
        ({"references": ["A dog leaps."]}, True),
        ({"references": ["a dog", "To its Left, a cat."]}, False),
        ({"references": ["bright leftovers"]}, True),
        ({"references": []}, True),
        ({"references": ["a dog", "一只狗在球的左边"]}, False),
        ({"references": ["一只狗 links vom Ball"]}, False),
        ({"references": ["一只狗在球的上边"]}, True),
        ({"text": "a man on the left", "translation": "ein Mann"}, False),
        ({"text": "left-handed scissors", "translation": "eine Schere"}, False),
        ({"text": "a man", "translation": "ein Mann"}, True),
    ],
)
def test_an_image_whose_texts_tell_left_from_right_is_not_mirrored(known, mirrored):
    image = Image.new("RGB", (8, 8), "red")
    image.paste("blue", (0, 0, 4, 8))
    augment, words = Augment(image_size=8, horizontal_flip=True), ["left", "right", "links", "左"]
    field = ImageField(preprocess=Preprocess(image_size=8), augment=augment, side_words=words)
    record = Record("a", known, lambda: image)
    plain = field.encode(record, None)
    others = [index for index in range(20) if not torch.equal(field.encode(record, (0, 0, index)), plain)]
    kept = [bool(DeviceImageField(field, (8, 8), {}).encode(record, (0, 0, index))[1][4]) for index in range(20)]
    assert bool(others) == mirrored and [index for index in range(20) if kept[index]] == others
    assert augment.horizontal_flip


def test_in_evaluation_a_partners_image_lies_beside_a_records_own():
    images, split = (
        PairedImageField(preprocess=Preprocess(image_size=4)),
        ListSplit([10, 20], lambda red, _: several(red)),
    )
    evaluated = images.view("test", split, training=False)
    batch = images.collate([images.encode(record, None) for record in evaluated.records()])
    assert batch[:, :, 0, 0, 0].tolist() == [[10, 20], [20, 10]]
    training = images.view("train", split, training=True)
    assert images.encode(training.record(0), (0, 0, 0)).shape == (3, 4, 4)
