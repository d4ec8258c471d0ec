"""Grapheme clusters, the characters that a person sees (Unicode Standard Annex 29), and cuts between them."""

from collections.abc import Iterable, Iterator

import regex

Span = tuple[int, int]


def whole(spans: Iterable[Span], text: str) -> Iterator[Span]:
    """Joins adjacent parts of a text, given in order, where the cut between them splits a grapheme cluster."""
    starts = {match.start() for match in regex.finditer(r"\X", text)}
    begin = end = -1
    for start, stop in spans:
        if start != end or start in starts:
            if end > begin:
                yield begin, end
            begin = start
        end = stop
    if end > begin:
        yield begin, end
