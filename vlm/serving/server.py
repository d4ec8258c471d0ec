"""Listens on an address until a signal, with limits per connection and a policy for web origins."""

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlm.errors import UserError

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


LOCAL = ("127.0.0.1", "::1", "localhost")
# Hosts that stand for all addresses of this machine: family, loopback address, an address of another machine. The
# last are reserved for documentation.
ANY_ADDRESS = {
    "0.0.0.0": (socket.AF_INET, "127.0.0.1", "192.0.2.1"),
    "::": (socket.AF_INET6, "::1", "2001:db8::1"),
}


def urls(host: str) -> list[str]:
    """Returns the addresses at which a server that listens on a host is reached, with {port} for the port."""
    hosts = [host]
    if host in ANY_ADDRESS:
        family, loopback, outside = ANY_ADDRESS[host]
        hosts = [loopback]
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))  # sends nothing, but chooses the address from which packets would leave
            hosts.append(probe.getsockname()[0])
    return [f"http://{f'[{one}]' if ':' in one else one}:{{port}}" for one in dict.fromkeys(hosts)]


def listen(
    app: Any,
    *,
    host: str,
    port: int,
    lines: Sequence[str],
    connections: int,
    grace: int,
    ending: Callable[[], None] = lambda: None,
) -> int:
    """Serves an application until a signal; returns 128 and its number as the exit status.

    Args:
        host, port: The address.
        lines: Printed once it listens, with {port} for the port.
        connections: Most connections at a time; further ones close the oldest idle one.
        grace: Seconds after a signal in which earlier requests are still answered.
        ending: Called at the signal.
    Raises:
        UserError: The address cannot be listened on.
    """
    import uvicorn

    config = uvicorn.Config(
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

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            ending()
            super().handle_exit(sig, frame)

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    try:
        sockets = [config.bind_socket()]
        sockets[0].listen(config.backlog)  # before the lines below say so
    except SystemExit as fault:
        raise UserError(
            f"--host {host} --port {port}: cannot be listened on; choose another --{_wrong(host)}"
        ) from fault
    for line in lines:
        print(line.replace("{port}", str(sockets[0].getsockname()[1])), flush=True)
    # uvicorn raises a received signal again after it has stopped.
    before = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        Server(config).run(sockets=sockets)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return 128 + received[0] if received else 1


def _wrong(host: str) -> str:
    """Returns the option that is at fault if an address cannot be listened on."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return "port"
    except OSError:
        return "host"


ANY = "*"


class Sites:
    """The sites whose pages may send requests: a service's own, and others that are allowed.

    Args:
        local: Whether it listens only on this machine. It then answers only to names of this machine, because another
            site could let its own name resolve to this machine's address (DNS rebinding).
        origins: Further origins, such as https://example.org; "*" allows all.
    Raises:
        UserError: One is not an origin.
    """

    def __init__(self, *, local: bool, origins: Sequence[str] = ()) -> None:
        self.local, self.origins = local, tuple(origins)
        for origin in origins:
            host = re.fullmatch(r"[a-z]+://([^/?#@\s]+)", origin)
            if origin != ANY and (host is None or _name(host[1]) is None):
                raise UserError(f"--allow-origin {origin}: is not an origin; give one like https://example.org, or *")

    def check(self, headers: Headers) -> None:
        """Refuses a request by its Host and Origin.

        Raises:
            HTTPException: It comes from a page of another site, or has another host name.
        """
        if ANY in self.origins:
            return
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        names = (*LOCAL, *(urlsplit(one).hostname for one in self.origins))
        if self.local and _name(host) not in names:
            raise HTTPException(421, "ask by the address that the command printed")
        if origin is not None and origin not in self.origins and origin.lower().partition("://")[2] != host:
            raise HTTPException(403, "a page of another site may not ask")


def _name(host: str) -> str | None:
    """Returns a host without port and brackets; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
