"""Boxes of objects in images, and their coordinates as location tokens."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from vlm.data.images.resize import Box
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.tokenizer_base import LOCATION, MAX_LOCATIONS, Tokenizer

SEPARATOR = " ; "  # between classes of a prompt; PaliGemma also writes it between objects
COORDINATES = 4  # location tokens of a box: top, left, bottom, right


class LabeledBox(NamedTuple):
    """An object of an image.

    Args:
        label: Its class.
        box: Left, top, right and bottom edge, in pixels from the image's corner.
        crowd: Whether it is a region of several objects, which is neither trained on nor counted as missed.
    """

    label: str
    box: Box
    crowd: bool = False

    def __str__(self) -> str:
        edges = " ".join(f"{edge:g}" for edge in self.box)
        return f"{self.label} {edges}{' (crowd)' if self.crowd else ''}"


class ImageBoxes(NamedTuple):
    """The objects of an image.

    Args:
        size: Width and height of the image.
        boxes: Its objects; may be empty.
    """

    size: tuple[int, int]
    boxes: tuple[LabeledBox, ...]

    @classmethod
    def of_plain(cls, value: Sequence[Any]) -> "ImageBoxes":
        """Restores them from lists, as JSON has them."""
        (width, height), boxes = value
        return cls((width, height), tuple(LabeledBox(label, tuple(box), crowd) for label, box, crowd in boxes))


class BoxPrompt(NamedTuple):
    """A prompt for boxes and what a model should write.

    Args:
        prompt: Text of the prompt.
        boxes: The objects, in the view that the model reads.
        text: The objects as a text.
    """

    prompt: str
    boxes: Sequence[LabeledBox]
    text: str


def find_locations(tokenizer: Tokenizer) -> range:
    """Ids of location tokens: those that were added for training, or <loc0000> to <loc1023> of a folder's tokenizer.

    Empty if there are none.
    """
    if tokenizer.location_ids or not isinstance(tokenizer, JsonTokenizer):
        return tokenizer.location_ids
    ids = [tokenizer.encode_marked(LOCATION.format(number)) for number in range(MAX_LOCATIONS)]
    return (
        range(ids[0][0], ids[0][0] + MAX_LOCATIONS) if ids == [[ids[0][0] + n] for n in range(len(ids))] else range(0)
    )


class LocationCodec(NamedTuple):
    """Coordinates of a view as numbers of location tokens, and back.

    Args:
        size: Width and height of the view.
        bins: Number of location tokens.
        steps: Number of tokens per side: the coordinate of token k is k * side / steps. Pix2Seq has bins - 1, so that
            the last token is the right or bottom edge; PaliGemma has bins.
    """

    size: tuple[int, int]
    bins: int
    steps: int

    def encode(self, box: Box) -> list[int]:
        """Top, left, bottom and right edge as numbers of location tokens."""
        left, top, right, bottom = (
            min(max(0, round(edge / self.size[at % 2] * self.steps)), self.bins - 1) for at, edge in enumerate(box)
        )
        return [top, left, bottom, right]

    def decode(self, numbers: Sequence[int]) -> Box:
        """Left, top, right and bottom edge of numbers in the order of `encode`."""
        top, left, bottom, right = numbers
        width, height = self.size
        across, down = width / self.steps, height / self.steps
        return left * across, top * down, right * across, bottom * down


def view_codec(image_size: tuple[int, int], bins: int) -> LocationCodec:
    """Coordinates of what a model reads as location tokens, the last of which is the right or bottom edge.

    Args:
        image_size: Height and width of what it reads.
    """
    return LocationCodec(image_size[::-1], bins, bins - 1)


DETECT = "detect"


def format_prompt(classes: Sequence[str]) -> str:
    """What a model reads before it writes objects: PaliGemma's "detect A ; B" and a line feed; without classes, all."""
    return f"{DETECT} {SEPARATOR.join(classes)}\n" if classes else f"{DETECT}\n"


def prompt_ids(tokenizer: Tokenizer, classes: Sequence[str]) -> list[int]:
    """Token ids of a prompt, with the begin token."""
    return [tokenizer.bos_id, *tokenizer.encode(format_prompt(classes))]


class WrittenObject(NamedTuple):
    """An object as a model wrote it.

    Args:
        label: Its class.
        numbers: Numbers of its location tokens: top, left, bottom, right.
        logprob: Log-probability of its class and location tokens.
    """

    label: str
    numbers: tuple[int, int, int, int]
    logprob: float


def parse_objects(
    tokenizer: Tokenizer, locations: range, tokens: Sequence[int], logprobs: Sequence[float]
) -> Iterator[WrittenObject | None]:
    """Yields the objects of a text, each four location tokens followed by its class; None for one without either.

    Separators are neither a part of the class nor of its probability. A box whose right edge is not right of its left
    one, or whose bottom edge is not below its top one, is None too.

    Args:
        locations: Ids of the location tokens.
        tokens: The text, without its end token.
        logprobs: Log-probability of each token.
    """
    runs = [(is_location, list(run)) for is_location, run in groupby(enumerate(tokens), lambda at: at[1] in locations)]
    if runs and not runs[0][0] and tokenizer.decode([token for _, token in runs.pop(0)[1]]).strip(SEPARATOR):
        yield None  # a class without a box
    for at in range(0, len(runs), 2):
        places = [place for place, _ in runs[at][1]]
        numbers = tuple(tokens[place] - locations[0] for place in places)
        words = list(runs[at + 1][1]) if at + 1 < len(runs) else []
        while words and not tokenizer.decode([words[-1][1]]).strip(SEPARATOR):  # a separator
            words.pop()
        label = tokenizer.decode([token for _, token in words]).strip(SEPARATOR)
        if len(numbers) != COORDINATES or not label or numbers[0] >= numbers[2] or numbers[1] >= numbers[3]:
            yield None
            continue
        logprob = sum(logprobs[place] for place in [*places, *(place for place, _ in words)])
        yield WrittenObject(label, numbers, logprob)  # type: ignore[arg-type]
