"""Reads request bodies within limits of time, size and total memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from vlm.tuning import return_freed_memory

PATIENCE = 60.0  # seconds within which a body must arrive
STALLED = 1.0  # seconds without STEP new bytes after which a body may be dropped for others
STEP = 2**16
TOGETHER = 4  # all bodies together may take the memory of this many of the largest
KEPT = 2**26  # bytes of finished bodies, after which freed memory is returned to the system

Receive = Callable[[], Awaitable[Any]]


class Gone(Exception):
    """The client has closed its connection."""


@dataclass(eq=False)
class _Coming:
    content: bytearray = field(default_factory=bytearray)
    size: int = 0
    step: int = 0  # bytes at the last progress
    progress: float = field(default_factory=time.monotonic)
    limit: asyncio.Timeout | None = None
    displaced: bool = False


class Bodies:
    """The request bodies in a service's memory.

    Args:
        most: Bytes of the largest.
    """

    def __init__(self, most: int) -> None:
        self.most, self.together = most, TOGETHER * most
        self.size = self._freed = 0
        self._coming: set[_Coming] = set()

    @asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[bytearray]:
        """Context with a complete body, which counts towards the total.

        Raises:
            HTTPException: It is too large, does not arrive in time, or there is no room for it.
            Gone: The client closed the connection.
        """
        if int(headers.get("content-length", 0)) > self.most:
            raise self._too_large()
        coming = _Coming()
        try:
            await self._complete(coming, receive)
            yield coming.content
        finally:
            self._release(coming)

    async def _complete(self, coming: _Coming, receive: Receive) -> None:
        self._coming.add(coming)
        try:
            async with asyncio.timeout(PATIENCE) as coming.limit:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    self._add(coming, message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError as fault:
            if coming.displaced:
                raise _no_room() from fault
            raise HTTPException(408, f"the body did not come within {PATIENCE:g} seconds") from fault
        finally:
            self._coming.discard(coming)

    def _add(self, coming: _Coming, part: bytes) -> None:
        if coming.displaced:
            return
        if coming.size + len(part) > self.most:
            raise self._too_large()
        while self.size + len(part) > self.together:
            self._displace()
        coming.content += part
        coming.size += len(part)
        self.size += len(part)
        if coming.size - coming.step >= STEP:
            coming.step, coming.progress = coming.size, time.monotonic()

    def _displace(self) -> None:
        """Drops the body that has waited longest for its next bytes.

        Raises:
            HTTPException: All are complete or make progress.
        """
        slowest = min((one for one in self._coming if one.size), key=lambda one: one.progress, default=None)
        if slowest is None or slowest.limit is None or time.monotonic() - slowest.progress < STALLED:
            raise _no_room()
        self._coming.discard(slowest)
        self._release(slowest)
        slowest.displaced = True
        slowest.limit.reschedule(asyncio.get_running_loop().time())

    def _release(self, body: _Coming) -> None:
        self.size -= body.size
        self._freed += body.size
        body.content, body.size = bytearray(), 0
        if self._freed > KEPT:  # the C library keeps freed memory, as set by `vlm.tuning`
            self._freed = 0
            return_freed_memory()

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.most:,} bytes")


def _no_room() -> HTTPException:
    return HTTPException(503, "too many requests are being received; try again in a moment", {"Retry-After": "1"})
