"""Readers of file formats for captioned images; each yields one `Row` per caption, in the file's order."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vlm.data.images.image import SUFFIXES
from vlm.data.records import SPLITS, Skipped
from vlm.data.sources.delimited import Quoting
from vlm.data.sources.tables import Cells, decode_text, parse_json, parse_split, read_cells, read_text
from vlm.data.store.places import FileStore
from vlm.errors import UserError


class Row(NamedTuple):
    """One caption: image name, text, split if the file has one, and position in the file.

    For question answering, the caption is a Question.
    """

    image: str
    caption: Any
    split: str | None
    where: str


def read_table(
    path: Path, image_column: str, caption_column: str, split_column: str, *, quoting: Quoting, notes: list[str]
) -> list[Row]:
    """Rows of a CSV or TSV file with a header, or of a JSON-lines file, where captions may be lists.

    The column `split_column` is optional if it is called ``split``. For `quoting` and `notes` see `read_cells`.

    Raises:
        UserError: The file type is unknown, a column is missing, or a line is malformed.
    """
    columns = {"image_column": image_column, "caption_column": caption_column, "split_column": split_column}
    cells_of_rows = read_cells(path, columns, quoting=quoting, notes=notes)
    return [row for cells in cells_of_rows for row in _caption_rows(path, cells)]


def _caption_rows(path: Path, cells: Cells) -> Iterator[Row]:
    image, captions = cells.values["image_column"], cells.values["caption_column"]
    captions = captions if isinstance(captions, list) else [captions]
    split = cells.values.get("split_column", "train")
    if not all(isinstance(value, str) for value in (image, split, *captions)):
        raise UserError(f"{path}, {cells.where}: image, caption and split must be text (or lists of captions)")
    yield from (Row(image, caption, cells.split(path), cells.where) for caption in captions or [""])


def read_folder(place: FileStore, skipped: list[str]) -> list[Row]:
    """Rows of images that have a text file of the same name with one caption per line.

    Subfolders are included. If all images are in folders named like splits, those are the splits.

    Args:
        place: Storage of the files.
        skipped: Extended by a message for each image without captions and each text file without an image.
    """
    folders: dict[str, list[str]] = defaultdict(list)
    for path in place.files():
        folder, name = os.path.split(path)
        if not any(part.startswith(".") for part in path.split("/")):
            folders[folder].append(name)
    rows = [row for folder, names in folders.items() for row in _folder_rows(place, folder, sorted(names), skipped)]
    splits = [SPLITS.get(row.image.split("/")[0].lower()) if "/" in row.image else None for row in rows]
    return [row._replace(split=split) for row, split in zip(rows, splits, strict=True)] if all(splits) else rows


def _folder_rows(place: FileStore, folder: str, names: list[str], skipped: list[str]) -> Iterator[Row]:
    texts = {name[:-4]: name for name in names if name.lower().endswith(".txt")}
    unused = dict(texts)
    for name in names:
        stem, suffix = os.path.splitext(name)
        image = os.path.join(folder, name)
        if suffix.lower() not in SUFFIXES:
            continue
        if stem not in texts:
            skipped.append(Skipped(f"{place.path / image}: has no {stem}.txt", "no caption"))
            continue
        unused.pop(stem, None)
        where = os.path.join(folder, texts[stem])
        captions = decode_text(place.read(where), place.path / where).rstrip().split("\n")
        yield from (Row(image, caption, None, f"{where} line {n}") for n, caption in enumerate(captions, 1))
    skipped += [Skipped(f"{place.path / folder / name}: has no image", "no image") for name in unused.values()]


def read_flickr(path: Path, separator: str = "\t") -> list[Row]:
    """Rows of ``Flickr8k.token.txt``: ``name.jpg#k``, a tab or another separator, and the caption.

    Raises:
        UserError: A line has no separator or no number.
    """
    rows, kind = [], "a tab" if separator == "\t" else "a space"
    for number, line in enumerate(read_text(path).split("\n"), 1):
        head, tab, caption = line.rstrip("\r").partition(separator)
        name, mark, _ = head.rpartition("#")
        if tab and mark:
            rows.append(Row(name, caption, None, f"line {number}"))
        elif line.strip():
            raise UserError(f"{path}, line {number}: is not NAME#K, {kind} and a caption; restore the original file")
    return rows


def read_coco(path: Path) -> list[Row]:
    """Rows of a COCO captions file (https://cocodataset.org/#format-data) or of Karpathy's ``dataset_coco.json``.

    The latter has splits, and its image names include the folder. Images without captions get an empty one.

    Raises:
        UserError: The file is neither.
    """
    try:
        content = parse_json(read_text(path))
        karpathy = any("sentences" in image for image in content["images"])
        return list(_karpathy_rows(content, path) if karpathy else _coco_rows(content))
    except KeyError as error:
        raise UserError(f"{path}: has no {error}, which COCO captions files have; is it the right file?") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a COCO captions file ({error}); set data.path to one") from error


def _coco_rows(content: dict[str, Any]) -> Iterator[Row]:
    names = {image["id"]: _text(image["file_name"]) for image in content["images"]}
    captioned = set()
    for annotation in content["annotations"]:
        captioned.add(annotation["image_id"])
        name = names.get(annotation["image_id"], "")
        yield Row(name, _text(annotation["caption"]), None, f"annotation {annotation.get('id')}")
    yield from (Row(name, "", None, f"image {id}") for id, name in names.items() if id not in captioned)


def _karpathy_rows(content: dict[str, Any], path: Path) -> Iterator[Row]:
    for number, image in enumerate(content["images"]):
        where = f"image {number}"
        name = "/".join(filter(None, (image.get("filepath"), image["filename"])))
        split = parse_split(image["split"], path, where)
        captions = [_text(sentence["raw"]) for sentence in image["sentences"]] or [""]
        yield from (Row(name, caption, split, where) for caption in captions)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
