"""The HTTP server: timeouts and limits of connections, and the policy for web origins."""

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from types import FrameType
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server, ServerState

from vlm.errors import UserError

HEADER_TIMEOUT = 10.0  # seconds within which a header must be complete, and a response be read
IDLE_AGE = 1.0  # age in seconds from which a connection without a header counts as idle
SHUTDOWN_BODY_TIMEOUT = 2.0  # seconds within which a body must end when the service stops
SMALL_CHUNKS = 128  # chunks of a body that may be small
MEAN_CHUNK_BYTES = 256  # minimum mean size of further chunks


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


LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
# Wildcard hosts: address family, loopback address, and an outside address that is reserved for documentation.
ANY_ADDRESS = {
    "0.0.0.0": (socket.AF_INET, "127.0.0.1", "192.0.2.1"),
    "::": (socket.AF_INET6, "::1", "2001:db8::1"),
}


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


ANY_ORIGIN = "*"


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
