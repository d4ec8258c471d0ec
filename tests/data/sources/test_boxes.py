"""Boxes of one's own: COCO's instances and tables; what is wrong is named with its row, and what to do."""

import json

import pytest
from caption_data import NO_HOLD_OUT, refusal
from PIL import Image

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.data.images.image import ImageError
from vlm.data.records import collect_errors
from vlm.data.sources.boxes import BoxTable, CocoBoxes

HEAD = "image,label,left,top,right,bottom"


@pytest.fixture
def root(tmp_path):
    for name, size in (("a.png", (40, 30)), ("b.png", (20, 50)), ("c.png", (10, 10))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    return tmp_path


def table(root, *lines, head=HEAD, name="boxes.csv", **options):
    (root / name).write_text("\n".join([head, *lines, ""]))
    return BoxTable(path=str(root / name), **NO_HOLD_OUT | options)


def read_boxes(source, split="train"):
    return {record.id: record["boxes"] for record in source.split(split).records()}


CAT = LabeledBox("cat", (1.0, 2.0, 30.5, 20.0))
DOG = LabeledBox("red dog", (0.0, 0.0, 20.0, 50.0))


def test_a_table_has_a_row_per_box_and_rows_of_images_without_objects(root):
    rows = ["a.png,cat,1,2,30.5,20", "b.png, red  dog ,0,0,20,50", "a.png,cat,3,3,9,9", "c.png,,,,,"]
    source = table(root, *rows)
    assert read_boxes(source) == {
        "a.png": ImageBoxes((40, 30), (CAT, LabeledBox("cat", (3.0, 3.0, 9.0, 9.0)))),
        "b.png": ImageBoxes((20, 50), (DOG,)),
        "c.png": ImageBoxes((10, 10), ()),
    }
    assert source.classes == ["cat", "red dog"] and not source.skipped
    record = source.split("train").record(0)
    assert record.image().size == (40, 30) and record.texts == ["cat 1 2 30.5 20", "cat 3 3 9 9"]


def test_names_of_columns_sizes_splits_and_other_formats(root):
    voc = table(root, "a.png,cat,1,2,30.5,20,train", head="image,label,xmin,ymin,xmax,ymax,split")
    assert read_boxes(voc)["a.png"].boxes == (CAT,)
    head = "file,kind,l,t,r,b"
    names = dict(zip(("image", "label", "left", "top", "right", "bottom"), head.split(","), strict=True))
    own = table(root, "a.png,cat,1,2,30.5,20", head=head, **{f"{key}_column": name for key, name in names.items()})
    assert read_boxes(own) == read_boxes(voc)
    lines = [
        {"image": "a.png", "label": "cat", "left": 1, "top": 2, "right": 30.5, "bottom": 20, "split": "train"},
        {"image": "b.png", "label": "red dog", "left": 0, "top": 0, "right": 20, "bottom": 50, "split": "val"},
        {"image": "c.png", "label": "", "left": None, "top": None, "right": None, "bottom": None, "split": "val"},
    ]
    (root / "boxes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = BoxTable(path=str(root / "boxes.jsonl"))
    assert read_boxes(source) == read_boxes(voc)
    assert read_boxes(source, "val") == {"b.png": ImageBoxes((20, 50), (DOG,)), "c.png": ImageBoxes((10, 10), ())}


def test_width_and_height_of_a_table_must_be_those_of_the_image(root):
    head = f"{HEAD},width,height"
    source = table(root, "a.png,cat,1,2,30.5,20,40,30", "b.png,red dog,0,0,20,50,50,50", head=head)
    first, second = source.split("train").records()
    assert first["boxes"].size == (40, 30) == first.image().size
    with pytest.raises(ImageError, match=r"b.png: has 20 x 50 pixels, but its boxes are for 50 x 50; correct width"):
        second.image()


FAULTS = [
    ("a.png,cat,5,2,5,9", "line 2: its box is empty (left 5, top 2, right 5, bottom 9)"),
    ("a.png,cat,9,2,5,9", "line 2: its box is inverted (left 9, top 2, right 5, bottom 9)"),
    ("a.png,cat,5,2,50,9", "line 2: its box reaches outside its image of 40 x 30 pixels (left 5, top 2, right 50"),
    ("a.png,cat,-9,2,5,9", "line 2: its box reaches outside its image of 40 x 30 pixels"),
    ("a.png,cat,nan,2,5,9", "line 2: its box has an edge that is not a number"),
    ("a.png,cat,x,2,5,9", "line 2: left is x, which is not a number"),
    ("a.png,cat,1,2,5,", "line 2: has no bottom edge"),
    ("a.png,,1,2,5,9", "line 2: has a box, but no class"),
    (
        "a.png,cat,40.2,2,40.9,9",
        "line 2: its box reaches outside its image of 40 x 30 pixels",
    ),  # nothing of it is inside
    ("a.png,cat; dog,1,2,5,9", "line 2: its class cat; dog has a semicolon, which separates classes in prompts"),
]


@pytest.mark.parametrize(("row", "reason"), FAULTS)
def test_an_invalid_box_is_refused_with_its_row_or_skipped_if_it_is_rare(row, reason, root):
    message = refusal(table, root, row)
    assert f"{root / 'boxes.csv'}: 1 of 1 rows is invalid" in message and "correct or remove them" in message
    assert reason in message
    good = [f"b.png,red dog,0,0,20,{edge / 10:g}" for edge in range(1, 201)]
    source = table(root, row, *good)
    (line,) = source.skipped
    assert reason in line and line.kind == "invalid row" and "a.png" not in read_boxes(source)


def test_width_and_height_are_numbers_of_pixels(root):
    head = f"{HEAD},width,height"
    for sides in ("inf,30", "nan,30", "40.5,30", "0,30", "1e6,30"):
        assert "are no numbers of pixels" in refusal(table, root, f"a.png,cat,1,2,5,9,{sides}", head=head)


def test_edges_that_are_shares_of_the_sides_are_refused(root):
    rows = ["a.png,cat,0.1,0.2,0.5,1", "b.png,cat,0,0.1,0.3,0.4"]
    message = refusal(table, root, *rows)
    assert "no edge exceeds 1, as if edges were shares of the image's sides; give pixels" in message
    assert read_boxes(table(root, *rows, "c.png,cat,0,0,1,2"))["c.png"].boxes  # a small object among others


def test_an_edge_that_is_rounded_beyond_the_image_is_cut(root):
    source = table(root, "a.png,cat,-0.6,0,40.7,30.9", "b.png,cat,1,2,3,4")
    assert read_boxes(source)["a.png"].boxes[0].box == (0.0, 0.0, 40.0, 30.0)


def test_missing_and_unreadable_images_and_repeated_boxes_are_named(root):
    (root / "d.png").write_bytes(b"no image")
    source = table(root, "a.png,cat,1,2,3,4", "a.png,cat,1,2,3,4", "d.png,cat,1,2,3,4")
    assert source.repeated == [f"{root / 'boxes.csv'}, line 3: repeats a box of a.png: cat 1 2 3 4"]
    with pytest.raises(ImageError, match=r"d.png: damaged, or not an image"):
        source.split("train").record(1).image()
    assert "no.png" in refusal(table, root, "no.png,cat,1,2,3,4")
    assert "no column" in refusal(table, root, "a.png,cat,1,2,3,4", head="image,label,left,top,right,below_it_all")


def coco(root, annotations, images=None, categories=None, folder="", **options):
    """Writes an instances file, and reads it."""
    images = images or [
        {"id": 1, "file_name": "a.png", "width": 40, "height": 30},
        {"id": 2, "file_name": "b.png", "width": 20, "height": 50, "license": 3},
        {"id": 3, "file_name": "c.png", "width": 10, "height": 10},
    ]
    categories = categories or [{"id": 18, "name": "red dog"}, {"id": 7, "name": "cat", "supercategory": "animal"}]
    content = {"images": images, "annotations": annotations, "categories": categories, "info": {}}
    (root / folder).mkdir(parents=True, exist_ok=True)
    file = root / folder / "instances_train2017.json"
    file.write_text(json.dumps(content))
    given = {} if folder else {"path": str(file)}
    return CocoBoxes(root=str(root), **NO_HOLD_OUT | given | options)


def box(image=1, category=7, bbox=(1, 2, 29.5, 18), id=5, **more):
    return {"id": id, "image_id": image, "category_id": category, "bbox": list(bbox), "area": 9.5, **more}


def test_coco_boxes_have_classes_crowds_and_images_without_objects(root):
    crowd = box(2, 18, (0, 0, 20, 50), id=6, iscrowd=1, segmentation={"counts": [1]})
    source = coco(root, [box(iscrowd=0, segmentation=[[1, 2]]), crowd])
    assert read_boxes(source) == {
        "a.png": ImageBoxes((40, 30), (CAT,)),
        "b.png": ImageBoxes((20, 50), (DOG._replace(crowd=True),)),
        "c.png": ImageBoxes((10, 10), ()),
    }
    assert source.classes == ["red dog", "cat"] and source.rows == 2


def test_the_official_layout_is_found(root):
    (root / "train2017").mkdir()
    for name in "abc":
        (root / f"{name}.png").rename(root / "train2017" / f"{name}.png")
    source = coco(root, [box()], folder="annotations")
    assert [*read_boxes(source)] == ["train2017/a.png", "train2017/b.png", "train2017/c.png"]
    assert read_boxes(source)["train2017/a.png"] == ImageBoxes((40, 30), (CAT,))
    (root / "annotations" / "instances_train2017.json").unlink()
    assert "instances_train2017.json: no such file; set data.root" in refusal(CocoBoxes, root=str(root))


COCO_FAULTS = [
    ({"bbox": (5, 2, 0, 9)}, "annotation 5: its box is empty"),
    ({"bbox": (5, 2, -3, 9)}, "annotation 5: its box is inverted (left 5, top 2, right 2, bottom 11)"),
    ({"bbox": (5, 2, 60, 9)}, "annotation 5: its box reaches outside its image of 40 x 30 pixels"),
    ({"bbox": (5, 2, 9)}, "annotation 5: bbox is [5, 2, 9], not left, top, width and height"),
    ({"bbox": (5, 2, 10**400, 9)}, f"annotation 5: a number of bbox is 1{'0' * 49} ..., which is too large"),
    ({"bbox": (5, 2, "9", 9)}, "annotation 5: bbox is [5, 2, '9', 9], not left, top, width and height"),
    ({"category": 9}, "annotation 5: category_id 9 is not among the categories that have a name"),
    ({"image": 9}, "annotation 5: image_id 9 is not among the images"),
    ({"iscrowd": 2}, "annotation 5: iscrowd is 2, not 0 or 1"),
]


@pytest.mark.parametrize(("changes", "reason"), COCO_FAULTS)
def test_an_invalid_annotation_is_refused_with_its_id_or_skipped_if_it_is_rare(changes, reason, root):
    message = refusal(coco, root, [box(**changes)])
    assert f"{root / 'instances_train2017.json'}: 1 of 1 rows is invalid" in message and reason in message
    good = [box(2, 18, (0, 0, 20, n / 10), id=n) for n in range(100, 300)]
    source = coco(root, [box(**changes), *good])
    assert [reason in line for line in source.skipped] == [True]
    assert changes.get("image") or "a.png" not in read_boxes(source)  # it is not an image without objects


def test_categories_and_images_that_cannot_be_used_are_named(root):
    unnamed = [{"id": 7}, {"id": 18, "name": "dog"}]
    message = refusal(coco, root, [box()], categories=unnamed)
    assert "category 0: has no 'name'" in message and "category_id 7 is not among the categories" in message
    twice = [{"id": 7, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 8, "name": "cat"}]
    with collect_errors() as errors:
        coco(root, [box()], categories=twice)
    assert "category 1: has the id 7 of an earlier one" in errors[0]
    assert "category 2: has the name 'cat' of an earlier one" in errors[0]
    images = [{"id": n, "file_name": "a.png", "width": 40, "height": 30} for n in (1, 2)]
    message = refusal(
        coco, root, [box()], images=[*images, {"id": 3, "file_name": "b.png", "width": 10**9, "height": 1}]
    )
    assert "image 1: has the file_name a.png of an earlier one" in message and "has 1000000000 x 1 pixels" in message
    (root / "captions.json").write_text(json.dumps({"images": [], "annotations": []}))
    message = refusal(CocoBoxes, root=str(root), path="captions.json")
    assert "has no list 'categories', which COCO instances files have" in message
