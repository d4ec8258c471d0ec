"""Answers as server-sent events: one per token, then one with all results or a fault."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException

from vlm.errors import UserError, printable
from vlm.serving.job import Job, Texts

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # so that no proxy buffers events
FAILED = "the model failed; its log says why"


async def events(
    jobs: Sequence[Job],
    grown: asyncio.Queue[tuple[int, Texts] | None],
    results: Coroutine[Any, Any, Any],
    *,
    decode: Callable[[Sequence[int]], str],
) -> AsyncIterator[str]:
    """Yields the events of some jobs; cancels the results if closed early.

    Args:
        grown: Places of jobs whose texts have grown, with the texts.
        results: Awaits the jobs' answers and returns the content of the last event.
        decode: Converts tokens to text.
    """
    known: Counter[tuple[int, int]] = Counter()
    try:
        async with aclosing(growth(grown, results)) as steps:
            async for step in steps:
                if not isinstance(step, tuple):
                    yield _event("result", step)
                    continue
                place, texts = step
                for number, tokens in enumerate(texts):
                    for at in range(known[place, number], len(tokens)):
                        # The bytes of a character may span tokens.
                        text, seconds = decode(tokens[: at + 1]).rstrip("\ufffd"), jobs[place].times[number][at]
                        about = {"input": place, "result": number, "token": tokens[at], "text": text}
                        yield _event("token", about | {"seconds": seconds})
                    known[place, number] = len(tokens)
    except (UserError, HTTPException) as fault:
        line = fault.detail if isinstance(fault, HTTPException) else str(fault)
        yield _event("error", {"detail": printable(line)})
    except Exception as fault:
        logging.getLogger("uvicorn.error").error("%s", FAILED, exc_info=fault)
        yield _event("error", {"detail": FAILED})


async def growth(
    grown: asyncio.Queue[tuple[int, Texts] | None], results: Coroutine[Any, Any, Any]
) -> AsyncGenerator[tuple[int, Texts] | dict[str, Any]]:
    """Yields the items of `grown`, then the results; cancels these if closed early."""
    task = asyncio.ensure_future(results)
    task.add_done_callback(lambda _: grown.put_nowait(None))
    try:
        while (growing := await grown.get()) is not None:
            yield growing
        yield task.result()
    finally:
        task.cancel()


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
