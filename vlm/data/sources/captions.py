"""Captioned images: tables and folders, Flickr8k (also in several languages), and COCO."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vlm.data.records import Record, RowChecker, RowError, SkipMessage
from vlm.data.sources.caption_source import CaptionedImage, CaptionSource
from vlm.data.sources.caption_tables import Row, read_coco, read_flickr, read_folder
from vlm.data.sources.delimited import Quoting
from vlm.data.sources.tables import Cells, read_text
from vlm.data.store.places import find_file
from vlm.data.text.words import split_lines, to_single_line
from vlm.errors import Count, Share, UserError, did_you_mean, find_similar

# The second is the spelling in the official archive.
FLICKR8K_FOLDERS = ("images", "Flicker8k_Dataset", "Flickr8k_Dataset")
FLICKR8K_LISTS = {"train": "trainImages", "val": "devImages", "test": "testImages"}


class Captions(CaptionSource):
    """Your own captioned images: a table of images and captions, or a folder of images with text files.

    Splits are separate files if `val_path` or `test_path` is given, else the values of the split column (or the folders
    of the root), else drawn by image.

    Args:
        root: Folder or tar that image names are relative to, default the folder of `path`; read itself if there is no
            `path`.
        path: CSV, TSV, JSON-lines, Parquet or Arrow file, or a folder of the latter; may be relative to the root.
        val_path: The same for validation.
        test_path: The same for test.
        image_column: Name of the column of image files.
        caption_column: Name of the column of captions.
        split_column: Name of the column of splits; ``split`` is optional.
        quoting: Whether CSV and TSV files have quoted cells; ``auto`` decides per file.
        val_fraction: Share of images held out for validation if the data has no splits.
        test_fraction: Share of images held out for test if the data has no splits.
        seed: Seed of the held-out images and of the choice of captions.
        captions_per_image: Maximum number of captions per image in an epoch of ``train``; None for all.
    Raises:
        UserError: A file, column or image is missing or malformed.
    """

    name = "captions"
    needs_one_of = ("root", "path")

    def __init__(
        self,
        *,
        root: str | None = None,
        path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        split_column: str = "split",
        quoting: Quoting = "auto",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        captions_per_image: Count | None = None,
    ) -> None:
        super().__init__(
            root=resolve_root(root, path), seed=seed, captions_per_image=captions_per_image, column=image_column
        )
        files = find_tables(self.root, path, val_path, test_path)
        columns = {"image": image_column, "caption": caption_column, "split": split_column}
        self._add_tables(files, columns, self._rows, quoting=quoting)
        if not files:
            self._add(read_folder(self.place, self.skipped), self.root)
        if not files and not self._by_path:
            raise UserError(
                f"{self.root}: has no images with .txt files of captions; set data.root to a folder with such images, "
                "or data.path to a table of images and captions"
            )
        self._finish(files.get("train", self.root), val_fraction, test_fraction)

    def _rows(self, cells: Cells) -> Iterator[Row]:
        """A row for each caption; in JSON, captions may be lists."""
        image, captions = cells.values["image_column"], cells.values["caption_column"]
        captions = captions if isinstance(captions, list) else [captions]
        self._mention(image if isinstance(image, str) else "")
        split = cells.values.get("split_column", "train")
        if not all(isinstance(value, str) for value in (image, split, *captions)):
            raise RowError("image, caption and split must be text (or lists of captions)")
        yield from (Row(image, caption, cells.split, cells.position) for caption in captions or [""])


class Flickr8k(CaptionSource):
    """Flickr8k in its official layout and splits (Hodosh et al. 2013, "Framing Image Description as a Ranking Task").

    Images that are in no split are not used, as is customary.

    Args:
        root: Folder with ``Flickr8k.token.txt``, ``Flickr_8k.{train,dev,test}Images.txt`` (or these in
            ``Flickr8k_text``), and the images in ``images`` or ``Flicker8k_Dataset``.
        seed: Seed of the choice of captions.
        captions_per_image: Maximum number of captions per image in an epoch of ``train``; None for all.
    Raises:
        UserError: A file or folder is missing or malformed.
    """

    name = "flickr8k"

    def __init__(self, *, root: str, seed: int = 0, captions_per_image: Count | None = None) -> None:
        super().__init__(root=root, seed=seed, captions_per_image=captions_per_image)
        self.base = next((name for name in FLICKR8K_FOLDERS if (self.root / name).is_dir()), "")
        if not self.base:
            raise UserError(
                f"{self.root / FLICKR8K_FOLDERS[0]}: no such folder; set data.root to the folder of Flickr8k"
            )
        tokens = self._read()
        self._assign_splits(tokens)
        self._finish(tokens)

    def _read(self) -> Path:
        """Adds the captions; returns their file, for messages."""
        tokens = self._find_text_file("Flickr8k.token.txt")
        self._add(read_flickr(RowChecker(tokens, self)), tokens, self.base)
        return tokens

    def _find_text_file(self, name: str) -> Path:
        for file in (self.root / name, self.root / "Flickr8k_text" / name):
            if file.is_file():
                return file
        raise UserError(f"{self.root / name}: no such file; set data.root to the folder of Flickr8k")

    def _assign_splits(self, tokens: Path) -> None:
        """Assigns images to the official splits and drops the others."""
        named = {image.name: image for image in self._by_path.values()}
        for split, name in FLICKR8K_LISTS.items():
            file, missing = self._find_text_file(f"Flickr_8k.{name}.txt"), []
            for name_in_list in dict.fromkeys(filter(None, map(str.strip, split_lines(read_text(file))))):
                image = named.get(name_in_list)
                if image is None:
                    missing.append(name_in_list)
                elif image.split is not None:
                    self._refuse(
                        f"{file}: {name_in_list} is in {image.split} too; restore the official files", "two splits"
                    )
                else:
                    image.split = split
            self._report_missing_captions(missing, file, tokens)
        for image in named.values():
            if image.split is None and not self.place.has(image.path):
                line = f"{tokens}: {image.name} has {len(image.captions)} captions, but is missing"
                self.skipped.append(SkipMessage(line, "missing image"))
        self._by_path = {path: image for path, image in self._by_path.items() if image.split is not None}

    def _report_missing_captions(self, missing: Sequence[str], file: Path, tokens: Path) -> None:
        """Records the images of a split that have no caption."""
        self.skipped += [SkipMessage(f"{file}: {name} has no caption in {tokens}", "no caption") for name in missing]


class Coco(CaptionSource):
    """COCO captions (Chen et al. 2015), or any data set in its annotation format or in Karpathy's.

    Without `path`, it reads the root's ``dataset_coco.json`` (Karpathy & Fei-Fei 2015), or else
    ``annotations/captions_{train,val}{2017,2014}.json``. A single annotation file is split by fractions.

    Args:
        root: The data set's folder.
        path: Annotation file in either format; may be relative to the root.
        val_path: Annotation file for validation.
        test_path: Annotation file for test.
        val_fraction: Share of images held out for validation if the data has no splits.
        test_fraction: Share of images held out for test if the data has no splits.
        seed: Seed of the held-out images and of the choice of captions.
        captions_per_image: Maximum number of captions per image in an epoch of ``train``; None for all.
    Raises:
        UserError: A file or folder is missing or malformed.
    """

    name = "coco"

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
        captions_per_image: Count | None = None,
    ) -> None:
        super().__init__(root=root, seed=seed, captions_per_image=captions_per_image)
        files = find_files(self.root, path, val_path, test_path)
        if "train" not in files:
            files = self._find_official_files() | files
        for split, file in files.items():
            rows = read_coco(RowChecker(file, self))
            if split == "train" and any(row.split for row in rows):  # Karpathy's, without splits in other files
                rows, split_of_all = [row for row in rows if row.split == "train" or row.split not in files], None
            else:
                split_of_all = split if len(files) > 1 else None
            names = list(dict.fromkeys(row.image for row in rows[:100] if row.image))
            self._add(rows, file, find_image_folder(self.root, file, names, prefix="captions_"), split_of_all)
        self._finish(files["train"], val_fraction, test_fraction)

    def _find_official_files(self) -> dict[str, Path]:
        karpathy = self.root / "dataset_coco.json"
        if karpathy.is_file():
            return {"train": karpathy}
        for year in (2017, 2014):
            files = {split: self.root / "annotations" / f"captions_{split}{year}.json" for split in ("train", "val")}
            if files["train"].is_file():
                return {split: file for split, file in files.items() if file.is_file()}
        raise UserError(
            f"{self.root / 'annotations' / 'captions_train2017.json'}: no such file; set data.root to the folder of "
            "COCO, or data.path to an annotation file"
        )


def find_image_folder(root: Path, file: Path, names: Sequence[str], *, prefix: str) -> str:
    """The folder of the images of an annotation file of COCO: the first usual one that contains one of the images.

    Args:
        root: The data set's folder.
        names: Names of some images.
        prefix: What the file's name begins with, before the name of the folder.
    """
    stem = file.stem.removeprefix(prefix)
    parents = (root, root / "images", file.parent, file.parent / "images")
    for folder in (folder for parent in parents for folder in (parent / stem, parent)):
        if any(os.path.isfile(folder / name) for name in names):
            inside = folder.is_relative_to(root)
            return folder.relative_to(root).as_posix() if inside else str(folder.absolute())
    return ""


def resolve_root(root: str | None, path: str | None) -> str:
    """The folder of a data set: the root if given, else the folder of its table.

    Raises:
        UserError: Neither is given.
    """
    if root is None and path is None:
        raise UserError(
            "data.root, data.path: neither is set; set data.root to a folder of images, or data.path to a table"
        )
    table = Path(path or "")
    return str(table if table.is_dir() else table.parent) if root is None else root


def find_tables(root: Path, path: str | None, val_path: str | None, test_path: str | None) -> dict[str, Path]:
    """The tables of a data set by split; empty if there are none.

    Raises:
        UserError: A file is missing, or only the training file is.
    """
    files = find_files(root, path, val_path, test_path)
    if files and "train" not in files:
        raise UserError("data.path: is not set, but data.val_path or data.test_path is; set data.path too")
    return files


def find_files(root: Path, path: str | None, val_path: str | None, test_path: str | None) -> dict[str, Path]:
    """The given files of a data set by split.

    Raises:
        UserError: A file is missing.
    """
    settings = {"train": ("data.path", path), "val": ("data.val_path", val_path), "test": ("data.test_path", test_path)}
    return {split: find_file(path, root, key) for split, (key, path) in settings.items() if path is not None}


ENGLISH = "en"
FILES = {  # of the other languages: file name, separator, and suffix of image names
    "de": ("Flickr8k.german.token.txt", "\t", ""),
    "zh": ("flickr8kzhc.caption.txt", " ", "#zhc"),
}


class Caption(NamedTuple):
    """A caption and its language."""

    text: str
    language: str

    def __str__(self) -> str:
        return self.text


class Flickr8kLanguages(Flickr8k):
    """Flickr8k with captions in English, German (Elliott et al. 2016, Multi30K) and Chinese (Li et al. 2016).

    One photo in thirteen has no German caption. Photos without a caption in the chosen languages are skipped. Records
    also hold "languages", one per caption.

    Args:
        root: See Flickr8k.
        languages_root: Folder with ``Flickr8k.german.token.txt`` and ``flickr8kzhc.caption.txt``.
        languages: Languages to read, out of en, de and zh; the first is the default for generation.
    Raises:
        UserError: A file or folder is missing or malformed, or a language is unknown.
    """

    name = "flickr8k in several languages"

    def __init__(self, *, root: str, languages_root: str, languages: Sequence[str]) -> None:
        self.languages, self._languages_root = list(dict.fromkeys(languages)), Path(languages_root)
        available = [ENGLISH, *FILES]
        if not self.languages:
            raise UserError(f"data.languages: is empty; give some of {', '.join(available)}")
        for language in (name for name in self.languages if name not in available):
            near = did_you_mean(find_similar(str(language), available))
            raise UserError(f"data.languages: no captions in {language}; choose from {', '.join(available)}{near}")
        super().__init__(root=root)

    def _read(self) -> Path:
        read = [self._add_language(language) for language in self.languages]
        return read[0]

    def _add_language(self, language: str) -> Path:
        if language == ENGLISH:
            path = self._find_text_file("Flickr8k.token.txt")
            rows = list(read_flickr(RowChecker(path, self)))
        else:
            name, separator, ending = FILES[language]
            path = self._languages_root / name
            if not path.is_file():
                raise UserError(f"{path}: no such file; set data.languages_root to its folder, or remove {language}")
            read = read_flickr(RowChecker(path, self), separator)
            rows = [row._replace(image=row.image.removesuffix(ending)) for row in read]
        texts = [to_single_line(str(row.caption)) for row in rows]
        captions = [Caption(text, language) if text else "" for text in texts]
        self._add([row._replace(caption=caption) for row, caption in zip(rows, captions, strict=True)], path, self.base)
        return path

    def _report_missing_captions(self, missing: Sequence[str], file: Path, tokens: Path) -> None:
        """Records the missing captions in one line, because captions missing in a language are expected."""
        self._named.update(os.path.join(self.base, name) for name in missing)
        if missing:
            names = f"{missing[0]} and {len(missing) - 1:,} others" if len(missing) > 1 else missing[0]
            self.skipped.append(f"{file}: no caption in {', '.join(self.languages)}: {names}")

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record = super()._record(most, image, epoch)
        texts, languages = (list(values) for values in zip(*record["captions"], strict=True))
        record.values = {"captions": texts, "references": texts, "languages": languages}
        return record
