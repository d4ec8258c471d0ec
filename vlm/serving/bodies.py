"""Reads request bodies within limits of time, size and total memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from vlm.tuning import return_freed_memory


class Budget:
    """An amount of which each user takes a part for a while. The smallest part is served first.

    Args:
        most: The total amount.
        places: Number of parts in use at the same time.
    """

    def __init__(self, most: int, *, places: int) -> None:
        self.most, self.places, self.used = most, places, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._turns = count()

    @asynccontextmanager
    async def take(self, amount: int, *, deadline: float) -> AsyncIterator[None]:
        """Holds a part of the amount.

        Args:
            deadline: When a request stops waiting, by the loop's clock.
        Raises:
            HTTPException: The deadline has passed.
        """
        amount = min(amount, self.most)
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (amount, next(self._turns), turn))
        self._grant()
        try:
            async with asyncio.timeout_at(deadline):
                await turn
            yield
        except TimeoutError as fault:
            raise HTTPException(503, "too many inputs wait to be read; try again", {"Retry-After": "1"}) from fault
        finally:
            if not turn.cancelled():
                self.used, self.places = self.used - amount, self.places + 1
                self._grant()

    def _grant(self) -> None:
        while self._waiting:
            amount, _, turn = self._waiting[0]
            if not turn.done():
                if self.used + amount > self.most or not self.places:
                    return
                self.used, self.places = self.used + amount, self.places - 1
                turn.set_result(None)
            heappop(self._waiting)


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
