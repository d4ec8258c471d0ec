"""Tokenization of captions as COCO's evaluation does it, without Java.

The reference is the Penn Treebank tokenizer of Stanford CoreNLP 3.4.1, run with ``-preserveLines -lowerCase``, followed by
the removal of punctuation (Chen et al. 2015, "Microsoft COCO Captions: Data Collection and Evaluation Server", section 3).
Its oddities are kept, since published scores hold them: brackets stay, as ``-lrb-``, because only their names in capitals
are removed; ``1 1/2`` is one token with a no-break space; ``bat.,`` keeps its full stop.

Known differences, all of them outside of ordinary English captions:

- The reference reads all captions as one text, so that a caption that ends in a single letter and a full stop
  (``the letter A.``) is cut by the first word of the next one. Here a caption depends on itself alone, as in a file of its own.
- Line separators inside a caption (carriage return, form feed, U+2028, ...) are blanks here; there they start a new caption.
- A capital sigma at the end of a word that holds digits or marks is lowercased by Unicode's rule, not by Java's.
- Letters that Unicode gained after version 6.0 are letters here; there they are dropped.
- A token that is nothing but a soft hyphen vanishes here; there an empty one is left.
"""

import re

from vlm.metrics.ptb_rules import CONTRACTIONS, KEPT_STOP, Rule, rules, symbols

_PUNCTUATION = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_CONTRACTIONS = frozenset(CONTRACTIONS.split())
_PLAIN = re.compile("[A-Za-z, ]*[.]?[ ]*")
_PLAIN_WORDS = re.compile("(?:[A-Za-z]+ +)+")


def tokenize(caption: str) -> list[str]:
    """Cuts a caption into lowercase tokens without punctuation.

    Args:
        caption: Any text; what the reference cannot tokenize (emoji, for one) leaves no token.
    """
    return _tokenize_plain(caption) or [token for token in _tokenize(caption) if token not in _PUNCTUATION]


def _tokenize_plain(caption: str) -> list[str] | None:
    """The tokens of a caption of plain words, commas and one full stop at its end; None where a rule might apply."""
    if _PLAIN.fullmatch(caption) is None:
        return None
    words = caption.lower().replace(",", " ").split()
    if words and words[-1][-1] == ".":
        words[-1] = words[-1][:-1]
        if len(words[-1]) < 2 or words[-1] in KEPT_STOP:
            return None
    return words if _CONTRACTIONS.isdisjoint(words) else None


def _tokenize(caption: str) -> list[str]:
    listed, single = rules(caption.isascii()), symbols()
    tokens: list[str] = []
    position, end = 0, len(caption)
    # Rules look at what follows a token, and a caption is a line: something always follows.
    line = caption + "\n"
    while position < end:
        if line[position].isspace():
            position += 1
            continue
        plain = _PLAIN_WORDS.match(line, position)
        if plain and _CONTRACTIONS.isdisjoint(words := plain.group().lower().split()):
            tokens.extend(words)
            position = plain.end()
            continue
        text, length = _longest(line, position, listed)
        if length or text in single:
            tokens.append(text.lower())
        position += length or 1
    return [token for token in tokens if token]


def _longest(line: str, position: int, listed: list[Rule]) -> tuple[str, int]:
    """The token of the rule that wins at this position and how much it consumes; the bare character and 0 if none does."""
    best, farthest = None, -1
    for rule in listed:
        match = rule.pattern.match(line, position)
        if match and match.end() > farthest:
            best, action, farthest = match, rule.action, match.end()
    if best is None:
        return line[position], 0
    return action(best.group(1)), best.end(1) - position
