"""Reads the header of a GGUF file that may be split into parts, as llama-gguf-split names them."""

import re
from pathlib import Path

from vlm.errors import UserError
from vlm.models.pretrained.gguf.header import Header, Place, read_header

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.ASCII)
PART_NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS, NAMED = 1000, 3  # missing parts that are named in a message


def read_parts(path: Path) -> Header:
    """Reads the header of a file; if the file is one part of a model, with the tensors of all parts.

    Raises:
        ValueError: It is damaged, or its parts do not belong together.
        OSError: It cannot be read.
        UserError: A part is missing.
    """
    header = read_header(path)
    count = header.values.get(COUNT, 0)
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        raise ValueError(f"{COUNT} is {count!r:.40}, not a number of up to {MOST_PARTS:,} parts")
    if count < 2:
        return header
    paths = _part_paths(path, count)
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise UserError(f"{path}: is one of {count} parts; put {', '.join(missing[:NAMED])}{more} next to it")
    values, places = read_header(paths[0]).values, dict[str, Place]()
    for number, part in enumerate(paths):
        read = read_header(part)
        expected = values | {PART_NUMBER: number, COUNT: count}
        for key in (PART_NUMBER, COUNT, *read.values):
            if (stated := read.values.get(key)) != expected.get(key):
                raise ValueError(f"{key} is {stated!r:.40} in {part.name}, not {expected.get(key)!r:.40}")
        if twice := next((name for name in read.tensors if name in places), None):
            raise ValueError(f"{part.name} has the tensor {twice!r:.60} of another part again")
        places |= read.tensors
    if values.get(TENSORS, len(places)) != len(places):
        raise ValueError(f"{TENSORS} is {values[TENSORS]!r:.40}, but its parts have {len(places)} tensors")
    return Header(values, places)


def _part_paths(path: Path, count: int) -> list[Path]:
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ValueError(
            f"{COUNT} is {count}, but its name does not end with -NNNNN-of-{count:05}.gguf; rename the parts"
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}") for number in range(1, count + 1)]
