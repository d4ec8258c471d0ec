"""A source joined with fields: batches, hold-outs, repeats, and what a checkpoint must agree with, of any data."""

import pickle
from collections import Counter

import pytest
import torch
from caption_data import captions, content, picture, refusal
from class_data import lay_out
from sharded import caption_members, class_members, write_tar

from vlm.data.fields import CaptionField, ImageField, LabelField
from vlm.data.hold_out import HELD_OUT
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.records import ListSplit, Record, Source
from vlm.data.shapes.scene_captions import SceneText
from vlm.data.shapes.scene_labels import ShapeClasses
from vlm.data.sources.class_folders import ClassFolders
from vlm.data.sources.shards import Shards
from vlm.data.text.text_field import TextField
from vlm.data.text.tokenizer import CharTokenizer
from vlm.training.data_module import Data

KINDS = {"shapes": ["circle", "cross"], "colors": ["red", "blue"], "sizes": ["small", "large"]}


def shapes(**options):
    lengths = {"train_scenes": 40, "val_scenes": 8, "test_scenes": 12}
    return ShapeClasses(**{"seed": 0, **KINDS, "image_size": 32, **lengths, **options})


def data(source, *fields, augment=None, cached=False, **options):
    """Images and what else a task reads, by default the class."""
    augment = ClassAugment(image_size=16, **(augment or {}))
    images = ImageField(preprocess=Preprocess(image_size=16), augment=augment, cache_images=cached)
    names = {LabelField: "labels", CaptionField: "captions"}
    rest = {names[type(field)]: field for field in fields or [LabelField()]}
    return prepare_data(source, {"images": images, **rest}, **options)


def prepare_data(source, fields, **options):
    given = {"batch_size": 8, "eval_batch_size": 8, "num_workers": 0, "order_seed": 0, **options}
    module = Data(source=source, fields=fields, **given)
    module.prepare()
    return module


def words():
    return CaptionField(tokenizer=CharTokenizer(), max_len=32)


def folder(root, splits=("train/", "val/"), **sizes):
    names = [f"{split}{name}/{n:03}.png" for split in splits for name, size in sizes.items() for n in range(size)]
    lay_out(root, *names)
    return ClassFolders(root=str(root), val_fraction=0)


def table(root, *, train, val=0, test=0, told=True):
    """Captioned images, of which the table says the splits or not."""
    splits = ["train"] * train + ["val"] * val + ["test"] * test
    for number in range(len(splits)):
        picture(root / f"{number}.png", (number, 0, 0))
    rows = [f"{number}.png,picture {number},{split}"[: None if told else -6] for number, split in enumerate(splits)]
    return captions(root, "\n".join(["image,caption" + ",split" * told, *rows, ""]))


def of_classes(root, **options):
    return data(folder(root, cat=12, dog=12), augment={"policy": "autoaugment", "min_scale": 0.5}, **options)


def of_captions(root, **options):
    return data(table(root, train=24, val=4), words(), augment={"min_scale": 0.5}, bucket=2, **options)


def of_shards(root, **options):
    write_tar(root / "train/0.tar", class_members(*["cat", "dog"] * 12))
    write_tar(root / "val/0.tar", class_members("cat", "dog", first=24))
    return data(Shards(root=str(root), needs=("label",)), augment={"erase": 1.0}, **options)


def of_scenes(root, **options):
    return data(shapes(), augment={"horizontal_flip": True}, **options)


def of_texts(root, **options):
    documents = {"train_documents": 9, "val_documents": 2, "test_documents": 2}
    source = SceneText(seed=0, max_objects=2, scenes=2, **KINDS, **documents)
    fields = {"text": TextField(tokenizer=CharTokenizer(), max_len=16)}
    return prepare_data(source, fields, **options)


FAMILIES = [of_classes, of_captions, of_shards, of_scenes]


def everything(loader):
    """Name and values of each sample."""
    return [row for batch in loader for row in zip(batch.ids, batch["labels"].tolist(), batch["images"], strict=True)]


def check_same_batches(one, other):
    """Whether batches are equal to the bit."""
    for a, b in zip(one, other, strict=True):
        assert (a.ids, a.bad, list(a.values)) == (b.ids, b.bad, list(b.values))
        for x, y in zip(a.values.values(), b.values.values(), strict=True):
            pairs = [(x, y)] if isinstance(x, torch.Tensor) else [(x.tokens, y.tokens), (x.segments, y.segments)]
            assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    return True


def test_batches_of_classes(tmp_path):
    module = data(folder(tmp_path, ("train/", "val/", "test/"), cat=9, dog=6))
    batches = list(module.train_dataloader())
    assert [batch["images"].shape for batch in batches] == [(8, 3, 16, 16), (7, 3, 16, 16)]
    assert batches[0]["images"].dtype == torch.uint8
    assert batches[0]["labels"].dtype == torch.int64
    found = {id: label for id, label, _ in everything(batches)}
    assert found == {f"train/{c}/00{n}.png": k for k, (c, s) in enumerate((("cat", 9), ("dog", 6))) for n in range(s)}
    assert module.sizes == {"num_classes": 2}
    ids = [id for id, _, _ in everything(module.test_dataloader())]
    assert ids == [record.id for record in module.split("test").records()]


def test_batches_of_captions(tmp_path):
    field = words()
    module = data(table(tmp_path, train=9, val=2), field)
    assert module.sizes == {"vocab_size": field.tokenizer.vocab_size}
    decode = field.tokenizer.decode
    found = {}
    for batch in module.train_dataloader():
        assert batch["captions"].segments.shape == batch["captions"].tokens.shape
        assert batch["captions"].references == [[]] * len(batch.ids)  # evaluation alone reads them
        found |= dict(zip(batch.ids, map(decode, batch["captions"].tokens.tolist()), strict=True))
    assert found == {f"{number}.png": f"picture {number}" for number in range(9)}
    (batch,) = module.val_dataloader()
    assert batch.ids == ["9.png", "10.png"]
    assert batch["captions"].references == [["picture 9"], ["picture 10"]]


@pytest.mark.parametrize("make", FAMILIES)
def test_evaluation_sees_what_preprocessing_gives(make, tmp_path):
    module = make(tmp_path)
    pixels = torch.cat([batch["images"] for batch in module.val_dataloader()])
    records = list(module.source.split("val").records())
    assert torch.equal(pixels, torch.stack([module.images[1].preprocess(record.image()) for record in records]))


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("make", [*FAMILIES, of_texts])
def test_workers_change_nothing(make, repeats, tmp_path):
    here, there = (list(make(tmp_path, num_workers=n, repeats=repeats).train_dataloader()) for n in (0, 2))
    assert check_same_batches(here, there)


@pytest.mark.parametrize("make", [*FAMILIES, of_texts])
def test_workers_may_be_started_afresh(make, tmp_path):
    samples = make(tmp_path).samples("train", training=True)
    keys = next(iter(make(tmp_path).train_order()))
    copy = pickle.loads(pickle.dumps(samples))
    assert check_same_batches([samples.__getitems__(keys)], [copy.__getitems__(keys)])


class TestHeldOut:
    def test_each_class_gives_its_share(self, tmp_path):
        source = folder(tmp_path, ("train/", "test/"), a=100, b=50, c=3)
        module = data(source)
        labels = module.fields["labels"]
        assert (labels.counts("val"), labels.counts("train")) == ([2, 1, 0], [98, 49, 3])
        held, rest = (module.split(name) for name in ("val", "train"))
        assert len({record.id for split in (held, rest) for record in split.records()}) == 153
        assert held.record(0).image() == source.split("train").record(held.indices[0]).image()
        assert data(source, seed=1).split("val").indices != held.indices

    def test_rows_that_are_added_move_none(self, tmp_path):
        """An image of val stays there, and one of train is never validated on, where a table grows at any place."""
        before = content(data(table(tmp_path, train=200, told=False), words()))
        for number in range(20):
            picture(tmp_path / f"_{number}.png")
        text = (tmp_path / "captions.csv").read_text().splitlines()
        rows = [f"_{number}.png,new" for number in range(20)]
        grown = captions(tmp_path, "\n".join([text[0], *rows[:10], *text[1:], *rows[10:], ""]))
        after = content(data(grown, words()))
        assert len(before["val"]) == pytest.approx(HELD_OUT * 200, abs=6)
        assert all(before[name].items() <= after[name].items() for name in ("train", "val"))

    def test_too_few_to_hold_one_out(self, tmp_path):
        assert "too few training samples" in refusal(data, folder(tmp_path, ("",), cat=1, dog=1))


def test_so_many_training_samples_have_all_classes(tmp_path):
    module = data(folder(tmp_path, a=40, b=20, c=20), train_samples=8)
    assert module.fields["labels"].counts("train") == [4, 2, 2]
    fresh = data(shapes(), train_samples=8)
    assert fresh.fields["labels"].counts("train") == [2, 2, 2, 2]
    split = fresh.split("train")
    assert split.record(3).image() == split.record(3, 5).image()
    assert len(data(shapes(), train_samples=1000).split("train")) == 40


def test_so_many_training_samples_without_classes_are_the_first(tmp_path):
    module = data(table(tmp_path, train=9, val=1), words(), train_samples=3)
    assert [record.id for record in module.split("train").records()] == ["0.png", "1.png", "2.png"]


def test_a_cache_changes_no_pixel(tmp_path):
    source = folder(tmp_path, cat=4, dog=4)
    modules = [data(source, augment={"policy": "randaugment"}, cached=cached) for cached in (False, True)]
    for _ in range(2):
        assert check_same_batches(*(module.train_dataloader() for module in modules))
    for path in (tmp_path / "train").rglob("*.png"):
        path.unlink()
    assert len(everything(modules[1].train_dataloader())) == 8
    assert not everything(modules[0].train_dataloader())


def test_repeats_show_an_image_in_one_batch_each_time_anew(tmp_path):
    module = data(folder(tmp_path, cat=32, dog=32), augment={"policy": "randaugment", "min_scale": 0.3}, repeats=4)
    batches = list(module.train_dataloader())
    assert len(batches) == module.train_batches() == 8
    shown = Counter(id for batch in batches for id in batch.ids)
    assert set(shown.values()) == {4}
    for batch in batches:
        assert set(Counter(batch.ids).values()) == {4}
        assert len({image.numpy().tobytes() for image in batch["images"]}) > 4
    first = batches[0]["images"][[id == batches[0].ids[0] for id in batches[0].ids]]
    assert len({image.numpy().tobytes() for image in first}) == 4


def test_repeats_that_do_not_divide_a_batch_are_refused():
    assert "data.repeats=3" in refusal(data, shapes(), repeats=3)


def test_a_checkpoint_gives_its_preprocessing(tmp_path):
    module = data(folder(tmp_path, cat=2, dog=2))
    state = Preprocess(image_size=8, mean=[0.1, 0.2, 0.3]).state()
    module.restore({"classes": ["cat", "dog"], "preprocess": state})
    assert module.images[1].preprocess.state() == state
    assert next(iter(module.val_dataloader()))["images"].shape == (4, 3, 8, 8)


def test_the_fingerprint_tells_names_and_what_is_read(tmp_path):
    first = data(folder(tmp_path / "a", cat=3, dog=3)).fingerprint()
    assert data(folder(tmp_path / "b", cat=3, dog=3)).fingerprint() == first
    assert data(folder(tmp_path / "c", cat=4, dog=3)).fingerprint() != first
    assert data(folder(tmp_path / "d", cat=3, dogs=3)).fingerprint() != first
    assert data(shapes()).fingerprint() == data(shapes()).fingerprint() != data(shapes(train_scenes=41)).fingerprint()
    field = words()
    source = table(tmp_path / "e", train=3, val=1)
    known = data(source, field).fingerprint()
    file = tmp_path / "e" / "captions.csv"
    other = captions(tmp_path / "e", file.read_text().replace("picture 2", "picture two"))
    assert data(other, field).fingerprint() != known


def test_shards_of_captions_and_classes_suit_either_task(tmp_path):
    """Any source goes with any task whose values its records hold."""
    write_tar(
        tmp_path / "train/0.tar", caption_members(8) | {f"{number:09d}.cls": str(number % 2) for number in range(8)}
    )
    write_tar(tmp_path / "val/0.tar", class_members("0", "1", first=8) | caption_members(1, first=20))
    labelled = data(Shards(root=str(tmp_path), needs=("image", "label")))
    assert everything(labelled.val_dataloader())[0][:2] == ("val/0.tar/8.png", 0)
    assert sorted(label for _, label, _ in everything(labelled.train_dataloader())) == [0] * 4 + [1] * 4
    field = words()
    told = data(Shards(root=str(tmp_path), needs=("image", "captions")), field)
    (batch,) = told.val_dataloader()
    assert batch["captions"].references == [["caption 20"]]
    assert len(told.source.skipped) == 2 and len(labelled.source.skipped) == 1
    together = data(Shards(root=str(tmp_path), path="train/*.tar", needs=("captions", "label")), field, LabelField())
    batch = next(iter(together.train_dataloader()))
    texts = [field.tokenizer.decode(row) for row in batch["captions"].tokens.tolist()]
    assert batch["labels"].tolist() == [int(text.split()[1]) % 2 for text in texts]


class Half(Source):
    """Records of which some lack a value."""

    holds = ("image", "label")
    splits = ("train", "val")
    classes = ("a", "b")

    def open(self, name):
        return ListSplit(
            [0, 1, None, 1], lambda label, epoch: Record("3.jpg", {} if label is None else {"label": label})
        )


def test_a_value_that_a_record_lacks_is_named():
    message = refusal(data(Half()).fingerprint)
    assert message == "data: 3.jpg has no label; use data that has it, or another task"
    assert refusal(Half().split("train").record(0).image) == (
        "data: 3.jpg has no image; use data that has one, or another task"
    )
