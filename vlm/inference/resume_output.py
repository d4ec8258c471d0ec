"""Going on with a file of captions that an earlier run began."""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vlm.errors import UserError, printable


def begun(out: str, *, form: str, results: int = 1) -> Callable[[str], bool]:
    """Whether an image's captions are in the file already.

    What a kill left half written at the file's end, a line or the captions of an image, is cut off.

    Args:
        form: "text", "jsonl" or "csv".
        results: Captions an image.
    Raises:
        UserError: The file cannot be read, or is in another form.
    """
    try:
        content = Path(out).read_bytes()
    except FileNotFoundError:
        return lambda path: False
    except OSError as fault:
        raise UserError(f"--out {out}: cannot be read ({fault.strerror}); choose another file") from fault
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        images = [_image(line.decode(), form) for line in lines[form == "csv" :]]
    except (ValueError, KeyError, TypeError, IndexError) as fault:
        raise UserError(f"--out {out}: is not in the form {form}, so that --continue cannot go on with it") from fault
    count = Counter(images)
    while images and count[images[-1]] < results:
        count[images.pop()] -= 1
        lines.pop()
    os.truncate(out, sum(map(len, lines)))
    done = {image for image in images if count[image] >= results}
    return lambda path: (printable(path) if form == "text" else path) in done


def _image(line: str, form: str) -> str:
    if form == "jsonl":
        return json.loads(line)["image"]
    if form == "csv":
        return next(csv.reader([line]))[0]
    path, _, _ = line.partition("\t")
    if path == line:
        raise ValueError("no tab")
    return path
