"""A page of images with their captions, for `vlm caption --format html`."""

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vlm.data.images.image import ImageError, load_image
from vlm.errors import UserError
from vlm.evaluation.report import page


class CaptionPage:
    """Takes records of captions as `vlm.inference.files.Writer` does, and writes one page of them when it is closed.

    Args:
        out: The file.
    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, out: str) -> None:
        self.out = out
        self.records: list[dict[str, Any]] = []
        try:
            self.file = open(out, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as fault:
            raise UserError(f"--out {out}: cannot be written ({fault.strerror}); choose another file") from fault

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        images = [(path, list(records)) for path, records in groupby(self.records, lambda record: record["image"])]
        made = page.cards(self._card(path, records) for path, records in images)
        with self.file:
            self.file.write(page.page("Captions", f"{len(images)} images", [made]))

    def _card(self, path: str, records: Sequence[dict[str, Any]]) -> str:
        try:
            thumbnail: str | None = page.thumbnail(load_image(path))
        except ImageError:  # gone since it was captioned
            thumbnail = None
        said, *others = (f"{record['caption']} ({record['confidence']:.0%})" for record in records)
        drawn = [record["attention"] for record in records if "attention" in record]
        links = [
            (f"where it looked {n}" if n > 1 else "where it looked", self._link(at)) for n, at in enumerate(drawn, 1)
        ]
        return page.card(thumbnail, said, [*others, os.path.basename(path)], links=links)

    def _link(self, path: str) -> str:
        """A file as the page reaches it, wherever both are moved to together."""
        return quote(Path(os.path.relpath(path, os.path.dirname(self.out) or ".")).as_posix())
