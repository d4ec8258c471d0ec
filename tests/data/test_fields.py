"""Fields: values of a record, encoded and collated, and what a checkpoint must agree with."""

import pytest
import torch
from captioned import refusal
from PIL import Image

from vlm.data.fields import CachedImages, CaptionField, ImageField, LabelField, learn_tokenizers
from vlm.data.images.image import Preprocess
from vlm.data.records import Listed, Record, Source
from vlm.data.text.tokenizer import CharTokenizer

TRAIN, VAL = [["a cat", "cats"], ["a dog"]], [["xyz"]]


class Told(Source):
    """Captions, and the numbers of their images."""

    splits = ("train", "val")
    classes = ("cat", "dog")

    def open(self, name):
        rows = list(enumerate(TRAIN if name == "train" else VAL))
        return Listed(rows, lambda row, epoch: Record(f"{row[0]}", {"captions": row[1], "references": row[1]}))


def opened(field):
    source = Told()
    field.open(source, {name: source.split(name) for name in source.splits}, seed=0, cache=None)
    learn_tokenizers([field], None)
    field.prepare()
    return field


@pytest.fixture
def captions():
    return opened(CaptionField(tokenizer=CharTokenizer(), max_len=5))


def test_captions_lie_end_to_end_and_are_cut_with_their_end_kept(captions):
    bos, eos = captions.tokenizer.bos_id, captions.tokenizer.eos_id
    records = list(Told().split("train").records())
    rows = captions.collate([captions.encode(record, (0, 0, 0)) for record in records])
    ids = captions.tokenizer.encode
    first = [bos, *ids("a cat")[:3], eos, bos, *ids("cats")[:3], eos]
    assert rows.tokens.tolist() == [first, [bos, *ids("a dog")[:3], eos, *[captions.tokenizer.pad_id] * 5]]
    assert rows.segments.tolist() == [[1] * 5 + [2] * 5, [1] * 5 + [0] * 5]
    assert [captions.length(record) for record in records] == [10, 5]
    assert rows.references == [[], []] and not rows.places and rows.others is None


def test_evaluation_has_references_and_the_captions_of_partners(captions):
    split = captions.view("val", Told().split("train"), training=False)
    rows = captions.collate([captions.encode(record, None) for record in split.records()])
    assert rows.references == [["a cat", "cats"], ["a dog"]]
    assert (rows.places, rows.others.places) == ([0, 1], [1, 0])
    assert torch.equal(rows.others.tokens, rows.tokens.flip(0))
    assert torch.equal(rows.others.segments, rows.segments.flip(0))
    assert rows.others.targets.count == rows.targets.count
    assert captions.collate([]).tokens.shape == (0, 0)


def test_a_tokenizer_is_learned_from_train_alone_and_restored(captions):
    alone = CharTokenizer().fit(text for texts in TRAIN for text in texts)
    assert captions.tokenizer.fingerprint == alone.fingerprint
    other = CharTokenizer().fit(["entirely other"])
    record = Told().split("train").record(0)
    before = captions.encode(record, (0, 0, 0))
    captions.restore({"tokenizer": other.state()})
    assert captions.tokenizer.fingerprint == other.fingerprint
    assert captions.encode(record, (0, 0, 0)) != before  # ids that were kept are forgotten
    assert captions.sizes == {"vocab_size": other.vocab_size}


def test_labels_ask_for_the_checkpoints_classes():
    labels = opened(LabelField())
    labels.restore(labels.state())
    message = refusal(labels.restore, {"classes": ["cat", "wolf", "dog"]})
    assert "only there: wolf" in message
    assert "only here" not in message
    assert "order" in refusal(labels.restore, {"classes": ["dog", "cat"]})
    assert labels.collate([1, 0]).dtype == labels.collate([]).dtype == torch.int64


def test_images_are_cached_unless_they_are_fresh():
    def read(index, epoch):
        return Record(f"{index}", open_image=lambda: opens.append(index) or Image.new("RGB", (4, 4), (epoch, 0, 0)))

    opens, split = [], Listed([0, 1], read)
    images = ImageField(preprocess=Preprocess(image_size=4), cache_images=True)
    cached = images.view("train", split, training=True)
    assert isinstance(cached, CachedImages)
    assert cached.record(1).image() == cached.record(1).image() and opens == [1]
    split.fresh = True
    fresh = images.view("train", split, training=True)
    assert fresh.record(1).image() != fresh.record(1, 9).image()
