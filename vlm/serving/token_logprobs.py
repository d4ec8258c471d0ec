"""Log-probabilities of tokens in OpenAI's two forms, of conversations and of completions."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from vlm.data.text.tokenizer_base import Tokenizer
from vlm.decoding.token_scores import TokenScore
from vlm.untrusted.sizes import JsonValue


def describe_token(tokenizer: Tokenizer, token: int) -> tuple[str, list[int] | None]:
    """Returns the text of a token, and its bytes.

    Part of a character has its bytes as text, such as \\xe2\\x82; a special token has its name, and no bytes.
    """
    raw = tokenizer.bytes_of(token)
    if not raw:
        return tokenizer.piece(token), None
    try:
        return raw.decode(), list(raw)
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def offsets_of(tokenizer: Tokenizer, tokens: Sequence[int], *, first: int = 0) -> list[int]:
    """Returns the index of the character in which each token begins, within the text of all tokens.

    Args:
        first: The index of the first one.
    """
    decoder, at, offsets = getincrementaldecoder("utf-8")("replace"), first, list[int]()
    for token in tokens:
        raw, pending = tokenizer.bytes_of(token), decoder.getstate()[0]
        is_broken = pending and raw and not 0x80 <= raw[0] < 0xC0  # the character before ends here, incomplete
        offsets.append(at + len(pending.decode("utf-8", "replace")) if is_broken else at)
        at += len(decoder.decode(raw))
    return offsets


def format_content_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenScore], *, shows_top: bool
) -> dict[str, JsonValue]:
    """Returns the log-probabilities of the tokens of an answer in a conversation."""

    def describe(token: int, logprob: float) -> dict[str, JsonValue]:
        text, raw = describe_token(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": None if raw is None else [*raw]}

    content = list[JsonValue]()
    for score in scores:
        top: list[JsonValue] = [describe(*pair) for pair in score.top] if shows_top else []
        content.append({**describe(score.token, score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def format_completion_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenScore | None], offsets: Sequence[int], *, first: int = 0
) -> dict[str, JsonValue]:
    """Returns the log-probabilities of the tokens of a completion.

    Of tokens with the same text, `top_logprobs` has the chosen one, else the most probable one.

    Args:
        scores: None for the first token of a prompt, which nothing predicts.
        offsets: Index of the character in which each token begins.
        first: That token.
    """

    def describe(token: int) -> str:
        text, raw = describe_token(tokenizer, token)
        return f"bytes:{text}" if raw is not None and bytes(raw) != text.encode() else text

    tokens, logprobs, tops = list[JsonValue](), list[JsonValue](), list[JsonValue]()
    for score in scores:
        tokens.append(describe(first if score is None else score.token))
        logprobs.append(None if score is None else score.logprob)
        if score is None:
            tops.append(None)
            continue
        top: dict[str, JsonValue] = {}
        for token, logprob in score.top:
            top.setdefault(describe(token), logprob)
        tops.append(top | {describe(score.token): score.logprob})
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": [*offsets]}
