"""Small captioned data, and the content of any source."""

import io

import pytest
from PIL import Image

from vlm.data.sources.captions import Captions
from vlm.errors import UserError

NO_HOLD_OUT = {"val_fraction": 0, "test_fraction": 0}


def picture(path, color="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), color).save(path)


def png_of(color):
    """The content of a PNG file."""
    Image.new("RGB", (4, 3), color).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def captions(root, text=None, file="captions.csv", **options):
    if text is not None:
        (root / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        options["path"] = str(root / file)
    return Captions(root=str(root), **{**NO_HOLD_OUT, **options})


def content(source):
    """Everything that a source holds: {split: {id: captions, or else class}}."""
    kept = lambda record: record["references"] if "references" in record else record["class"]  # noqa: E731
    return {name: {record.id: kept(record) for record in source.split(name).records()} for name in source.splits}


def refusal(function, *args, **options):
    with pytest.raises(UserError) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert message.count("\n") < 2
    return message
