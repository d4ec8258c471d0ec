"""Checks texts and their translations for problems before training."""

from collections.abc import Mapping

from vlm.data.records import Record, Split
from vlm.data.text.tokenizer import Tokenizer
from vlm.evaluation.data_check.faults import Faults, cover

RATIO = 3  # ratio of lengths in characters above which a pair may be wrong
SHORT = 20  # characters up to which any ratio is accepted
SHOWN = 60  # characters of a text
SIDES = ("text", "translation")


def pair_faults(
    splits: Mapping[str, Split], tokenizer: Tokenizer, max_len: int, faults: Faults, *, limit: int | None, drawn: bool
) -> dict[str, float]:
    """Finds pairs that are duplicate, in two splits, of unlike lengths, too long, or unknown to the tokenizer.

    Args:
        drawn: Whether they are generated, so that short ones recur, in other splits too.
    Returns:
        The share of tokens of each split that the tokenizer knows.
    """
    seen: dict[tuple[str, ...], tuple[str, str]] = {}
    coverage = {}
    for name, split in splits.items():
        texts, rows = [], []
        for record in split.records(limit):
            pair = tuple(record[side] for side in SIDES)
            here = name, record.id
            first = seen.setdefault(pair, here)
            same = f"{first[0]}: {first[1]} = {name}: {record.id}: {' | '.join(pair)[:SHOWN]}"
            faults.add("pair in two splits", [same] if first[0] != name and not drawn else [], 1)
            again = first != here and first[0] == name and not drawn
            faults.add("duplicate pair", [same] if again else [], 1)
            faults.add("pair of unlike lengths", [f"{name}: {unlike}"] if (unlike := unlike_lengths(record)) else [], 1)
            ids = [tokenizer.encode(text) for text in pair]
            longest = max(map(len, ids)) + 2
            long = f"{name}: {record.id}: {longest} tokens, more than data.max_len={max_len}: {pair[0][:SHOWN]}"
            faults.add("over-long text", [long] if longest > max_len else [], 1)
            texts += [(record.id, text) for text in pair]
            rows += ids
        coverage[name] = cover(name, texts, rows, tokenizer, faults)
    return coverage


def unlike_lengths(record: Record) -> str:
    """Returns a line on a pair if one side is much longer than the other; else ""."""
    one, other = (record[side] for side in SIDES)
    short, long = sorted((len(one), len(other)))
    if long <= SHORT or long <= RATIO * short:
        return ""
    return f"{record.id}: {len(one)} and {len(other)} characters: {one[:SHOWN]} | {other[:SHOWN]}"
