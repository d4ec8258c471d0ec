"""Converts words to rules of decoding."""

from collections.abc import Sequence
from typing import Any

from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.words import spaceless_pattern
from vlm.decoding.constraints import Rules
from vlm.errors import UserError


def build_word_rules(
    tokenizer: Tokenizer,
    *,
    prefix: str = "",
    begin: Sequence[int] = (),
    ban: Sequence[str] = (),
    require: Sequence[str] = (),
    **options: Any,
) -> Rules:
    """Returns rules with a prefix, banned words and required words; other options as in Rules.

    A word is banned inside a text and at its beginning, with a lower-case and a capital first letter; so are longer
    words that begin with the same tokens. A required word is one inside a text. Both are sequences of tokens: a model
    that spells a word with other tokens than the tokenizer is not detected.

    Args:
        prefix: Beginning of the texts.
        begin: Tokens before it.
        ban, require: Words.
    Raises:
        UserError: A word is empty, or has no tokens.
    """
    if not all(word.strip() for word in (*ban, *require)):
        raise UserError("--ban, --require: a word is empty; give a word, or remove the option")
    forms = {first + word[1:] for word in ban for first in (word[:1].lower(), word[:1].upper())}
    banned = {tuple(tokenizer.encode_written(space + form)) for form in forms for space in ("", " ")}
    inside = (word if spaceless_pattern().match(word) else f" {word}" for word in require)
    required = tuple((tuple(tokenizer.encode_written(form)),) for form in inside)
    first = (*begin, *(tokenizer.encode_written(prefix.rstrip()) if prefix else ()))
    return Rules(prefix=first, banned=tuple(sorted(banned)), required=required, **options)
