"""Reads request bodies within limits of time, size and total memory."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive

from vlm.machine import return_freed_memory


class Budget:
    """A resource that tasks share, such as memory: a semaphore with amounts. The smallest request is served first.

    Args:
        total: The total amount.
        slots: Maximum number of tasks that hold a part at the same time.
    """

    def __init__(self, total: int, *, slots: int) -> None:
        self.total, self.slots, self.used = total, slots, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._turns = count()

    @asynccontextmanager
    async def acquire(self, amount: int, *, deadline: float) -> AsyncIterator[None]:
        """Context that holds a part of the total amount.

        Args:
            deadline: Time at which a task stops waiting, by the event loop's clock.
        Raises:
            HTTPException: The deadline has passed.
        """
        amount = min(amount, self.total)
        ticket = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (amount, next(self._turns), ticket))
        self._grant()
        try:
            async with asyncio.timeout_at(deadline):
                await ticket
            yield
        except TimeoutError as fault:
            raise HTTPException(503, "too many inputs are being read; try again later", {"Retry-After": "1"}) from fault
        finally:
            if not ticket.cancelled():
                self.used, self.slots = self.used - amount, self.slots + 1
                self._grant()

    def _grant(self) -> None:
        while self._waiting:
            amount, _, ticket = self._waiting[0]
            if not ticket.done():
                if self.used + amount > self.total or not self.slots:
                    return
                self.used, self.slots = self.used + amount, self.slots - 1
                ticket.set_result(None)
            heappop(self._waiting)


BODY_TIMEOUT = 60.0  # seconds within which a body must arrive
STALL_TIME = 1.0  # seconds without PROGRESS_BYTES new bytes after which a body may be dropped
PROGRESS_BYTES = 2**16
BODIES_IN_MEMORY = 4  # all bodies together may take the memory of this many of the largest
RELEASE_AFTER = 2**26  # bytes of finished bodies, after which freed memory is returned to the system


class ClientDisconnected(Exception):
    """The client has closed its connection."""


@dataclass(eq=False)
class _IncomingBody:
    content: bytearray = field(default_factory=bytearray)
    size: int = 0
    step: int = 0  # bytes at the last progress
    progress: float = field(default_factory=time.monotonic)
    limit: asyncio.Timeout | None = None
    dropped: bool = False


class RequestBodyLimiter:
    """Reads request bodies, limits their size and their total memory.

    Args:
        most: Maximum size of a body, in bytes.
    """

    def __init__(self, most: int) -> None:
        self.max_bytes, self.max_total = most, BODIES_IN_MEMORY * most
        self.size = self._freed = 0
        self._incoming: set[_IncomingBody] = set()

    @asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[bytearray]:
        """Context with a complete body, which counts towards the total memory.

        Raises:
            HTTPException: The body is too large or not complete in time, or the total memory is in use.
            ClientDisconnected: The client closed the connection.
        """
        if int(headers.get("content-length", 0)) > self.max_bytes:
            raise self._too_large_error()
        body = _IncomingBody()
        try:
            await self._receive(body, receive)
            yield body.content
        finally:
            self._release(body)

    async def _receive(self, body: _IncomingBody, receive: Receive) -> None:
        self._incoming.add(body)
        try:
            async with asyncio.timeout(BODY_TIMEOUT) as body.limit:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    self._append(body, message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError as fault:
            if body.dropped:
                raise _overload_error() from fault
            raise HTTPException(408, f"the request body was not complete within {BODY_TIMEOUT:g} seconds") from fault
        finally:
            self._incoming.discard(body)

    def _append(self, body: _IncomingBody, part: bytes) -> None:
        if body.dropped:
            return
        if body.size + len(part) > self.max_bytes:
            raise self._too_large_error()
        while self.size + len(part) > self.max_total:
            self._drop_slowest()
        body.content += part
        body.size += len(part)
        self.size += len(part)
        if body.size - body.step >= PROGRESS_BYTES:
            body.step, body.progress = body.size, time.monotonic()

    def _drop_slowest(self) -> None:
        """Drops the incomplete body that has waited longest for its next bytes.

        Raises:
            HTTPException: All bodies are complete or make progress.
        """
        slowest = min((body for body in self._incoming if body.size), key=lambda body: body.progress, default=None)
        if slowest is None or slowest.limit is None or time.monotonic() - slowest.progress < STALL_TIME:
            raise _overload_error()
        self._incoming.discard(slowest)
        self._release(slowest)
        slowest.dropped = True
        slowest.limit.reschedule(asyncio.get_running_loop().time())

    def _release(self, body: _IncomingBody) -> None:
        self.size -= body.size
        self._freed += body.size
        body.content, body.size = bytearray(), 0
        if self._freed > RELEASE_AFTER:  # the C library keeps freed memory, as set by `vlm.machine`
            self._freed = 0
            return_freed_memory()

    def _too_large_error(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.max_bytes:,} bytes")


def _overload_error() -> HTTPException:
    return HTTPException(503, "too many requests are being received; try again later", {"Retry-After": "1"})
