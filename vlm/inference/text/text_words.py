"""Words of generated texts, with their probabilities."""

from collections.abc import Iterator, Sequence
from math import exp

import torch

from vlm.data.text.scripts import spaceless
from vlm.data.text.tokenizer import Tokenizer
from vlm.inference.writing import Writer
from vlm.models.context import Context


def words_of(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yields the words of a text with the places of their tokens; in a script without spaces, each token is a word."""
    word = written = ""
    places: list[int] = []
    unfinished: list[int] = []  # tokens that are parts of a character
    for place, token in enumerate(tokens):
        if token in tokenizer.language_ids:  # language tokens are given, not written
            continue
        unfinished.append(place)
        text = tokenizer.decode(tokens[: place + 1])
        if text.endswith("\ufffd") and place + 1 < len(tokens):
            continue
        piece, written = text[len(written) :], text
        apart = any(map(spaceless().match, (word[-1:], piece[:1]))) and piece[:1].isalnum()
        if (piece.startswith(" ") or apart) and word.strip():
            yield word.strip(), places
            word, places = "", []
        word, places, unfinished = word + piece, [*places, *unfinished], []
    if word.strip():
        yield word.strip(), places


@torch.inference_mode()
def word_probabilities(writer: Writer, context: Context, tokens: Sequence[int]) -> list[tuple[str, float]]:
    """Returns the words of a text with the probability of each given those before; runs the decoder on the text again.

    Args:
        context: The input, encoded, one row.
        tokens: The text, without begin and end; at most as many as the decoder's positions.
    """
    if not tokens:
        return []
    begin = writer.tokenizer.bos_id if context.begin is None else int(context.begin)
    read = torch.tensor([[begin, *tokens[:-1]]], device=writer.device)
    hidden = writer.model.decoder(read, None, context)  # (1, L, D)
    logprobs = writer.model.head(hidden)[0].float().log_softmax(-1)  # (L, V)
    own = [row[token].item() for row, token in zip(logprobs, tokens, strict=True)]
    return [(word, exp(sum(own[at] for at in places))) for word, places in words_of(tokens, writer.tokenizer)]
