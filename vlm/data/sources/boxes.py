"""Images with boxes of objects: COCO's instances, and tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from vlm.data.boxes import ImageBoxes, LabeledBox
from vlm.data.images.image import MAX_SIDE, ImageError, read_image_size
from vlm.data.images.resize import Box
from vlm.data.images.view import box_area, clip_box
from vlm.data.records import Record, RowChecker, RowError, report_error
from vlm.data.sources.caption_source import CaptionedImage, CaptionSource
from vlm.data.sources.caption_tables import Row, entry_value, list_entries, relative_to_root
from vlm.data.sources.captions import find_files, find_image_folder, find_tables, resolve_root
from vlm.data.sources.delimited import Quoting
from vlm.data.sources.tables import Cells, read_json
from vlm.errors import Share, UserError, excerpt
from vlm.untrusted.sizes import JsonValue

NOTHING = LabeledBox("", (0.0, 0.0, 0.0, 0.0))  # the entry of an image without objects
TOLERANCE = 1.0  # pixels by which a box may exceed its image, because edges are rounded; it is then cut
EDGES = ("left", "top", "right", "bottom")


def check_box(box: Sequence[float], size: tuple[int, int]) -> Box:
    """Checks the edges of a box in an image of this width and height; returns the part inside.

    Raises:
        RowError: The box is empty, inverted or not a box, or reaches outside the image.
    """
    left, top, right, bottom = box
    edges = ", ".join(f"{name} {edge:g}" for name, edge in zip(EDGES, box, strict=True))
    if not all(map(math.isfinite, box)):
        raise RowError(f"its box has an edge that is not a number ({edges})")
    if right <= left or bottom <= top:
        kind = "inverted" if right < left or bottom < top else "empty"
        raise RowError(f"its box is {kind} ({edges})")
    clipped = clip_box((left, top, right, bottom), (0, 0, *size))
    excess = max(abs(edge - inside) for edge, inside in zip(box, clipped, strict=True))
    if excess > TOLERANCE or box_area(clipped) <= 0:
        raise RowError(f"its box reaches outside its image of {size[0]} x {size[1]} pixels ({edges})")
    return clipped


def read_class(name: str) -> str:
    """The name of a class with single spaces; raises RowError if it has a semicolon."""
    label = " ".join(name.split())
    if ";" in label:
        raise RowError(f"its class {excerpt(label)} has a semicolon, which separates classes in prompts")
    return label


class BoxSource(CaptionSource):
    """Base of sources of images with boxes, which take the place of captions.

    Attributes:
        sizes: Width and height of each image by its path, as its file or its annotations state them.
    """

    holds = ("image", "boxes")
    text = "box"

    def __init__(self, *, root: str, seed: int, column: str = "image") -> None:
        super().__init__(root=root, seed=seed, captions_per_image=None, column=column)
        self.sizes: dict[str, tuple[int, int]] = {}

    def _finish(self, file: Path, val_fraction: float = 0.0, test_fraction: float = 0.0) -> None:
        super()._finish(file, val_fraction, test_fraction)
        if 0 < max((edge for box in self._boxes() for edge in box.box), default=0) <= 1:
            report_error(f"{file}: no edge exceeds 1, as if edges were shares of the image's sides; give pixels")

    def _boxes(self) -> Iterator[LabeledBox]:
        """Yields the boxes of all images."""
        for images in self._images.values():
            for box in (box for image in images for box in image.captions):
                if isinstance(box, LabeledBox) and box != NOTHING:
                    yield box

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record, size = super()._record(most, image, epoch), self.sizes.get(image.path, (1, 1))
        boxes = tuple(box for box in image.captions if isinstance(box, LabeledBox) and box != NOTHING)
        record.values = {"boxes": ImageBoxes(size, boxes)}
        record.open_image = partial(self._open_image, image.path)
        return record

    def _open_image(self, path: str) -> Image.Image:
        """Opens an image whose width and height must be those of its boxes."""
        image, stated = self.place.image(path), self.sizes.get(path)
        if stated is not None and image.size != stated:
            sizes = f"has {image.width} x {image.height} pixels, but its boxes are for {stated[0]} x {stated[1]}"
            raise ImageError(f"{self.place.path / path}: {sizes}; correct width and height, or give the original image")
        return image


class BoxTable(BoxSource):
    """Boxes in a CSV, TSV or JSON-lines table, one per row; a row without class and edges is an image without objects.

    Edges are in pixels from the image's corner. Splits are separate files if `val_path` or `test_path` is set, else the
    values of the split column, else drawn by image.

    Args:
        label_column: Name of the column of classes.
        left_column, top_column, right_column, bottom_column: Names of the columns of edges, or several separated by
            ``|``.
        width_column, height_column: Names of the columns of the image's width and height, which a table may lack; they
            are then read from the image files.
        quoting: Whether CSV and TSV files have quoted cells; ``auto`` decides per file.
        others: See Captions.
    Raises:
        UserError: A file, column or image is missing or malformed, or more than 1% of the rows have an invalid box.
    """

    name = "boxes"

    def __init__(
        self,
        *,
        path: str,
        root: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        image_column: str = "image",
        label_column: str = "label",
        left_column: str = "left|xmin",
        top_column: str = "top|ymin",
        right_column: str = "right|xmax",
        bottom_column: str = "bottom|ymax",
        width_column: str = "width",
        height_column: str = "height",
        split_column: str = "split",
        quoting: Quoting = "auto",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__(root=resolve_root(root, path), seed=seed, column=image_column)
        columns = {"image": image_column, "label": label_column, "split": split_column}
        columns |= {"left": left_column, "top": top_column, "right": right_column, "bottom": bottom_column}
        columns |= {"width": width_column, "height": height_column}
        files = find_tables(self.root, path, val_path, test_path)
        optional = ["width_column", "height_column"]
        self._add_tables(files, columns, self._rows, quoting=quoting, optional=optional)
        self._finish(files["train"], val_fraction, test_fraction)
        self.classes = sorted({box.label for box in self._boxes()})

    def _rows(self, cells: Cells) -> Iterator[Row]:
        image, label = (cells.values[f"{name}_column"] for name in ("image", "label"))
        if not isinstance(image, str) or not isinstance(label, str | None):
            raise RowError("image and label must be text")
        edges = [cells.values[f"{name}_column"] for name in EDGES]
        label = read_class(label or "")
        paths = self._mention(image.strip())
        is_empty = [edge is None or edge == "" for edge in edges]
        if not label and all(is_empty):
            self._read_size(paths, cells)
            yield Row(image, NOTHING, cells.split, cells.position)
            return
        if not label:
            raise RowError("has a box, but no class")
        if any(is_empty):
            raise RowError(f"has no {EDGES[is_empty.index(True)]} edge")
        numbers = [_read_number(edge, name) for edge, name in zip(edges, EDGES, strict=True)]
        size = self._read_size(paths, cells)
        box = (0.0, 0.0, 0.0, 0.0) if size is None else check_box(numbers, size)  # missing images are refused later
        yield Row(image, LabeledBox(label, box), cells.split, cells.position)

    def _read_size(self, paths: Sequence[str], cells: Cells) -> tuple[int, int] | None:
        """Width and height of an image, from the row or the file; None if there is no such image.

        Raises:
            RowError: The row's numbers are no sizes, or differ from those of an earlier row.
        """
        if not paths:
            return None
        sides = [cells.values.get(f"{name}_column") for name in ("width", "height")]
        known = self.sizes.get(paths[0])
        if all(side not in (None, "") for side in sides):
            width, height = (_read_number(side, name) for side, name in zip(sides, ("width", "height"), strict=True))
            if not all(1 <= side <= MAX_SIDE and side == int(side) for side in (width, height)):
                raise RowError(f"width {width:g} and height {height:g} are no numbers of pixels")
            size = int(width), int(height)
            if known not in (None, size):
                raise RowError(f"its image has {size[0]} x {size[1]} pixels here, and other sides in an earlier row")
            self.sizes[paths[0]] = size
        elif known is None and self.place.has(paths[0]):
            try:
                self.sizes[paths[0]] = read_image_size(self.place.read(paths[0]), paths[0])
            except ImageError:  # it is skipped, and named, when it is read
                return None
        return self.sizes.get(paths[0])


def _read_number(value: Any, name: str) -> float:
    try:
        return float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        raise RowError(f"{name} is {excerpt(str(value))}, which is not a number") from None
    except OverflowError:
        raise RowError(f"{name} is {excerpt(str(value))}, which is too large") from None


class CocoBoxes(BoxSource):
    """COCO's object boxes (Lin et al. 2014, "Microsoft COCO"), or any data set in the format of its instances files.

    Without `path`, it reads the root's ``annotations/instances_{train,val}{2017,2014}.json``. A single annotation file
    is split by fractions. Crowds (``iscrowd``) are not trained on, and a detection in one is not counted as wrong.

    Args:
        root: The data set's folder.
        path: Annotation file; may be relative to the root.
        val_path: Annotation file for validation.
        test_path: Annotation file for test.
        val_fraction: Share of images held out for validation if the data has no splits.
        test_fraction: Share of images held out for test if the data has no splits.
        seed: Seed of the held-out images.
    Raises:
        UserError: A file or folder is missing or malformed, or more than 1% of a file's entries are invalid.
    """

    name = "coco boxes"

    def __init__(
        self,
        *,
        root: str,
        path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__(root=root, seed=seed)
        files = find_files(self.root, path, val_path, test_path)
        if "train" not in files:
            files = self._find_official_files() | files
        names: dict[str, None] = {}
        for split, file in files.items():
            rows, classes, sizes = read_instances(RowChecker(file, self))
            names |= dict.fromkeys(classes)
            some = list(sizes)[:100]
            folder = find_image_folder(self.root, file, some, prefix="instances_")
            self._add(rows, file, folder, split if len(files) > 1 else None)
            self.sizes |= {relative_to_root(str(Path(folder) / name), self.root): size for name, size in sizes.items()}
        self._finish(files["train"], val_fraction, test_fraction)
        self.classes = list(names)

    def _find_official_files(self) -> dict[str, Path]:
        for year in (2017, 2014):
            files = {split: self.root / "annotations" / f"instances_{split}{year}.json" for split in ("train", "val")}
            if files["train"].is_file():
                return {split: file for split, file in files.items() if file.is_file()}
        raise UserError(
            f"{self.root / 'annotations' / 'instances_train2017.json'}: no such file; set data.root to the folder of "
            "COCO, or data.path to an annotation file"
        )


Instances = tuple[list[Row], list[str], dict[str, tuple[int, int]]]


def read_instances(checker: RowChecker) -> Instances:
    """Rows of a COCO instances file (https://cocodataset.org/#format-data); its classes; width and height by image.

    Images without objects have one row with NOTHING. Segmentations and areas are not read: areas only sort results by
    size.

    Raises:
        UserError: It is another file, or too many of its entries are invalid.
    """
    path, kind = checker.path, "instances"
    content = read_json(path, "not a COCO instances file", "set data.path to one")
    images: dict[int | str, tuple[str, tuple[int, int]]] = {}
    names = set[str]()
    classes: dict[int | str, str] = {}
    for number, entry in enumerate(list_entries(content, "images", path, kind)):
        try:
            id = _new_id(entry, images)
            name = entry_value(entry, "file_name", str)
            sides = [entry_value(entry, key, int) for key in ("width", "height")]
            if not 1 <= min(sides) <= max(sides) <= MAX_SIDE:
                raise RowError(f"has {excerpt(str(sides[0]))} x {excerpt(str(sides[1]))} pixels")
            if name in names:
                raise RowError(f"has the file_name {excerpt(name)} of an earlier one")
            names.add(name)
            images[id] = name, (sides[0], sides[1])
        except RowError as error:
            checker.reject(f"image {number}", error)
    for number, entry in enumerate(list_entries(content, "categories", path, kind)):
        try:
            id, name = _new_id(entry, classes), read_class(entry_value(entry, "name", str))
            if not name or name in classes.values():
                raise RowError(f"has the name {name!r} of an earlier one" if name else "has an empty name")
            classes[id] = name
        except RowError as error:
            checker.reject(f"category {number}", error)
    filled: set[str] = set()

    def convert(entry: JsonValue) -> Iterator[Row]:
        image, category = (entry_value(entry, key, int | str) for key in ("image_id", "category_id"))
        if image not in images:
            raise RowError(f"image_id {image} is not among the images")
        name, size = images[image]
        filled.add(name)  # an image all of whose boxes are invalid is left out
        if category not in classes:
            raise RowError(f"category_id {category} is not among the categories that have a name")
        numbers = entry_value(entry, "bbox", list)
        if len(numbers) != 4 or not all(type(value) in (int, float) for value in numbers):
            raise RowError(f"bbox is {excerpt(str(numbers))}, not left, top, width and height")
        left, top, width, height = (_read_number(value, "a number of bbox") for value in numbers)
        crowd = entry.get("iscrowd", 0) if isinstance(entry, dict) else 0
        if crowd not in (0, 1):
            raise RowError(f"iscrowd is {excerpt(str(crowd))}, not 0 or 1")
        box = check_box((left, top, left + width, top + height), size)
        yield Row(name, LabeledBox(classes[category], box, bool(crowd)), None, _position(entry, 0))

    entries = enumerate(list_entries(content, "annotations", path, kind))
    rows = list(checker.read(((_position(entry, number), entry) for number, entry in entries), convert))
    rows += [Row(name, NOTHING, None, f"image {id}") for id, (name, _) in images.items() if name not in filled]
    return rows, list(classes.values()), dict(images.values())


def _position(entry: JsonValue, number: int) -> str:
    return f"annotation {entry.get('id', number) if isinstance(entry, dict) else number}"


def _new_id(entry: JsonValue, known: Mapping[int | str, Any]) -> int | str:
    """The id of an image or category; raises RowError if an earlier one has it."""
    id: int | str = entry_value(entry, "id", int | str)
    if id in known:
        raise RowError(f"has the id {id} of an earlier one")
    return id
