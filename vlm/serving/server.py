"""Listens on an address until a signal."""

import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from vlm.errors import UserError

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

    from vlm.serving.connection import Connection

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
