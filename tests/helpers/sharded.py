"""Small shards, written by the standard library."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from class_data import png


def write_tar(path: Path, members: dict[str, Any], form: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar of these files: bytes as they are, text in UTF-8, anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members.items():
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            data = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def caption_members(count: int, first: int = 0) -> dict[str, Any]:
    """Members as img2dataset writes them: an image, its caption, and the caption again among metadata."""
    members: dict[str, Any] = {}
    for number in range(first, first + count):
        text = f"caption {number}"
        about = {"caption": text, "key": f"{number:09d}", "status": "success", "width": 4}
        members |= {f"{number:09d}.png": png(number), f"{number:09d}.json": about, f"{number:09d}.txt": text}
    return members


def class_members(*labels: str, first: int = 0) -> dict[str, Any]:
    """Members of images with their classes."""
    named = list(enumerate(labels, first))
    return {
        f"{number}.{kind}": data for number, label in named for kind, data in (("png", png(number)), ("cls", label))
    }
