"""A page of images with their captions, for `vlm caption --format html`."""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vlm.data.images.image import ImageError, load_image
from vlm.io import page
from vlm.io.output import Output, Records


class CaptionPage(Records):
    """Records of captions, written as one page at the end.

    Args:
        output: The file.
    """

    def __init__(self, output: Output) -> None:
        self.form, self.output = "html", output
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def __exit__(self, *fault: object) -> None:
        images = [(path, list(records)) for path, records in groupby(self.records, lambda record: record["image"])]
        if images:
            cards = page.cards(self._card(path, records) for path, records in images)
            self.output.write(page.page("Captions", f"{len(images)} images", [cards]))

    def _card(self, path: str, records: Sequence[Mapping[str, Any]]) -> str:
        try:
            thumbnail: str | None = page.thumbnail(load_image(path))
        except ImageError:  # deleted since it was captioned
            thumbnail = None
        caption, *others = (f"{record['caption']} ({record['confidence']:.0%})" for record in records)
        drawn = [record["attention"] for record in records if "attention" in record]
        links = [
            (f"where it looked {n}" if n > 1 else "where it looked", self._link(at)) for n, at in enumerate(drawn, 1)
        ]
        return page.card(thumbnail, caption, [*others, os.path.basename(path)], links=links)

    def _link(self, path: str) -> str:
        """Returns a link to a file relative to the page, so that both can be moved together."""
        return quote(os.fsencode(Path(os.path.relpath(path, os.path.dirname(str(self.output.path)) or ".")).as_posix()))
