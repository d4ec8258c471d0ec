"""From the body of a request to the inputs of a model: images as the model reads them, texts that are not too long."""

from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vlm.data.images.image import LARGE_PIXELS, MAX_PIXELS, ImageError, decoding_cost, load_image
from vlm.errors import UserError
from vlm.inference.image_predictor import ImagePredictor
from vlm.inference.inputs import default_workers
from vlm.inference.predictor import Predictor
from vlm.serving.budget import Budget
from vlm.serving.contents import Contents
from vlm.tasks.span_answering.predict import SpanAnswerer
from vlm.tasks.tagging.predict import Tagger
from vlm.tuning import return_freed_memory

FINER = 4  # times the pixels that the model sees along a side are what a JPEG keeps, at least, where it is decoded
WINDOWS = 32  # that a text may fill, of a model that reads a long text in windows


def room_of(predictor: Any) -> tuple[int | None, int]:
    """The tokens of a text that a model reads, if that is known, and the windows that it reads a longer text in."""
    room = getattr(predictor, "max_len", None) or getattr(predictor.model, "max_len", None)
    return room, WINDOWS if isinstance(predictor, Tagger | SpanAnswerer) else 0


class Reader:
    """Reads inputs for a model.

    Args:
        predictor: The model.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.main = "image" if isinstance(predictor, ImagePredictor) else "text"
        self.least = None
        if isinstance(predictor, ImagePredictor):
            self.least = int(FINER * predictor.preprocess.image_size / predictor.preprocess.crop)
        self.room, self.windows = room_of(predictor)
        # Decoding takes up to 14 bytes a pixel, and parsing some a byte: one budget bounds the memory of both. Beside
        # the largest image there is room for as many small ones as there are workers.
        self.budget = Budget(MAX_PIXELS + default_workers() * LARGE_PIXELS, least=LARGE_PIXELS)

    async def read(self, kind: str, body: bytearray, *, most: int, deadline: float) -> tuple[list[Any], set[int]]:
        """The inputs of a body, and the places of texts whose end the model does not read.

        An input that cannot be read is its fault, a UserError.

        Args:
            kind: The body's content type.
            body: It is empty afterwards.
            most: Inputs of a request.
            deadline: When the request gives up waiting for its turn, by the loop's clock.
        Raises:
            HTTPException: The body is not as it should be, or its turn does not come.
        """
        async with self.budget.take(len(body), deadline=deadline):
            size = len(body)
            sources, cut = await run_in_threadpool(self._open, kind, body, most)
            if size > LARGE_PIXELS:
                await run_in_threadpool(return_freed_memory)
        inputs = []
        for source in sources:
            if isinstance(source, tuple):
                place, content, cost = source
                async with self.budget.take(cost, deadline=deadline):
                    source = await run_in_threadpool(self._pixels, place, content)
                    if cost > LARGE_PIXELS:
                        await run_in_threadpool(return_freed_memory)
            inputs.append(source)
        return inputs, cut

    def _open(self, kind: str, body: bytearray, most: int) -> tuple[Sequence[Any], set[int]]:
        """Images with their place and their cost, and texts."""
        contents = Contents.parse(kind, body, main=self.main)
        body.clear()
        if contents.options:
            raise HTTPException(422, f"{next(iter(contents.options))}: is unknown")
        values: Sequence[Any] = contents.images if self.main == "image" else contents.texts
        if not 0 < len(values) <= most:
            raise HTTPException(422, f"{len(values)} inputs in a request; send 1 to {most}")
        if self.main == "image":
            return [self._priced(place, content) for place, content in enumerate(values, start=1)], set()
        texts, cut = [self._text(place, text) for place, text in enumerate(values, start=1)], set()
        for place, text in enumerate(texts):
            if isinstance(text, str) and self.room is not None:
                count = len(self.predictor.tokenizer.encode(text))  # type: ignore[attr-defined]
                if self.windows and count > self.windows * self.room:
                    most = self.windows * self.room
                    texts[place] = UserError(f"text {place + 1}: has {count:,} tokens; {most:,} are the most", 1)
                elif count > self.room and not self.windows:
                    cut.add(place)
        return texts, cut

    def _text(self, place: int, content: bytes | str) -> str | UserError:
        try:
            text = content.decode() if isinstance(content, bytes) else content
            return text.encode().decode()  # halves of surrogate pairs, which JSON can say, are not text
        except UnicodeError:
            return UserError(f"text {place}: is no text in UTF-8", 1)

    def _priced(self, place: int, content: bytes) -> Any:
        try:
            return place, content, decoding_cost(content, f"image {place}", least=self.least)
        except ImageError as fault:
            return fault

    def _pixels(self, place: int, content: bytes) -> Any:
        try:
            image = load_image(content, f"image {place}", least=self.least)
            return self.predictor.pixels(image)  # type: ignore[attr-defined]
        except ImageError as fault:
            return fault
