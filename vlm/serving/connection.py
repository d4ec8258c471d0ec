"""Connections with a time limit for headers; a new connection closes the oldest idle one."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIME = 10.0  # seconds within which a header must end, and a written answer be read
NEW = 1.0  # age in seconds from which a connection without a header counts as idle
LAST_BODY = 2.0  # seconds within which a body must end when the service stops
SMALL_PIECES, PIECE = 128, 256  # pieces of a body that may be small, and the average bytes of further ones


class Pieces(h11.Connection):
    """The parser of a connection. It refuses bodies in tiny chunks, which each cost as much time as a large one."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._count = self._bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._count = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._count, self._bytes = self._count + 1, self._bytes + len(event.data)
            if self._count > SMALL_PIECES + self._bytes // PIECE:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class Connection(H11Protocol):
    """A connection of uvicorn that closes if a header does not arrive in time.

    At `limit_concurrency` of uvicorn's config, a new connection closes the oldest idle one, else the oldest with an
    incomplete request, else the oldest. uvicorn itself would answer 503 to the new one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Pieces()
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stage(self) -> int:
        """0 while waiting for a header, 1 for the rest of a body, 2 for an answer."""
        if self.cycle is None or self.cycle.response_complete:
            return 0
        return 1 if self.cycle.more_body else 2

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_header()
        others: Any = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if self._most is not None and len(others) >= self._most:
            min(others, key=self._place).transport.abort()

    def _place(self, other: "Connection") -> tuple[int, float]:
        """Returns the sort key of connections to close: first idle ones, then those that send, then the rest."""
        idle = other.stage == 0 and self.since - other.since > NEW
        return 0 if idle else 1 + (other.stage == 2), other.since

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        if self.cycle is cycle:  # no further request has arrived yet
            self._await_header()

    def _await_header(self) -> None:
        self.since = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEADER_TIME, self._give_up, 0)

    def _give_up(self, stage: int) -> None:
        if self.stage == stage:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer is under way
            self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        self._timer = self.loop.call_later(LAST_BODY, self._give_up, 1)
