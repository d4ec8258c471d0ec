"""Answers to conversations in OpenAI's format: as one object, or as a stream of events."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypedDict, cast
from uuid import uuid4

from vlm.serving.engine import Results, Updates, describe_failure, stream_updates
from vlm.serving.fields import format_error
from vlm.tasks.chat.predictor import Prompt, cut_at_stop, visible_text
from vlm.untrusted.sizes import JsonValue

CHUNK = "chat.completion.chunk"


class ReplyFields(TypedDict):
    """The fields of a `Reply` in a response."""

    text: str
    tokens: list[int]
    ended: bool


class CompletionFormatter:
    """Formats the answer to a conversation as a chat completion, or as a stream of chunks.

    Args:
        name: The name of the model.
        prompt: The conversation.
    """

    def __init__(self, name: str, prompt: Prompt) -> None:
        self.common_fields: dict[str, JsonValue] = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        self.prompt_tokens = len(prompt.tokens)

    def format_completion(self, reply: ReplyFields) -> dict[str, JsonValue]:
        """Returns the answer as a chat.completion object."""
        choice: dict[str, JsonValue] = {"index": 0, "message": {"role": "assistant", "content": reply["text"]}}
        choice |= {"finish_reason": _finish_reason(reply), "logprobs": None}
        about: dict[str, JsonValue] = {
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._token_usage(reply),
        }
        return {**self.common_fields, **about}

    async def stream_chunks(
        self,
        updates: Updates,
        results: Awaitable[Results],
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        include_usage: bool,
    ) -> AsyncIterator[str]:
        """Yields the answer as events, each with the new part of the text; arguments as in `stream_events`."""
        sent = ""
        try:
            yield self._format_chunk({"role": "assistant", "content": ""}, include_usage=include_usage)
            async with aclosing(stream_updates(updates, results)) as steps:
                async for step in steps:
                    if isinstance(step, tuple):
                        text, ended = cut_at_stop(decode, step[1][0], stops)
                        text = text if ended else visible_text(text, stops)
                    else:
                        reply = cast(ReplyFields, step["results"][0])
                        text = reply["text"]
                    if len(text) > len(sent):
                        yield self._format_chunk({"content": text[len(sent) :]}, include_usage=include_usage)
                        sent = text
            yield self._format_chunk({}, include_usage=include_usage, reason=_finish_reason(reply))
            if include_usage:
                about: dict[str, JsonValue] = {"object": CHUNK, "choices": [], "usage": self._token_usage(reply)}
                yield _format_event({**self.common_fields, **about})
        except Exception as fault:
            yield _format_event(format_error(*describe_failure(fault)))
        yield "data: [DONE]\n\n"

    def _format_chunk(self, delta: Mapping[str, str], *, include_usage: bool, reason: str | None = None) -> str:
        choice: dict[str, JsonValue] = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        usage: dict[str, JsonValue] = {"usage": None} if include_usage else {}
        return _format_event({**self.common_fields, "object": CHUNK, "choices": [choice], **usage})

    def _token_usage(self, reply: ReplyFields) -> dict[str, int]:
        completion_tokens = len(reply["tokens"])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


def _finish_reason(reply: ReplyFields) -> str:
    return "stop" if reply["ended"] else "length"


def _format_event(content: Mapping[str, JsonValue]) -> str:
    return f"data: {json.dumps(content)}\n\n"
