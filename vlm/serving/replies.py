"""Answers in OpenAI's format, of conversations and of completions: as one object, or as a stream of events."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import ClassVar, TypedDict, cast
from uuid import uuid4

from vlm.serving.engine import Job, JobAnswer, Results, Updates, describe_failure, stream_updates
from vlm.serving.fields import bad_request, format_error
from vlm.serving.generation import TextRequest
from vlm.serving.token_logprobs import format_completion_logprobs, format_content_logprobs, offsets_of
from vlm.tasks.chat.predictor import ChatPredictor, cut_at_stop, visible_text
from vlm.untrusted.sizes import JsonValue


class ReplyFields(TypedDict):
    """The fields of a `Reply` in a response."""

    text: str
    tokens: list[int]
    ended: bool


@dataclass
class _SentPart:
    """How much of a choice a stream has sent: characters, and tokens with their log-probabilities."""

    characters: int = 0
    tokens: int = 0
    begins: bool = True


class ReplyFormatter(ABC):
    """Formats the texts for a request as an object, or as a stream of chunks.

    Args:
        name: The name of the model.
        request: The request.
        predictor: The model.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, name: str, request: TextRequest, predictor: ChatPredictor) -> None:
        self.common_fields: dict[str, JsonValue] = {
            "id": f"{self.id_prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        self.request, self.predictor = request, predictor

    @abstractmethod
    def format_choice(self, place: int, text: str, span: tuple[int, int], *, begins: bool) -> dict[str, JsonValue]:
        """Returns a choice of an object, without the reason of its end.

        Args:
            place: Its index.
            text: Its text.
            span: First and last token, exclusive, whose log-probabilities are shown.
            begins: Whether the text is its beginning.
        """

    @abstractmethod
    def format_delta(
        self, place: int, text: str, span: tuple[int, int], *, begins: bool, ends: bool
    ) -> dict[str, JsonValue]:
        """Returns a choice of a chunk; arguments as in `format_choice`.

        Args:
            ends: Whether it is the last chunk of the choice.
        """

    def format_json(self, replies: Sequence[ReplyFields]) -> str:
        """Returns the texts as a JSON object."""
        _check_replies(replies)
        choices = list[JsonValue]()
        for place, reply in enumerate(replies):
            choice = self.format_choice(place, reply["text"], (0, self._count_shown(place, reply)), begins=True)
            choices.append({**choice, "finish_reason": _finish_reason(reply)})
        about: dict[str, JsonValue] = {"object": self.object_name, "choices": choices}
        return json.dumps({**self.common_fields, **about, "usage": self._token_usage(replies)})

    async def stream_chunks(
        self, jobs: Sequence[Job], updates: Updates, results: Awaitable[Results]
    ) -> AsyncIterator[str]:
        """Yields the texts as events, each with the new part of one; arguments as in `stream_events`."""
        stops = self.request.options.stop or ()
        sent = [_SentPart() for _ in self.request.prompts]
        try:
            for place in range(len(sent)):
                if begin := self.format_beginning(place):
                    yield self._format_chunk({**begin, "finish_reason": None})
            async with aclosing(stream_updates(jobs, updates, results)) as steps:
                async for step in steps:
                    if isinstance(step, tuple):
                        place, (tokens, *_) = step
                        text, ended = cut_at_stop(self.predictor.decode(tokens), stops)
                        text = text if ended else visible_text(text, stops)
                        scored = self.request.options.logprobs is not None
                        shown = count_tokens_within(self.predictor, tokens, text) if scored else 0
                        if part := self._format_part(place, sent[place], text, shown, ends=False):
                            yield self._format_chunk({**part, "finish_reason": None})
                    elif isinstance(step, JobAnswer):
                        place, reply = step.place, cast(ReplyFields, asdict(step.answer))
                        shown = self._count_shown(place, reply)
                        if part := self._format_part(place, sent[place], reply["text"], shown, ends=False):
                            yield self._format_chunk({**part, "finish_reason": None})
                        part = self._format_part(place, sent[place], reply["text"], shown, ends=True)
                        yield self._format_chunk({**part, "finish_reason": _finish_reason(reply)})
                    else:
                        replies = cast(list[ReplyFields], step["results"])
                        _check_replies(replies)
                        if self.request.include_usage:
                            about: dict[str, JsonValue] = {"object": self.chunk_name, "choices": []}
                            yield _format_event({**self.common_fields, **about, "usage": self._token_usage(replies)})
        except Exception as fault:
            yield _format_event(format_error(*describe_failure(fault)))
        yield "data: [DONE]\n\n"

    def format_beginning(self, place: int) -> dict[str, JsonValue]:
        """Returns the first chunk of a choice, sent before its first token; empty if there is none."""
        return {}

    def _format_part(self, place: int, sent: _SentPart, text: str, shown: int, *, ends: bool) -> dict[str, JsonValue]:
        """Returns the new part of a choice, empty if there is none, and notes it as sent."""
        scored = self.request.options.logprobs is not None and shown > sent.tokens
        if not (ends or len(text) > sent.characters or scored):
            return {}
        new, span = text[sent.characters :], (sent.tokens, max(shown, sent.tokens))
        part = self.format_delta(place, new, span, begins=sent.begins, ends=ends)
        sent.characters, sent.tokens, sent.begins = max(len(text), sent.characters), span[1], False
        return part

    def _count_shown(self, place: int, reply: ReplyFields) -> int:
        """Returns the number of tokens of a complete text: those of a stop text do not count."""
        text = self.predictor.decode(reply["tokens"])
        if text == reply["text"]:
            return self.count_all(place, reply)
        return count_tokens_within(self.predictor, reply["tokens"], reply["text"])

    def count_all(self, place: int, reply: ReplyFields) -> int:
        """Returns the number of tokens of a text that no stop text ended."""
        return len(reply["tokens"])

    def _format_chunk(self, choice: Mapping[str, JsonValue]) -> str:
        usage: dict[str, JsonValue] = {"usage": None} if self.request.include_usage else {}
        return _format_event({**self.common_fields, "object": self.chunk_name, "choices": [dict(choice)], **usage})

    def _token_usage(self, replies: Sequence[ReplyFields]) -> dict[str, JsonValue]:
        read = {id(prompt.tokens): len(prompt.tokens) for prompt in self.request.prompts}  # once for all its choices
        prompt_tokens, written = sum(read.values()), sum(len(reply["tokens"]) for reply in replies)
        total = prompt_tokens + written
        return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": total}


class ChatFormatter(ReplyFormatter):
    """Formats answers to a conversation."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def format_choice(self, place: int, text: str, span: tuple[int, int], *, begins: bool) -> dict[str, JsonValue]:
        message: dict[str, JsonValue] = {"role": "assistant", "content": text}
        return {"index": place, "message": message, "logprobs": self._format_logprobs(place, span)}

    def format_beginning(self, place: int) -> dict[str, JsonValue]:
        return {"index": place, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def format_delta(
        self, place: int, text: str, span: tuple[int, int], *, begins: bool, ends: bool
    ) -> dict[str, JsonValue]:
        if ends:
            return {"index": place, "delta": {}, "logprobs": None}
        return {"index": place, "delta": {"content": text}, "logprobs": self._format_logprobs(place, span)}

    def _format_logprobs(self, place: int, span: tuple[int, int]) -> JsonValue:
        if (top := self.request.options.logprobs) is None:
            return None
        scores = self.request.prompts[place].scores[slice(*span)]
        return format_content_logprobs(self.predictor.tokenizer, scores, shows_top=top > 0)


class CompletionFormatter(ReplyFormatter):
    """Formats continuations of prompts."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def format_choice(self, place: int, text: str, span: tuple[int, int], *, begins: bool) -> dict[str, JsonValue]:
        echoed = "" if self.request.echoed is None or not begins else self.request.echoed[place]
        return {"index": place, "text": echoed + text, "logprobs": self._format_logprobs(place, span, begins=begins)}

    def format_delta(
        self, place: int, text: str, span: tuple[int, int], *, begins: bool, ends: bool
    ) -> dict[str, JsonValue]:
        return self.format_choice(place, text, span, begins=begins)

    def count_all(self, place: int, reply: ReplyFields) -> int:
        """Returns the number of scored tokens, the end token included, as evaluation harnesses expect."""
        return max(len(reply["tokens"]), len(self.request.prompts[place].scores))

    def _format_logprobs(self, place: int, span: tuple[int, int], *, begins: bool) -> JsonValue:
        if self.request.options.logprobs is None:
            return None
        prompt, echoes = self.request.prompts[place], self.request.echoed
        scores = prompt.scores[slice(*span)]
        if not scores and not begins:
            return None  # of the last chunk
        tokenizer, before = self.predictor.tokenizer, "" if echoes is None else echoes[place]
        offsets = offsets_of(tokenizer, [score.token for score in prompt.scores[: span[1]]], first=len(before))
        offsets = offsets[span[0] :]
        if echoes is None or not begins:
            return format_completion_logprobs(tokenizer, scores, offsets)
        ahead = len(before) - len(self.predictor.decode(prompt.tokens))  # of a text to which a space was added
        read = [max(0, place + ahead) for place in offsets_of(tokenizer, prompt.tokens)]
        first = prompt.tokens[0]
        return format_completion_logprobs(tokenizer, [*prompt.prompt_scores, *scores], [*read, *offsets], first=first)


def count_tokens_within(predictor: ChatPredictor, tokens: Sequence[int], text: str) -> int:
    """Returns the number of tokens that begin within a text, which is the beginning of theirs."""
    all_text = b"".join(map(predictor.tokenizer.bytes_of, tokens)).decode("utf-8", "replace")
    decoded = predictor.decode(tokens)
    end = len(all_text) - len(decoded) + len(text)  # white space at the beginning is not shown
    return sum(offset < end for offset in offsets_of(predictor.tokenizer, tokens))


def _check_replies(replies: Sequence[Mapping[str, JsonValue] | ReplyFields]) -> None:
    """Raises the error of a choice that failed alone."""
    for reply in replies:
        if "error" in reply:
            raise bad_request(str(cast(Mapping[str, JsonValue], reply)["error"]))


def _finish_reason(reply: ReplyFields) -> str:
    return "stop" if reply["ended"] else "length"


def _format_event(content: Mapping[str, JsonValue]) -> str:
    return f"data: {json.dumps(content)}\n\n"
