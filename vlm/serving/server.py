"""The HTTP server: limits of connections and request bodies, and the policy for web origins."""

import asyncio
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count
from types import FrameType
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server, ServerState

from vlm.errors import UserError
from vlm.machine import return_freed_memory

HEADER_TIMEOUT = 10.0  # seconds within which a header must be complete, and a response be read
IDLE_AGE = 1.0  # age in seconds from which a connection without a header counts as idle
SHUTDOWN_BODY_TIMEOUT = 2.0  # seconds within which a body must end when the service stops
SMALL_CHUNKS = 128  # chunks of a body that may be small
MEAN_CHUNK_BYTES = 256  # minimum mean size of further chunks
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
# Wildcard hosts: address family, loopback address, and an outside address that is reserved for documentation.
ANY_ADDRESS = {
    "0.0.0.0": (socket.AF_INET, "127.0.0.1", "192.0.2.1"),
    "::": (socket.AF_INET6, "::1", "2001:db8::1"),
}
ANY_ORIGIN = "*"
BODY_TIMEOUT = 60.0  # seconds within which a body must arrive
STALL_TIME = 1.0  # seconds without PROGRESS_BYTES new bytes after which a body may be dropped
PROGRESS_BYTES = 2**16
BODIES_IN_MEMORY = 4  # all bodies together may take the memory of this many of the largest
RELEASE_AFTER = 2**26  # bytes of finished bodies, after which freed memory is returned to the system


class ChunkLimitParser(h11.Connection):
    """An HTTP parser that rejects bodies in tiny chunks, each of which takes as much time as a large one."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._count = self._bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._count = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._count, self._bytes = self._count + 1, self._bytes + len(event.data)
            if self._count > SMALL_CHUNKS + self._bytes // MEAN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class Phase(Enum):
    """What a connection waits for: the header of a request, the rest of its body, or the response."""

    HEADER = auto()
    BODY = auto()
    RESPONSE = auto()


class Connection(H11Protocol):
    """A connection of uvicorn that closes if a header does not arrive in time.

    At `limit_concurrency` of uvicorn's config, a new connection closes the oldest idle one, else the oldest with an
    incomplete request, else the oldest. uvicorn itself would answer 503 to the new one.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, str],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = ChunkLimitParser()
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> Phase:
        """What the connection waits for."""
        if self.cycle is None or self.cycle.response_complete:
            return Phase.HEADER
        return Phase.BODY if self.cycle.more_body else Phase.RESPONSE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()
        earlier = [item for item in self.connections if isinstance(item, Connection) and item is not self]
        earlier = [item for item in earlier if not item.transport.is_closing()]
        if self._max_connections is not None and len(earlier) >= self._max_connections:
            idle = [item for item in earlier if item.phase is Phase.HEADER and self.since - item.since > IDLE_AGE]
            min(idle or earlier, key=lambda item: (item.phase is Phase.RESPONSE, item.since)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        if self.cycle is cycle:  # no further request has arrived yet
            self._start_header_timer()

    def _start_header_timer(self) -> None:
        self.since = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEADER_TIMEOUT, self._abort_in_phase, Phase.HEADER)

    def _abort_in_phase(self, phase: Phase) -> None:
        if self.phase is phase:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # a response has begun
            self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        self._timer = self.loop.call_later(SHUTDOWN_BODY_TIMEOUT, self._abort_in_phase, Phase.BODY)


def reachable_urls(host: str) -> list[str]:
    """Returns the URLs of a server that listens on a host, with {port} for the port."""
    hosts = [host]
    if host in ANY_ADDRESS:
        family, loopback, outside = ANY_ADDRESS[host]
        hosts = [loopback]
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))  # sends nothing, but selects the source address of packets
            hosts.append(probe.getsockname()[0])
    return [f"http://{f'[{address}]' if ':' in address else address}:{{port}}" for address in dict.fromkeys(hosts)]


def listen(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    lines: Sequence[str],
    connections: int,
    grace: int,
    on_signal: Callable[[], None] = lambda: None,
) -> int:
    """Serves an application until a signal; returns 128 plus the signal number as the exit status.

    Args:
        host, port: The bind address.
        lines: Lines to print when the server listens, with {port} for the port.
        connections: Maximum number of connections; a further one closes the oldest idle one.
        grace: Seconds after a signal in which earlier requests are still answered.
        on_signal: Called at the signal.
    Raises:
        UserError: The address is not available.
    """
    config = Config(
        app,
        host=host,
        port=port,
        http=Connection,
        ws="none",
        log_level="error",
        limit_concurrency=connections,
        timeout_graceful_shutdown=grace,
    )
    received: list[int] = []

    class SignalServer(Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            on_signal()
            super().handle_exit(sig, frame)

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    listener = _bind_socket(config)
    for line in lines:
        print(line.replace("{port}", str(listener.getsockname()[1])), flush=True)
    # uvicorn raises a received signal again after it has stopped.
    before = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        SignalServer(config).run(sockets=[listener])
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return 128 + received[0] if received else 1


def _bind_socket(config: Config) -> socket.socket:
    """Returns a socket that listens on the address of a server.

    Raises:
        UserError: The address is not available.
    """
    host, port = config.host, config.port
    try:
        listener = config.bind_socket()
        listener.listen(config.backlog)  # before the command prints that it listens
        return listener
    except SystemExit as fault:
        option = "port"
        try:  # another port of the same host
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            option = "host"
        line = f"--host {host} --port {port}: address not available; choose another --{option}"
        raise UserError(line) from fault


class OriginPolicy:
    """The web origins whose pages may send requests: that of the service, and allowed ones.

    Args:
        local: Whether the service is reachable only from this machine. The Host header must then name this machine,
            because another site could make its own name resolve to this address (DNS rebinding).
        origins: Allowed CORS origins, such as https://example.org; "*" allows all.
    Raises:
        UserError: An origin is invalid.
    """

    def __init__(self, *, local: bool, origins: Sequence[str] = ()) -> None:
        self.local, self.origins = local, tuple(origins)
        for origin in origins:
            host = re.fullmatch(r"[a-z]+://([^/?#@\s]+)", origin)
            if origin != ANY_ORIGIN and (host is None or _parse_hostname(host[1]) is None):
                remedy = "give an origin such as https://example.org, or *"
                raise UserError(f"--allow-origin {origin}: is not an origin; {remedy}")

    def check(self, headers: Headers) -> None:
        """Rejects a request by its Host and Origin headers.

        Raises:
            HTTPException: The origin is not allowed, or the host name is not one of this machine.
        """
        if ANY_ORIGIN in self.origins:
            return
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        names = (*LOCAL_HOSTS, *(urlsplit(origin).hostname for origin in self.origins))
        if self.local and _parse_hostname(host) not in names:
            raise HTTPException(421, "unknown host name; use the address that the command printed")
        if origin is not None and origin not in self.origins and origin.lower().partition("://")[2] != host:
            raise HTTPException(403, "requests from other origins are rejected")


def _parse_hostname(host: str) -> str | None:
    """Returns a host without port and brackets; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


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
