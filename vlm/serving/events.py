"""Answers as server-sent events: an event a token as it comes, then one with all results, or with a fault."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import HTTPException

from vlm.errors import UserError, printable
from vlm.serving.job import Job, Texts

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # so that no proxy holds events back
FAILED = "the model failed; its log says why"


async def events(
    jobs: Sequence[Job],
    grown: asyncio.Queue[tuple[int, Texts] | None],
    results: Coroutine[Any, Any, Any],
    *,
    decode: Callable[[Sequence[int]], str],
) -> AsyncIterator[str]:
    """The events of some jobs. One that is closed early cancels the results.

    Args:
        grown: Places of jobs whose texts have grown, with the texts.
        results: Waits for the answers of the jobs, and makes what the last event holds.
        decode: The text of tokens.
    """
    task = asyncio.ensure_future(results)
    task.add_done_callback(lambda _: grown.put_nowait(None))
    known: Counter[tuple[int, int]] = Counter()
    try:
        while (growth := await grown.get()) is not None:
            place, texts = growth
            for number, tokens in enumerate(texts):
                for at in range(known[place, number], len(tokens)):
                    # The bytes of a character may be spread over tokens.
                    text, seconds = decode(tokens[: at + 1]).rstrip("\ufffd"), jobs[place].times[number][at]
                    about = {"input": place, "result": number, "token": tokens[at], "text": text, "seconds": seconds}
                    yield _event("token", about)
                known[place, number] = len(tokens)
        yield _event("result", task.result())
    except (UserError, HTTPException) as fault:
        line = fault.detail if isinstance(fault, HTTPException) else str(fault)
        yield _event("error", {"detail": printable(line)})
    except Exception as fault:
        logging.getLogger("uvicorn.error").error("%s", FAILED, exc_info=fault)
        yield _event("error", {"detail": FAILED})
    finally:
        task.cancel()


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
