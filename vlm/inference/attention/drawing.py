"""Pictures of a captioner's attention."""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from vlm.errors import UserError
from vlm.inference.attention.maps import has_class_token, read_attention, what_is_missing
from vlm.inference.attention.picture import TILE, Band, bands_picture
from vlm.inference.predictor import normalized

BY_CLASS = "encoder, last layer: what the class token attends to, head by head"
BY_PATCHES = "encoder, last layer: what the patches attend to on their mean, head by head (it has no class token)"


class AttentionPicture:
    """A picture of the attention over an image for each word of its caption; a notebook shows it.

    Args:
        caption: The caption, as `vlm.inference.writing.Text`.
        png: The bytes of the PNG file.
    """

    def __init__(self, caption: Any, png: bytes) -> None:
        self.caption, self.png = caption, png

    def _repr_png_(self) -> bytes:
        return self.png

    def show(self) -> None:
        """Shows the picture: in a notebook below its cell, else in the system's viewer of images."""
        ipython = sys.modules.get("IPython")  # other libraries import it too, but only a notebook's shell has a kernel
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            ipython.display.display(self)
        else:
            Image.open(BytesIO(self.png)).show()

    def save(self, path: str | Path) -> None:
        """Writes the picture, a PNG, to a file."""
        Path(path).write_bytes(self.png)


class AttentionDrawing:
    """Draws pictures of a captioner's attention.

    Attributes:
        missing: Lines that say which maps the model does not offer.
    Args:
        captioner: The predictor.
        named: The option or method that asks for pictures, for messages.
    Raises:
        UserError: This model offers no attention maps.
    """

    def __init__(self, captioner: Any, named: str) -> None:
        self.captioner = captioner
        if captioner.form is not None:
            raise UserError(f"{named}: of an image inside a prompt there are no maps; leave it out for this model")
        blank = captioner.pixels(Image.new("RGB", (1, 1)))[None].to(captioner.device)
        self.missing = what_is_missing(captioner.model, normalized(captioner.model, captioner.preprocess, blank))
        if len(self.missing) > 1:
            raise UserError(f"{named}: {'; '.join(self.missing)}; leave it out for this model")
        self.title = BY_CLASS if has_class_token(captioner.model.encoder) else BY_PATCHES
        # The image as the model sees it, at a higher resolution.
        self.view = captioner.preprocess.scaled_to(TILE)

    def png(self, pixels: Tensor, caption: Any, shown: Tensor) -> bytes:
        """The picture of a caption.

        Args:
            pixels: The image as the model reads it, uint8 (3, H, W).
            caption: Its text and tokens.
            shown: The image as it is shown, from `view`.
        """
        it = self.captioner
        attention = read_attention(it.model, it.tokenizer, it.preprocess, pixels.to(it.device), caption.tokens)
        bands: list[Band] = [(caption.text, attention.words)]
        bands += [(self.title, attention.heads)] if attention.heads else []
        return bands_picture(shown, bands)
