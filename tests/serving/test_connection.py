"""Connections of a service: idle and slow ones close, and the oldest makes room for a new one."""

import socket
import time
from contextlib import suppress

import pytest
from services import running

pytest.importorskip("uvicorn")
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope, receive, send):
    """Answers once the body is complete."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def service(most: int):
    """The port of a service in this process."""
    from vlm.serving.server import Connection

    limits = {"limit_concurrency": most, "lifespan": "off"}
    return running(app, http=Connection, ws="none", log_level="error", **limits)


def connect(port: int, *sent: bytes) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=10)
    for part in sent:
        line.sendall(part)
    return line


def is_closed(line: socket.socket) -> bool:
    """Whether the service closes a connection without an answer."""
    with suppress(ConnectionError):
        return line.recv(100) == b""
    return True


def status(line: socket.socket) -> bytes:
    return line.recv(1000).split(b"\r\n")[0]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("vlm.serving.server.HEADER_TIMEOUT", 0.6)


def test_a_header_that_does_not_end_closes(short):
    with service(8) as port:
        silent, trickling = connect(port), connect(port, HEAD)
        start = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - start < 8:
                trickling.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() - start < 8
        assert is_closed(silent) and is_closed(trickling)


def test_the_header_of_a_second_request_has_its_time_too(short):
    with service(8) as port, connect(port, HEALTH) as line:
        assert b" 200 " in status(line)
        line.sendall(HEAD)
        assert is_closed(line)


def test_a_slow_body_and_a_second_request_are_left_alone(short):
    with service(8) as port, connect(port, HEAD + b"Content-Length: 4\r\n\r\nab") as line:
        time.sleep(0.9)
        line.sendall(b"cd")
        assert b" 200 " in status(line)
        time.sleep(0.1)
        line.sendall(HEALTH)
        assert b" 200 " in status(line)


def test_over_the_limit_the_oldest_idle_connection_closes(monkeypatch):
    """Those whose header is complete stay, and `/health` is answered whatever the others do."""
    monkeypatch.setattr("vlm.serving.server.IDLE_AGE", 0.1)
    with service(4) as port:
        body = connect(port, HEAD + b"Content-Length: 4\r\n\r\nab")
        lines = []
        for part in (b"", HEAD, b"", HEAD, HEAD):
            lines.append(connect(port, part))
            time.sleep(0.3)
        assert b" 200 " in status(connect(port, HEALTH))
        assert all(map(is_closed, lines[:3]))
        body.sendall(b"cd")
        assert b" 200 " in status(body)
        lines[-1].sendall(b"Content-Length: 0\r\n\r\n")
        assert b" 200 " in status(lines[-1])


def test_half_bodies_make_room_for_a_whole_request():
    with service(4) as port:
        halves = [connect(port, HEAD + b"Content-Length: 4\r\n\r\nab") for _ in range(12)]
        assert b" 200 " in status(connect(port, HEALTH))
        assert all(map(is_closed, halves[:8]))


@pytest.mark.parametrize(("size", "line"), [(1, b" 400 "), (1000, b" 200 ")])
def test_a_body_in_tiny_chunks_is_refused(size, line):
    """Each chunk takes time of all others; large ones may come in any number."""
    with service(4) as port:
        chunks = f"{size:x}\r\n".encode() + bytes(size) + b"\r\n"
        with connect(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as one, suppress(ConnectionError):
            one.sendall(chunks * 500)
            one.sendall(b"0\r\n\r\n")
            assert line in status(one)
        assert b" 200 " in status(connect(port, HEALTH))


def test_what_follows_an_answer_is_not_an_error(caplog):
    """An answer before the body has ended, and then bytes that are no chunks."""
    with service(4) as port, connect(port, HEALTH + b"\x00\xff\r\n\r\n") as line:
        assert b" 200 " in status(line)
    assert "Traceback" not in caplog.text


def test_a_body_that_hangs_does_not_hold_the_end_up(monkeypatch):
    monkeypatch.setattr("vlm.serving.server.SHUTDOWN_BODY_TIMEOUT", 0.2)
    with service(4) as port:
        line = connect(port, HEAD + b"Content-Length: 4\r\n\r\nab")
        time.sleep(0.2)
        start = time.monotonic()
    assert time.monotonic() - start < 3 and is_closed(line)
