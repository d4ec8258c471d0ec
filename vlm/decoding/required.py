"""Words that a text must hold: what is still missing, and which tokens may come so that there is room for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.decoding.constraints import Words

Required = Sequence[Sequence[Words]]


def missing(text: Sequence[int], required: Required) -> list[Sequence[Words]]:
    """The requirements that a text does not meet yet."""
    return [ways for ways in required if not any(_holds(text, words) for words in ways)]


def room_needed(text: Sequence[int], lacking: Required) -> int:
    """Tokens that must still follow: the rest of one requirement that the text is in the middle of, all of the others.

    Two requirements that share tokens count as if they did not.
    """
    whole = [min(map(len, ways)) for ways in lacking]
    saved = [full - min(len(rest(text, words)) for words in ways) for full, ways in zip(whole, lacking, strict=True)]
    return sum(whole) - max(0, max(saved, default=0))


def next_tokens(text: Sequence[int], lacking: Required) -> set[int]:
    """Tokens that begin or continue a missing requirement."""
    return {words[0] for ways in lacking for way in ways for words in (rest(text, way), way)}


def progress(text: Sequence[int], required: Required) -> int:
    """How many tokens of what is required a text has: the bank it stands in (Post and Vilar 2018)."""
    return sum(min(map(len, ways)) for ways in required) - room_needed(text, missing(text, required))


def keep_possible(scores: Tensor, texts: Sequence[Sequence[int]], required: Required, room: int, eos_id: int) -> None:
    """Sets to -inf, in place, each token after which a text could not hold what is required any more.

    Args:
        texts: One a row of scores, as far as they have come.
        room: Tokens that may follow the next one, the end token not counted.
    Shapes:
        scores (R, V)
    """
    for row, text in zip(scores, texts, strict=True):
        lacking = missing(text, required)
        if not lacking:
            continue
        if 0 <= eos_id < len(row):
            row[eos_id] = -torch.inf
        if room_needed((), lacking) > room:
            useful = [t for t in next_tokens(text, lacking) if _possible([*text, t], lacking, room)]
            index = torch.tensor(sorted(useful), dtype=torch.long, device=row.device)
            kept = row[index].clone()
            row.fill_(-torch.inf)[index] = kept


def rest(text: Sequence[int], words: Words) -> Words:
    """What of these words must still follow a text that may end in the middle of them."""
    for count in range(min(len(words) - 1, len(text)), 0, -1):
        if tuple(text[-count:]) == words[:count]:
            return words[count:]
    return words


def _possible(text: Sequence[int], lacking: Required, room: int) -> bool:
    return room_needed(text, missing(text, lacking)) <= room


def _holds(text: Sequence[int], words: Words) -> bool:
    return any(tuple(text[at : at + len(words)]) == words for at in range(len(text) - len(words) + 1))
