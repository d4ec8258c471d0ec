"""Flickr8k with captions in several languages for the same photos."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlm.data.records import Record, RowChecker
from vlm.data.sources.caption_source import CaptionedImage
from vlm.data.sources.caption_tables import Row, read_flickr
from vlm.data.sources.captions import Flickr8k
from vlm.data.text.lines import one_line
from vlm.errors import UserError, did_you_mean, nearest

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
        self.languages, self._others = list(dict.fromkeys(languages)), Path(languages_root)
        known = [ENGLISH, *FILES]
        if not self.languages:
            raise UserError(f"data.languages: is empty; give some of {', '.join(known)}")
        for language in (name for name in self.languages if name not in known):
            near = did_you_mean(nearest(str(language), known))
            raise UserError(f"data.languages: no captions in {language}; choose from {', '.join(known)}{near}")
        super().__init__(root=root)

    def _read(self) -> Path:
        read = [self._add_language(language) for language in self.languages]
        return read[0]

    def _add_language(self, language: str) -> Path:
        if language == ENGLISH:
            path = self._text("Flickr8k.token.txt")
            rows = list(read_flickr(RowChecker(path, self)))
        else:
            name, separator, ending = FILES[language]
            path = self._others / name
            if not path.is_file():
                raise UserError(f"{path}: no such file; set data.languages_root to its folder, or remove {language}")
            read = read_flickr(RowChecker(path, self), separator)
            rows = [row._replace(image=row.image.removesuffix(ending)) for row in read]
        self._add([_in_language(row, language) for row in rows], path, self.base)
        return path

    def _leave_out(self, lacking: Sequence[str], file: Path, tokens: Path) -> None:
        """Records the missing captions in one line, because captions missing in a language are expected."""
        self._named.update(os.path.join(self.base, name) for name in lacking)
        if lacking:
            names = f"{lacking[0]} and {len(lacking) - 1:,} others" if len(lacking) > 1 else lacking[0]
            self.skipped.append(f"{file}: no caption in {', '.join(self.languages)}: {names}")

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record = super()._record(most, image, epoch)
        texts, languages = (list(values) for values in zip(*record["captions"], strict=True))
        record.known = {"captions": texts, "references": texts, "languages": languages}
        return record


def _in_language(row: Row, language: str) -> Row:
    text: Any = one_line(row.caption)
    return row._replace(caption=Caption(text, language) if text else "")
