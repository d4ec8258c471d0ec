"""What a captioner looked at while it wrote: a heat map a word over the image (Xu et al. 2015, figure 5)."""

import io
from collections.abc import Iterator, Sequence
from math import isqrt
from typing import cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vlm.data.image import Preprocess
from vlm.data.tokenizer import Tokenizer
from vlm.inference.files import printable
from vlm.models.vision_language import VisionLanguageModel
from vlm.nn.attention import recorded
from vlm.nn.blocks import DecoderBlock

Map = tuple[str, np.ndarray]

TILE, GAP = 128, 20  # pixels of a picture, and of the space above it for its word


@torch.no_grad()
def word_maps(
    model: VisionLanguageModel, tokenizer: Tokenizer, preprocess: Preprocess, pixels: Tensor, caption: str
) -> list[Map]:
    """The attention to the image while each word of a caption was written: the last layer's, the mean of its heads.

    Args:
        pixels: The image as the model reads it, uint8 (3, H, W).
    Returns:
        Words with maps (side, side) that sum to 1; none where the encoder's states are no square grid.
    """
    # A caption read again may take more tokens than it was written in.
    tokens = tokenizer.encode(caption)[: model.decoder.max_len - 1]
    layer = cast(DecoderBlock, model.decoder.blocks[-1]).cross_attn
    assert layer is not None, "a captioner attends to its image"
    training = model.training
    row = torch.tensor([[tokenizer.bos_id, *tokens]], device=pixels.device)
    with recorded(layer) as records:
        model.eval()(preprocess.normalize(pixels[None]), row)
        model.train(training)
    weights = records[0][-1].mean(dim=1)[0]  # (B, N, L, S) -> (L, S)
    cells = weights.shape[1]
    side = isqrt(cells)
    grid = weights[:, cells - side * side :].float().cpu().numpy()  # what stands before the grid is a class token
    if cells - side * side > 1 or not tokens:
        return []
    # What stands at a place predicts the token after it: the query of the first token is the begin.
    return [(word, _normal(grid[places].mean(0).reshape(side, side))) for word, places in _words(tokens, tokenizer)]


def _words(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The words of a text with the places of their tokens."""
    word = ""
    places: list[int] = []
    for place in range(len(tokens)):
        piece = tokenizer.decode(tokens[: place + 1])[len(tokenizer.decode(tokens[:place])) :]
        if piece.startswith(" ") and word.strip():
            yield word.strip(), places
            word, places = "", []
        word, places = word + piece, [*places, place]
    if word.strip():
        yield word.strip(), places


def _normal(weights: np.ndarray) -> np.ndarray:
    return weights / max(float(weights.sum()), 1e-12)


def attention_picture(pixels: Tensor, maps: Sequence[Map], *, columns: int = 6) -> bytes:
    """The image, then a copy for each word that is bright where the model looked, as a PNG.

    Args:
        pixels: uint8 (3, H, W).
        maps: As from `word_maps`.
    """
    import matplotlib

    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 14)  # it knows many scripts
    image = pixels.permute(1, 2, 0).cpu().numpy()  # (H, W, 3)
    rows = -(-(len(maps) + 1) // columns)
    sheet = Image.new("RGB", (columns * (TILE + GAP), rows * (TILE + 2 * GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (word, weights) in enumerate([("", None), *maps]):
        left, top = place % columns * (TILE + GAP), place // columns * (TILE + 2 * GAP)
        shown = Image.fromarray(image if weights is None else _lit(image, weights))
        sheet.paste(shown.resize((TILE, TILE), Image.Resampling.LANCZOS), (left, top + GAP))
        draw.text((left + TILE // 2, top + GAP // 2), printable(word), fill="black", font=font, anchor="mm")
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def _lit(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """An image darkened where its weights are small."""
    light = Image.fromarray((255 * weights / max(float(weights.max()), 1e-12)).astype(np.uint8))
    light = light.resize((image.shape[1], image.shape[0]), Image.Resampling.BICUBIC)
    return (image * (0.15 + 0.85 * np.asarray(light)[..., None] / 255)).astype(np.uint8)
