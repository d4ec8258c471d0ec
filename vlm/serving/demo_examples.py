"""Examples of a run for the page of `vlm demo`: images and texts that training wrote to its folder samples/."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlm.data.images.image import SUFFIXES, ImageError, load_image
from vlm.data.text.lines import split_lines
from vlm.inference.command_options import GAP

MOST = 8  # most images, and most texts
MAX_RECORDS_BYTES = 2**22
FIELDS = {"text": ("prompt", "text", "context", "words"), "label": ("caption",)}  # of records, by the form's names


def samples_of(checkpoint: Path) -> Path:
    """Returns the folder of a run's samples, given its checkpoint or its folder."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "samples"


def example_images(samples: Path) -> list[Image.Image]:
    """Returns the readable images of a folder."""
    paths = sorted(path for path in samples.glob("*") if path.suffix.lower() in SUFFIXES) if samples.is_dir() else []
    images: list[Image.Image] = []
    for path in paths[:MOST]:
        try:
            images.append(load_image(path))
        except ImageError:  # the page does without it
            continue
    return images


def example_texts(samples: Path, fields: Sequence[str]) -> list[list[str]]:
    """Returns texts of the newest samples, a row for each that has all fields of a form.

    Args:
        fields: Names of the fields.
    """
    paths = sorted(samples.glob("step_*.jsonl"), key=_step) if samples.is_dir() and fields else []
    if not paths or paths[-1].stat().st_size > MAX_RECORDS_BYTES:
        return []
    try:
        records = [json.loads(line) for line in split_lines(paths[-1].read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return []
    records = [record for record in records if isinstance(record, dict)]
    rows = [[_text(record, name) for name in fields] for record in records]
    if list(fields) == ["label"]:  # all are texts to choose among
        rows = [["\n".join(dict.fromkeys(row[0] for row in rows[:MOST] if row[0]))]]
    return [row for row in rows if all(row)][:MOST]


def _step(path: Path) -> int:
    number = re.search(r"\d+", path.stem)
    return int(number[0]) if number else 0


def _text(record: Mapping[str, Any], name: str) -> str:
    value = next((record[key] for key in FIELDS.get(name, (name,)) if key in record), "")
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if record.get("gaps") and record.get("true"):  # a text with masked words
        return text.replace(str(record["true"][0]).strip("\u2581"), GAP, 1)
    return text
