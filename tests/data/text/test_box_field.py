"""The field of boxes: prompts, objects in random order by key, augmented as their images, and what does not fit."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vlm.data.batch import CaptionRow
from vlm.data.boxes import ImageBoxes, LabeledBox, format_prompt, parse_objects
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.records import ListSplit, Record
from vlm.data.shapes.scene_boxes import SceneBoxes
from vlm.data.text.box_field import BoxField, widen
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.errors import UserError

CLASSES = ["bird", "cat", "dog", "left shoe"]
CAT, DOG = LabeledBox("cat", (4.0, 6.0, 20.0, 30.0)), LabeledBox("dog", (30.0, 2.0, 60.0, 40.0))
CROWD = LabeledBox("bird", (0.0, 0.0, 64.0, 64.0), True)


def field(classes=CLASSES, max_len: int = 200, **options) -> BoxField:
    made = BoxField(
        tokenizer=ByteTokenizer(), max_len=max_len, **{"preprocess": Preprocess(image_size=64), "named": 0.0, **options}
    )
    made.open(SimpleNamespace(classes=classes, languages=(), has_turns=False), {"train": []}, seed=0, cache=None)
    return made


def record(*boxes: LabeledBox, size=(64, 64), id: str = "a") -> Record:
    return Record(id, {"boxes": ImageBoxes(size, boxes)}, lambda: Image.new("RGB", size))


def read_row(made: BoxField, given: Record) -> CaptionRow:
    """A record as evaluation reads it."""
    split = made.view("val", ListSplit([given], lambda item, epoch: item), training=False)
    return made.encode(split.record(0), None)


def read(made: BoxField, ids: list[int], generated: list[bool]) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
    """The prompt of a text, and its objects."""
    at = generated.index(True)
    assert all(generated[at:]) and ids[0] == made.tokenizer.bos_id and ids[-1] == made.tokenizer.eos_id
    answer = ids[at:-1]
    found = list(parse_objects(made.tokenizer, made.tokenizer.location_ids, answer, [0.0] * len(answer)))
    assert None not in found
    return made.tokenizer.decode(ids[1:at]), [(item.label, item.numbers) for item in found]


def test_a_text_is_a_prompt_with_objects_whose_edges_are_bins_of_the_view() -> None:
    made = field()
    prompt, objects = read(made, *read_row(made, record(CAT, DOG, CROWD)).texts[0])
    assert prompt == "detect\n" and len(made.tokenizer.location_ids) == 65
    assert sorted(objects) == [("cat", (6, 4, 30, 20)), ("dog", (2, 30, 40, 60))]  # top, left, bottom, right
    rows = made.collate([read_row(made, record(CAT)), read_row(made, record(DOG))])
    assert rows.references == [[ImageBoxes((64, 64), (CAT,))], [ImageBoxes((64, 64), (DOG,))]]
    halved = field(preprocess=Preprocess(image_size=32, resize="squash"))
    assert read(halved, *read_row(halved, record(CAT)).texts[0])[1] == [("cat", (3, 2, 15, 10))]
    assert len(field(preprocess=Preprocess(image_size=2048)).tokenizer.location_ids) == 1024


def test_the_order_of_objects_is_random_by_key_and_the_same_in_any_process() -> None:
    boxes = [LabeledBox("cat", (float(n), 1.0, n + 5.0, 9.0)) for n in range(5)]
    made, orders = field(prompts_per_image=2), []
    for epoch in range(6):
        texts = made.encode(record(*boxes), (0, epoch, 3)).texts
        assert texts == field(prompts_per_image=2).encode(record(*boxes), (0, epoch, 3)).texts
        orders += [tuple(numbers[1] for _, numbers in read(made, *text)[1]) for text in texts]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders) and len({*orders}) > 10
    texts = [read_row(made, record(*boxes, id=name)).texts for name in "abcab"]
    assert texts[:2] == texts[3:] and texts[0] != texts[1]


def test_a_prompt_that_names_classes_has_their_objects_only() -> None:
    made, present, absent, empty = field(named=1.0), Counter(), Counter(), 0
    for index in range(200):
        prompt, objects = read(made, *made.encode(record(CAT, DOG), (0, 0, index)).texts[0])
        assert prompt.startswith("detect ") and prompt.endswith("\n")
        classes = prompt.removeprefix("detect ").strip().split(" ; ")
        assert prompt == format_prompt(classes) and len({*classes}) == len(classes)
        assert sorted(label for label, _ in objects) == sorted({*classes} & {"cat", "dog"})
        present.update({*classes} & {"cat", "dog"})
        absent.update({*classes} - {"cat", "dog"})
        empty += not objects
    assert min(present.values()) > 50 and {*absent} == {"bird", "left shoe"} and 20 < empty < 120
    half = field(named=0.5)
    prompts = [read(half, *half.encode(record(CAT), (0, 0, index)).texts[0])[0] for index in range(200)]
    assert 60 < prompts.count("detect\n") < 140
    single = field(classes=["cat"], named=1.0)
    assert read(single, *single.encode(record(CAT), (0, 0, 1)).texts[0])[1]  # it asks for that class, or for all


def test_boxes_are_augmented_as_their_image() -> None:
    """The objects of drawn scenes are painted where the tokens say, after a crop and a mirror image."""
    options = {"shapes": ["circle", "cross"], "colors": ["red", "green", "blue"], "sizes": ["large"]}
    sizes = {"train_scenes": 40, "val_scenes": 4, "test_scenes": 4}
    source = SceneBoxes(seed=0, max_objects=2, object_weights=[0, 1], image_size=64, **options, **sizes)
    augment = Augment(image_size=48, min_scale=0.5, horizontal_flip=True)
    made = field(classes=source.classes, preprocess=Preprocess(image_size=48), augment=augment, min_visible=0.6)
    hues, seen = {"red": 0, "green": 1, "blue": 2}, 0
    for index in range(40):
        scene, key = source.split("train").record(index), (0, 0, index)
        pixels = augment(scene.image(), key).numpy().astype(int)
        for label, (top, left, bottom, right) in read(made, *made.encode(scene, key).texts[0])[1]:
            if [item.label.split()[0] for item in scene["boxes"].boxes].count(label.split()[0]) > 1:
                continue
            hue = hues[label.split()[0]]
            painted = pixels[hue] - np.delete(pixels, hue, 0).max(0) > 60
            rows, columns = np.flatnonzero(painted.any(1)), np.flatnonzero(painted.any(0))
            found = rows[0], columns[0], rows[-1] + 1, columns[-1] + 1
            assert np.abs(np.subtract(found, (top, left, bottom, right))).max() <= 2, (index, label)
            seen += 1
    assert seen > 30


def test_what_the_view_does_not_show_is_left_out_and_the_rest_is_cut() -> None:
    made = field(preprocess=Preprocess(image_size=32, resize="crop"), min_visible=0.25)
    wide = 128, 64  # the crop shows x from 32 to 96
    boxes = [
        LabeledBox("cat", (0.0, 0.0, 30.0, 20.0)),  # outside
        LabeledBox("dog", (0.0, 0.0, 38.0, 20.0)),  # less than a quarter inside
        LabeledBox("bird", (24.0, 10.0, 40.0, 20.0)),  # half inside
    ]
    assert read(made, *read_row(made, record(*boxes, size=wide)).texts[0])[1] == [("bird", (5, 0, 10, 4))]
    all_of_it = field(preprocess=Preprocess(image_size=32, resize="crop"), min_visible=0.0)
    labels = [label for label, _ in read(all_of_it, *read_row(all_of_it, record(*boxes, size=wide)).texts[0])[1]]
    assert sorted(labels) == ["bird", "dog"]


def test_objects_that_do_not_fit_are_left_out_and_counted() -> None:
    made = field(max_len=29)
    boxes = [LabeledBox("cat", (float(n), 1.0, n + 5.0, 9.0)) for n in range(5)]
    ids, generated = read_row(made, record(*boxes)).texts[0]
    assert len(ids) <= 29 and len(read(made, ids, generated)[1]) == 2 and made.truncated == 1
    assert made.lengths(record(*boxes)) == [("cat cat cat cat cat", len("detect\n") + 1 + 5 * 7 + 1)]
    thin = LabeledBox("cat", (10.1, 63.8, 10.2, 64.0))  # thinner than a bin, at the edge
    assert read(made, *read_row(made, record(thin)).texts[0])[1] == [("cat", (63, 10, 64, 11))]
    assert widen([64, 64, 64, 64], 65) == [63, 63, 64, 64]


def test_classes_of_left_and_right_are_not_mirrored() -> None:
    options = {"augment": Augment(image_size=64, horizontal_flip=True), "side_words": ["left", "right"]}
    made, shoe = field(**options), LabeledBox("left shoe", (1.0, 1.0, 9.0, 9.0))
    assert len({made.encode(record(CAT), (0, 0, n)).texts[0][0][-5] for n in range(20)}) == 2
    texts = [made.encode(record(shoe), (0, 0, n)).texts for n in range(20)]
    assert texts == texts[:1] * 20


def test_augmentations_that_move_pixels_without_boxes_are_refused() -> None:
    with pytest.raises(UserError, match="ClassAugment may rotate or shift images and not their boxes; use Augment"):
        field(augment=ClassAugment(image_size=64))


def test_a_class_that_the_tokenizer_writes_otherwise_is_refused() -> None:
    made = field(classes=["cat", "Dog"])
    made.tokenizer = ByteTokenizer(lowercase=True)
    made.tokenizer.add_locations(made.bins)
    with pytest.raises(UserError, match="the tokenizer writes the class 'Dog' as 'dog'; use another tokenizer, or"):
        made.prepare()
    field(classes=["cat", "Dog", "Lampe \u00e0 pied"]).prepare()


def test_a_checkpoint_without_a_class_of_the_data_is_refused() -> None:
    made, other = field(), field(classes=["cat", "zebra"])
    about = made.state() | {"preprocess": Preprocess(image_size=64).state()}
    with pytest.raises(UserError, match="the checkpoint has no class 'zebra'"):
        other.restore(about)
    fewer = field(classes=["cat"], bins=5)
    fewer.restore(about)
    assert list(fewer.classes) == CLASSES and fewer.bins == 65
