"""Puts `vlm serve` under hostile load: idle and slow connections, half bodies, large images, long texts, bad requests.

    python benchmarks/serving_load.py [--requests 10000] [--clients 32] [--attack 20]

`vlm serve` runs in its own process, on 127.0.0.1. Three parts each print their figures as JSON:

- idle: 600 connections that send nothing or a partial request line and header. Seconds until /health and a caption
  answer.
- attack: for some seconds, at once: large images of few bytes, half bodies of 30 MB, JSON of empty lists, chunked
  bodies of one byte per chunk, and good requests. The peak memory of the service, the longest good request, the longest
  of all.
- mixed: good requests and bad ones of several kinds, from many clients at once. A good one must be answered with its
  own caption and 200, or with 503 and Retry-After and then 200 on a retry.

With --text a text model is served, and long texts replace images.
"""

import argparse
import base64
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests" / "checkpoint" / "files"
IDLE = 600
HALF = 30_000_000  # Content-Length of a half body; only half of it is sent
PATIENCE = 150


@contextmanager
def run_service(checkpoint: Path | str, *options: str) -> Iterator[tuple[int, int]]:
    """Runs a service; yields its port and process id."""
    command = [sys.executable, "-m", "vlm", "serve", "-c", str(checkpoint), "--port", "0", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert port is not None, line
            yield int(port[1]), process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def ask(port: int, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict, Any]:
    """Returns status, answer and headers of a request; status 0 if the connection was closed."""
    http = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        http.request("POST", "/predict", body, headers or {})
        response = http.getresponse()
        return response.status, json.loads(response.read()), response.headers
    except (OSError, HTTPException, ValueError):
        return 0, {}, {}
    finally:
        http.close()


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.monotonic()
    result = call()
    return time.monotonic() - start, result


def healthy(port: int) -> bool:
    http = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        http.request("GET", "/health")
        return http.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        http.close()


def idle(port: int, body: bytes) -> dict[str, Any]:
    """Measures response times of a service while most connections are idle."""
    lines = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(IDLE)]
    try:
        for line in lines[::2]:
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: loc")
        health, good = time_call(lambda: healthy(port))
        caption, (status, _, _) = time_call(lambda: ask(port, body))
        return {"connections": IDLE, "health_s": health, "health": good, "caption_s": caption, "status": status}
    finally:
        for line in lines:
            line.close()


def peak_memory(pid: int) -> float:
    """Returns the peak resident memory of a process so far, in GB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / 1e9 if found else float("nan")


def large_images() -> list[bytes]:
    """Returns small files of images with up to 64 million pixels."""
    from PIL import Image

    files = []
    for form, size, more in (
        ("PNG", (8000, 8000), {}),
        ("GIF", (8000, 8000), {}),
        ("JPEG", (8000, 8000), {"progressive": True}),
        ("JPEG", (8000, 8000), {}),
        ("WEBP", (5700, 5700), {}),
        ("TIFF", (6000, 6000), {"compression": "tiff_deflate"}),
    ):
        file = io.BytesIO()
        Image.new("RGB", size, (200, 30, 30)).save(file, form, **more)
        files.append(file.getvalue())
    return files


def long_texts() -> list[bytes]:
    return [b"a red circle " * 79_000, b"x" * 1_000_000, b"a, b. " * 5_000_000, "\u4e00".encode() * 300_000]


def half_body(port: int, stop: threading.Event) -> None:
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {HALF}\r\n\r\n".encode()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
        line.sendall(head + bytes(HALF // 2))
        stop.wait(20)


def tiny_chunks(port: int, stop: threading.Event) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
        while not stop.is_set():
            line.sendall(head + b"1\r\nx\r\n" * 20_000)
            head = b""


def attack(port: int, pid: int, body: bytes, kind: str, bombs: list[bytes], *, seconds: float) -> dict[str, Any]:
    """Returns figures of a service under attack."""
    stop, waits, good = threading.Event(), Counter[str](), []
    JSON = {"Content-Type": "application/json"}

    def repeat(name: str, call: Callable[[], Any]) -> None:
        while not stop.is_set():
            wait, _ = time_call(call)
            waits[name] = max(waits[name], wait)

    def bomb() -> None:
        ask(port, random.choice(bombs))

    def lists() -> None:
        ask(port, b'{"%ss": [' % kind.encode() + b"[]," * 5_000_000 + b"[]]}", JSON)

    def ask_good() -> None:
        wait, (status, _, _) = time_call(lambda: ask(port, body))
        good.append((wait, status))
        time.sleep(0.2)

    def health() -> None:
        assert healthy(port)
        time.sleep(0.2)

    calls = [("bombs", bomb)] * 24 + [("lists", lists)] * 2 + [("half", lambda: half_body(port, stop))] * 24
    calls += [("chunks", lambda: tiny_chunks(port, stop))] * 8 + [("good", ask_good)] * 2 + [("health", health)]
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(repeat, *call) for call in calls]
        time.sleep(seconds)
        stop.set()
        for future in futures:
            future.result()
    return {
        "peak_GB": peak_memory(pid),
        "good": dict(Counter(status for _, status in good)),
        "good_longest_s": max(wait for wait, _ in good),
        "longest_s": dict(waits),
    }


def send_mixed(port: int, inputs: list[bytes], truth: list[Any], *, requests: int, clients: int) -> dict[str, Any]:
    """Counts answers to good and bad requests by outcome."""
    JSON, big = {"Content-Type": "application/json"}, b"IHDR" + b"\x00\x00\x40\x00" * 2 + b"\x08\x02\x00\x00\x00"
    big = b"\x89PNG\r\n\x1a\n\x00\x00\x00\r" + big + crc32(big).to_bytes(4, "big") + bytes(4) + b"IDAT\x35\xaf\x06\x1e"
    bad: list[tuple[bytes, dict[str, str], set[int]]] = [
        (b"", {}, {400}),
        (inputs[0][:100], {}, {400}),
        (big, {}, {413}),
        (b"{", JSON, {400}),
        (b"[" * 100_000, JSON, {400}),
        (b'{"image": 3}', JSON, {400}),
        (b"x", {"Content-Type": "multipart/form-data"}, {400}),
        (b"x", {"Content-Length": "99999999999"}, {413}),
        (b'{"image": "AAAA", "nonsense": 1}', JSON, {422}),
        (inputs[0], {"Origin": "http://example.org"}, {403}),
        (inputs[0], {"Host": "example.org"}, {421}),
    ]

    def leave() -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")

    def send_request(number: int) -> str:
        if number % 4 == 3:
            place = number // 4 % (len(bad) + 1)
            if place == len(bad):
                leave()
                return "left"
            body, headers, codes = bad[place]
            status, answer, _ = ask(port, body, headers)
            return "bad refused" if status in codes and "detail" in answer else f"bad {place} {status}"
        place = number % len(inputs)
        for attempt in range(20):
            if number % 2:
                content = json.dumps({"images": [base64.b64encode(inputs[place]).decode()]}).encode()
                status, answer, headers = ask(port, content, JSON)
            else:
                status, answer, headers = ask(port, inputs[place])
            if status == 200:
                right = answer["results"][0]["text"] == truth[place]
                return ("good" if not attempt else "good when tried again") if right else "answered for another"
            if status != 503 or "Retry-After" not in headers:
                return f"good {status}"
            time.sleep(float(headers["Retry-After"]))
        return "good always 503"

    with ThreadPoolExecutor(clients) as pool:
        seconds, counts = time_call(lambda: Counter(pool.map(send_request, range(requests))))
    return {**counts, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--attack", type=float, default=20, help="seconds")
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--queue", default="256")
    args = parser.parse_args()
    captioner = ROOT / "data" / "sample" / "captioner.ckpt"
    photos = [path.read_bytes() for path in sorted((ROOT / "data" / "sample").glob("*.png"))[:16]]
    if args.text:
        with run_service(FILES / "tagging.ckpt", "--queue", args.queue) as (port, pid):
            figures = attack(port, pid, b"a red circle", "text", long_texts(), seconds=args.attack)
            print(json.dumps({"attack": figures}))
        return
    with run_service(captioner, "--precision", "fp32", "--queue", args.queue) as (port, pid):
        print(json.dumps({"idle": idle(port, photos[0])}), flush=True)
        truth = [ask(port, photo)[1]["results"][0]["text"] for photo in photos]
        figures = send_mixed(port, photos, truth, requests=args.requests, clients=args.clients)
        print(json.dumps({"mixed": figures | {"captions": len({*truth})}}), flush=True)
        print(json.dumps({"attack": attack(port, pid, photos[0], "image", large_images(), seconds=args.attack)}))


if __name__ == "__main__":
    main()
