"""Listens on an address until a signal."""

import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

from vlm.errors import UserError

LOCAL = ("127.0.0.1", "::1", "localhost")


def listen(
    app: Any,
    *,
    host: str,
    port: int,
    line: str,
    connections: int,
    grace: int,
    ending: Callable[[], None] = lambda: None,
) -> int:
    """Serves an application until a signal; returns 128 and its number as the exit status.

    Args:
        host, port: The address.
        line: Printed once it listens, with a place for the port.
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
        sockets[0].listen(config.backlog)  # before the line below says so
    except SystemExit as fault:
        raise UserError(
            f"--host {host} --port {port}: cannot be listened on; choose another --{_wrong(host)}"
        ) from fault
    print(line.format(port=sockets[0].getsockname()[1]), flush=True)
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
