"""Shows inputs and outputs of a model as lines of text."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from PIL import Image
from torch import Tensor

from vlm.data.batch import IGNORE, PADDING, InputRows, next_token_labels
from vlm.data.images.image import ImageError
from vlm.data.records import Record
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import UserError, printable
from vlm.models.context import PLACE, Features
from vlm.training.data_module import Data

GALLERY, SIDE = 8, 512  # number of images of a gallery, and pixels of the longer side of all but the first


def first_row(
    tokens: Tensor, segments: Tensor, tokenizer: Tokenizer, *, name: str, limit: int, scored: Tensor | None = None
) -> list[str]:
    """Returns lines that show the start of a batch's first row: each token and its target.

    Args:
        name: Name of a segment, such as "caption".
        limit: Number of tokens to show.
        scored: The tokens that are predicted; None for all.
    Shapes:
        tokens (B, L), segments (B, L), scored (B, L) or None
    """
    predicted = tokens if scored is None else tokens.masked_fill(~scored, IGNORE)
    labels = next_token_labels(predicted[:1], segments[:1])[0]
    lines = [f"  {name:<10}input -> target"]
    row = zip(tokens[0].tolist(), segments[0].tolist(), labels.tolist(), strict=True)
    for token, items in groupby((item for item in row if item[1] != PADDING), lambda item: item[0]):
        for _, segment, label in [next(items)] if token == PLACE else items:  # one line for all states of an image
            target = "(none)" if label == IGNORE else tokenizer.piece(label)
            piece = "(image)" if token == PLACE else tokenizer.piece(token)
            lines.append(f"  {segment:>7}   {piece!r} -> {target!r}")
    return lines[: 1 + limit]


def row_lines(rows: InputRows, tokenizer: Tokenizer, *, limit: int) -> list[str]:
    """Returns lines with the first tokens of a batch's first sample; of two texts, a line each.

    Of one text, the tokens that a head reads have a *; of two texts it reads the first token, or all.
    """
    pairs = list(zip(rows.tokens[0].tolist(), rows.segments[0].tolist(), strict=True))
    length = next((at for at, (_, segment) in enumerate(pairs) if segment > 1 or segment == PADDING), len(pairs))
    kinds = [0] * length if rows.types is None else rows.types[0, :length].clamp(max=1).tolist()
    read = set() if rows.places is None or any(kinds) else set(rows.places.tolist())
    lines = []
    for kind, name in enumerate(["first", "second"] if any(kinds) else ["tokens"]):
        places = [at for at in range(length) if kinds[at] == kind]
        pieces = [f"{tokenizer.piece(pairs[at][0])!r}{'*' * (at in read)}" for at in places[:limit]]
        lines.append(f"  {name:<10}{' '.join(pieces)}{' ...' * (len(places) > limit)}")
    notes = {"▁": "▁ is a space", "*": "the model's output is read at tokens with *"}
    legend = [note for sign, note in notes.items() if any(sign in line for line in lines)]
    return lines + [f"            ({'; '.join(legend)})"] * bool(legend)


def format_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def image_shape(images: Tensor | Features) -> str:
    """Shape of a batch of images, or of cached features."""
    if isinstance(images, Features):
        return f"features {format_shape(images.values)}"
    return f"images {format_shape(images)}"


def text_shape(tokens: Tensor, segments: Tensor) -> str:
    """Shape of a batch of text, and the share of it that is padding."""
    return f"tokens {format_shape(tokens)}, padding {(segments == PADDING).float().mean().item():.1%}"


def caption_line(caption: str, references: Sequence[str]) -> str:
    """Returns a line with a caption and a reference, marked if the caption equals a reference."""
    mark = "=" if caption in references else " "
    return f"{mark} {printable(caption)!r:60} reference: {printable(references[0] if references else '')!r}"


def example_record(data: Data) -> tuple[Record, list[Image.Image]]:
    """The first record of the final split, else of train, whose images can be read, and its images.

    Conversations may have no images.

    Raises:
        UserError: None can be read.
    """
    for name in dict.fromkeys((data.final_split, "train")):
        for record in data.split(name).records():
            with suppress(ImageError):
                if "image" in record:
                    return record, record.images()
    raise UserError(f"data: no image of {data.final_split} can be read", 1)


def example_image(data: Data, folder: Path) -> str:
    """Puts the image, or images, of `example_record` into a folder; returns their paths for a shell.

    It adds smaller images of other records, spread over the split, for the gallery of `vlm demo`.
    """
    split = data.split(data.final_split)
    paths = []
    for number, image in enumerate(example_record(data)[1]):
        paths.append(folder / f"example{number or ''}.png")
        image.save(paths[-1])
    places = range(0, len(split), -(-len(split) // GALLERY))
    for number, place in enumerate(places[1:], start=1):
        with suppress(ImageError):  # damaged ones were reported when the split was read
            if "image" not in (record := split.record(place)):
                continue
            image = record.images()[0]
            image.thumbnail((SIDE, SIDE))
            image.save(folder / f"more{number}.png")
    return " ".join(shlex.quote(str(path)) for path in paths)
