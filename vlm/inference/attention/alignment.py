"""Attention of each written word to the words of the text that was read."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import printable
from vlm.inference.attention.picture import GAP, font
from vlm.inference.text.text_words import words_of
from vlm.models.context import Context
from vlm.models.text_decoder import TextDecoder

CELL, LETTER = 26, 9  # pixels of a cell for a pair of words, and approximately of a letter


@dataclass
class Alignment:
    """The words of both texts and their weights (Bahdanau et al. 2015, figure 3): (written, read).

    A row of weights sums to at most 1; the rest is on the begin and end tokens.
    """

    read: list[str]
    written: list[str]
    weights: np.ndarray


@torch.no_grad()
def read_alignment(
    decoder: TextDecoder, tokenizer: Tokenizer, context: Context, read: Sequence[int], written: Sequence[int]
) -> Alignment | None:
    """Decodes a written text again and records its attention.

    Returns None for a decoder without attention, or if a text has no word.

    Args:
        context: The text that was read, encoded, one row.
        read: Its tokens, with begin and end.
        written: Tokens of the written text, without begin and end.
    """
    row = torch.tensor([[tokenizer.bos_id, *written[:-1]]], device=context.states.device)
    if not written or (weights := decoder.attention(row, context)) is None:
        return None
    by_token = weights[0].float().cpu().numpy()  # (L, S)
    inner = [place for place, token in enumerate(read) if token not in (tokenizer.bos_id, tokenizer.eos_id)]
    columns = [(word, [inner[at] for at in places]) for word, places in words_of([read[at] for at in inner], tokenizer)]
    rows = list(words_of(written, tokenizer))
    if not rows or not columns:
        return None
    means = [[by_token[at][:, places].sum(1).mean() for _, places in columns] for _, at in rows]
    return Alignment([word for word, _ in columns], [word for word, _ in rows], np.array(means))


def alignment_picture(alignment: Alignment) -> bytes:
    """Draws a PNG: written words from top to bottom, read ones from left to right, dark for large weights."""
    left, top = (LETTER * max(map(len, words)) + GAP for words in (alignment.written, alignment.read))
    size = (left + CELL * len(alignment.read) + GAP, top + CELL * len(alignment.written) + GAP)
    sheet, letters = Image.new("RGB", size, "white"), font(14)
    draw = ImageDraw.Draw(sheet)
    for column, word in enumerate(alignment.read):
        strip = Image.new("RGB", (top - GAP // 2, CELL), "white")
        ImageDraw.Draw(strip).text((0, CELL // 2), printable(word), fill="black", font=letters, anchor="lm")
        sheet.paste(strip.rotate(90, expand=True), (left + CELL * column, 0))
    for row, (word, weights) in enumerate(zip(alignment.written, alignment.weights, strict=True)):
        y = top + CELL * row
        draw.text((left - GAP // 2, y + CELL // 2), printable(word), fill="black", font=letters, anchor="rm")
        for column, weight in enumerate(weights):
            x, shade = left + CELL * column, int(255 * (1 - min(1.0, float(weight))))
            draw.rectangle((x, y, x + CELL - 1, y + CELL - 1), fill=(shade, shade, shade), outline="#dddddd")
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()
