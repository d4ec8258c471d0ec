"""Files of the captions of a shard: JSON lines, or Parquet with typed columns."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlm.errors import UserError
from vlm.io.parquet import require_pyarrow

FORMS = ("jsonl", "parquet")


def chosen_form(form: str) -> str:
    """Returns the form for --format, by default JSON lines.

    Raises:
        UserError: It does not exist for shards, or its package is not installed.
    """
    if form not in ("text", *FORMS):
        raise UserError(f"--format {form}: does not go with shards; choose jsonl or parquet")
    if form == "parquet":
        require_pyarrow("--format parquet")
    return "jsonl" if form == "text" else form


def encoded(form: str, records: Sequence[Mapping[str, Any]], *, ranked: bool) -> bytes:
    """Encodes records as the content of a file.

    Args:
        ranked: Whether an image has several captions, each with a rank.
    """
    if form == "jsonl":
        return b"".join(map(_line, records))
    import pyarrow
    from pyarrow.parquet import write_table

    columns = [("image", pyarrow.string()), *([("rank", pyarrow.int32())] if ranked else [])]
    columns += [("caption", pyarrow.string()), ("logprob", pyarrow.float64()), ("confidence", pyarrow.float64())]
    rows = [{**record, "image": _unicode(record["image"])} for record in records]
    file = io.BytesIO()
    write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns)), file)
    return file.getvalue()


def _line(record: Mapping[str, Any]) -> bytes:
    return _unicode(json.dumps(record, ensure_ascii=False)).encode() + b"\n"


def _unicode(text: str) -> str:
    """Escapes bytes that are not UTF-8, which file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()
