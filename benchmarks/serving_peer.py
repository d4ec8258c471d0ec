"""Compares requests a second of `vlm serve` and of llama.cpp's server in Python, on the same GGUF file.

    python benchmarks/serving_peer.py FILE.gguf PYTHON [--clients 1 4 16] [--rounds 3] [--precision int8]

PYTHON belongs to an environment with `llama-cpp-python[server]`. Both services run in processes of their own, with as
many threads, and take turns: in every round, each number of clients sends its requests to one and then to the other.
Requests are POST /v1/completions with prompts of different lengths, greedy, up to 32 tokens. For each number of clients
the medians over the rounds are printed: requests and tokens a second of both, and the ratio of requests (ours/theirs)
with its smallest and largest value.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from serving_load import PATIENCE, run_service

THREADS = os.cpu_count() or 1
TOKENS = 32  # at most, of a completion
START = 120  # seconds in which a service must answer
TEXTS = (
    "The capital of France is",
    "Write a short story about a dog and a cat who travel to the sea together. Once upon a time",
    "Water boils at",
    "A list of five fruits, five vegetables and five animals that live in Africa, each with its colour:",
)


@contextmanager
def served_by_llama_cpp(python: str, file: str) -> Iterator[int]:
    """Runs the other service; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "llama_cpp.server", "--model", file, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--n_threads", str(THREADS), "--n_ctx", "1024", "--interrupt_requests", "false", "--verbose", "false"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + START
        while time.monotonic() < end and process.poll() is None:
            try:
                complete(port, TEXTS[0])
                break
            except (OSError, HTTPException):
                time.sleep(0.2)
        else:
            process.kill()
            raise SystemExit(process.communicate()[1][-2000:])
        yield port
    finally:
        process.terminate()
        process.wait()


def complete(port: int, prompt: str) -> int:
    """Sends a request; returns the number of tokens of its answer."""
    http = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        http.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = http.getresponse()
        content = json.loads(response.read())
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {content}")
        return int(content["usage"]["completion_tokens"])
    finally:
        http.close()


def measure(port: int, clients: int, requests: int) -> tuple[float, float]:
    """Returns requests and tokens a second."""
    start = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        prompts = [f"{number}. {TEXTS[number % len(TEXTS)]}" for number in range(requests)]
        tokens = sum(pool.map(lambda prompt: complete(port, prompt), prompts))
    seconds = time.monotonic() - start
    return requests / seconds, tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("python")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    found: dict[int, list[tuple[tuple[float, float], tuple[float, float]]]] = {}
    with (
        run_service(options.file, "--precision", options.precision) as (ours, _),
        served_by_llama_cpp(options.python, options.file) as theirs,
    ):
        measure(ours, 16, 16)  # both have made the same calls before
        measure(theirs, 16, 16)
        for _ in range(options.rounds):
            for clients in options.clients:
                requests = max(8, 2 * clients)
                pair = measure(ours, clients, requests), measure(theirs, clients, requests)
                found.setdefault(clients, []).append(pair)
    for clients, pairs in found.items():
        ratios = [mine[0] / other[0] for mine, other in pairs]
        mine, other = ([median(pair[side][kind] for pair in pairs) for kind in (0, 1)] for side in (0, 1))
        print(f"{clients} clients: ours {mine[0]:.2f} requests/s and {mine[1]:.0f} tokens/s", end=", ")
        print(f"llama.cpp {other[0]:.2f} and {other[1]:.0f}", end="; ")
        print(f"ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
