"""Puts the endpoints for texts of `vlm serve` under hostile load: conversations and completions.

    python benchmarks/serving_texts.py [--requests 10000] [--clients 32] [--attack 20]

A small random model is served in its own process. Two parts each print their figures as JSON:

- mixed: good requests of several kinds, bad ones, and clients that leave in the middle of a stream, from many clients
  at once. A good one must be answered as if it were alone, or with 503 and Retry-After and then so on a retry.
- attack: for some seconds, at once: requests of as many tokens and log-probabilities as a request may have, whose
  clients leave, requests beyond the limits, and good requests. The peak memory of the service, and the longest request
  of each kind.
"""

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
from serving_load import PATIENCE, healthy, peak_memory, served, timed

WINDOW = 512  # tokens
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Request = tuple[str, dict[str, Any]]


def good_requests() -> list[Request]:
    """Returns requests of several kinds, each with its own answer."""
    found: list[Request] = []
    for number in range(8):
        messages = [{"role": "user", "content": f"a red dog number {number}"}]
        chat = {"messages": messages, "max_tokens": 6 + number % 3}
        text = {"prompt": f"two dogs run {number}", "max_tokens": 6, "temperature": 0}
        found += [
            (CHAT, {**chat, "temperature": 0}),
            (CHAT, {**chat, "seed": number, "temperature": 1, "n": 1 + number % 4}),
            (CHAT, {**chat, "temperature": 0, "logprobs": True, "top_logprobs": 3, "stream": True}),
            (COMPLETIONS, text),
            (COMPLETIONS, {**text, "prompt": [[5 + number, 9], [7, 8, 30 + number]], "echo": True, "logprobs": 1}),
            (COMPLETIONS, {**text, "frequency_penalty": 1, "logit_bias": {str(40 + number): 50}, "stream": True}),
        ]
    return found


BAD: list[tuple[Request, int]] = [
    ((CHAT, {}), 400),
    ((CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}), 400),
    ((CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 9}), 400),
    ((CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}), 400),
    ((CHAT, {"messages": [{"role": "user", "content": "a"}], "model": "gpt-9"}), 404),
    ((COMPLETIONS, {"prompt": [[10**9]]}), 400),
    ((COMPLETIONS, {"prompt": ["a"] * 1000}), 400),
    ((COMPLETIONS, {"prompt": [5] * 5000}), 400),
    ((COMPLETIONS, {"prompt": "a", "suffix": "b"}), 400),
    ((COMPLETIONS, {"prompt": ["a " * 400] * 200, "echo": True, "logprobs": 20, "max_tokens": 1}), 400),
    ((COMPLETIONS, {"prompt": "a", "logit_bias": {str(number): 1 for number in range(5000)}}), 400),
    (("/v1/responses", {"input": "a"}), 404),
]
# As many tokens and log-probabilities as a request may have.
LARGE: list[Request] = [
    (COMPLETIONS, {"prompt": ["a"] * 30, "n": 8, "max_tokens": 500, "temperature": 1}),
    (COMPLETIONS, {"prompt": [[5] * 400] * 60, "echo": True, "logprobs": 20, "max_tokens": 1}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 8, "max_tokens": 400, "logprobs": True}),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 100}], "n": 8, "max_tokens": 400, "stream": True}),
]


@contextmanager
def served_model(*options: str) -> Iterator[tuple[int, int]]:
    """Runs a service of a small random model that converses; yields its port and process id."""
    import torch
    from chats import saved_chat

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(5)
        saved_chat(folder, "chatml", room=WINDOW)
        with served(folder, "--precision", "fp32", *options) as service:
            yield service


def post(port: int, request: Request) -> tuple[int, Any, Any]:
    """Returns status, choices or error, and headers; status 0 if the connection was closed."""
    path, body = request
    http = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        http.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = http.getresponse()
        content = response.read()
        if response.status == 200 and body.get("stream"):
            return 200, join_stream(content.decode()), response.headers
        answer = json.loads(content)
        return response.status, answer.get("choices", answer.get("error")), response.headers
    except (OSError, HTTPException, ValueError):
        return 0, None, {}
    finally:
        http.close()


def join_stream(text: str) -> list[Any]:
    """Returns the text, the log-probabilities and the reason to end of each choice of a stream."""
    choices: dict[int, list[Any]] = {}
    for line in text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for part in json.loads(line.removeprefix("data: "))["choices"]:
            whole = choices.setdefault(part["index"], ["", [], None])
            whole[0] += part["text"] if "text" in part else part["delta"].get("content", "")
            whole[1] += (part["logprobs"] or {}).get("content", [])
            whole[2] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def leave(port: int, request: Request, seconds: float) -> None:
    """Sends a request and closes the connection after some time."""
    path, body = request
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
        line.sendall(head + content)
        time.sleep(seconds)


def is_same(answer: Any, truth: Any) -> bool:
    """Whether two answers are equal, apart from the rounding of log-probabilities."""
    if isinstance(answer, float) and isinstance(truth, float):
        return abs(answer - truth) < 1e-3
    if isinstance(answer, dict) and isinstance(truth, dict):
        return answer.keys() == truth.keys() and all(is_same(answer[key], truth[key]) for key in answer)
    if isinstance(answer, list) and isinstance(truth, list):
        return len(answer) == len(truth) and all(map(is_same, answer, truth))
    return answer == truth


def mixed(port: int, *, requests: int, clients: int) -> dict[str, Any]:
    """Counts answers to good and bad requests by outcome."""
    good = good_requests()
    truth = [post(port, request)[1] for request in good]

    def answer(number: int) -> str:
        if number % 4 == 3:
            place = number // 4 % (len(BAD) + 1)
            if place == len(BAD):
                leave(port, random.choice(good), 0.05)
                return "left"
            request, status = BAD[place]
            found, error, _ = post(port, request)
            named = isinstance(error, dict) and {*error} == {"message", "type", "param", "code"}
            return "bad refused" if (found, named) in ((status, True), (503, True)) else f"bad {place} {found}"
        place = number % len(good)
        for attempt in range(40):
            status, choices, headers = post(port, good[place])
            if status == 200:
                if is_same(choices, truth[place]):
                    return "good when tried again" if attempt else "good"
                return "answered for another"
            if status != 503 or "Retry-After" not in headers:
                return f"good {status}"
            time.sleep(float(headers["Retry-After"]))
        return "good always 503"

    with ThreadPoolExecutor(clients) as pool:
        seconds, counts = timed(lambda: Counter(pool.map(answer, range(requests))))
    return {**counts, "seconds": seconds}


def attack(port: int, pid: int, *, seconds: float) -> dict[str, Any]:
    """Returns figures of a service under attack."""
    stop, waits, statuses = threading.Event(), Counter[str](), Counter[int]()

    def repeat(kind: str) -> None:
        while not stop.is_set():
            if kind == "large":
                wait, _ = timed(lambda: leave(port, random.choice(LARGE), random.choice([0.1, 1, 3])))
            elif kind == "bad":
                wait, _ = timed(lambda: post(port, random.choice(BAD)[0]))
            elif kind == "health":
                wait, answered = timed(lambda: healthy(port))
                assert answered
                time.sleep(0.1)
            else:
                wait, (status, *_) = timed(lambda: post(port, (COMPLETIONS, {"prompt": "a", "max_tokens": 2})))
                statuses[status] += 1
                time.sleep(0.2)
            waits[kind] = max(waits[kind], wait)

    kinds = ["large"] * 12 + ["bad"] * 6 + ["good"] * 2 + ["health"]
    with ThreadPoolExecutor(len(kinds)) as pool:
        futures = [pool.submit(repeat, kind) for kind in kinds]
        time.sleep(seconds)
        stop.set()
        for future in futures:
            future.result()
    return {"peak_GB": peak_memory(pid), "good": dict(statuses), "longest_s": dict(waits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--attack", type=float, default=20, help="seconds")
    args = parser.parse_args()
    with served_model() as (port, pid):
        print(json.dumps({"mixed": mixed(port, requests=args.requests, clients=args.clients)}), flush=True)
        print(json.dumps({"attack": attack(port, pid, seconds=args.attack)}), flush=True)


if __name__ == "__main__":
    main()
