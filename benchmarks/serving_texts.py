"""Puts OpenAI's endpoints of `vlm serve` under hostile load: conversations, completions and embeddings.

    python benchmarks/serving_texts.py [--requests 10000] [--clients 32] [--attack 20]

Two small models are served, one after the other, each in its own process: a language model that converses, and a dual
encoder that embeds texts and images. Two parts each print their figures as JSON:

- mixed: good requests of several kinds, bad ones, and clients that leave before the answer, from many clients at once.
  A good one must be answered as if it were alone, or with 503 and Retry-After and then so on a retry. Each vector must
  be that of the same text or image in a request of its own.
- attack: for some seconds, at once: requests as large as a request may be, whose clients leave, requests beyond the
  limits, and good requests. The peak memory of the service, and the longest request of each kind.
"""

import argparse
import base64
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
from serving_load import FILES, PATIENCE, healthy, large_images, peak_memory, run_service, time_call

WINDOW = 512  # tokens
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOLERANCE = 1e-4  # of log-probabilities and of the values of vectors, which depend on the batch
Request = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Load:
    """Requests for a service.

    Args:
        good: Requests of several kinds, each with its own answer.
        bad: Requests that are refused, with their status.
        large: Requests as large as a request may be.
    """

    good: list[Request]
    bad: list[tuple[Request, int]]
    large: list[Request]


def good_texts() -> list[Request]:
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


PATTERNS = [{"type": "string", "pattern": f"a{number}"} for number in range(40)]
BAD_TEXTS: list[tuple[Request, int]] = [
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
    ((COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}}), 400),
    ((COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"allOf": PATTERNS}}}), 400),
]
DATES = {f"field {number}": {"type": "string", "format": "date-time"} for number in range(900)}
LONG_SCHEMA = {"type": "object", "properties": DATES, "required": [*DATES]}
# As many tokens and log-probabilities as a request may have.
LARGE_TEXTS: list[Request] = [
    (COMPLETIONS, {"prompt": ["a"] * 30, "n": 8, "max_tokens": 500, "temperature": 1}),
    (COMPLETIONS, {"prompt": [[5] * 400] * 60, "echo": True, "logprobs": 20, "max_tokens": 1}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 8, "max_tokens": 400, "logprobs": True}),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 100}], "n": 8, "max_tokens": 400, "stream": True}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": LONG_SCHEMA}}),
]


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def good_embeddings() -> list[Request]:
    photos = [data_url(path.read_bytes()) for path in sorted((ROOT / "data" / "sample").glob("*.png"))[:8]]
    found: list[Request] = []
    for number, photo in enumerate(photos):
        text, tokens = f"a red dog number {number}", [2, 5 + number, 6, 3]
        mixed = ["a blue cross", photo, f"{number} circles and a small square", "two dogs"]
        several = [text * (1 + place % 3) + str(place) for place in range(20)]
        found += [(EMBEDDINGS, {"input": value}) for value in (text, [photo], mixed, tokens)]
        found += [(EMBEDDINGS, {"input": value, "encoding_format": "base64"}) for value in (several, [tokens[:2]] * 2)]
    return found


BAD_EMBEDDINGS: list[tuple[Request, int]] = [
    ((EMBEDDINGS, {}), 400),
    ((EMBEDDINGS, {"input": []}), 400),
    ((EMBEDDINGS, {"input": ["a", 1]}), 400),
    ((EMBEDDINGS, {"input": ["a", "dog " * 5000]}), 400),
    ((EMBEDDINGS, {"input": ["a"] * 2049}), 400),
    ((EMBEDDINGS, {"input": [10**9]}), 400),
    ((EMBEDDINGS, {"input": "a" * 2_000_000}), 413),
    ((EMBEDDINGS, {"input": [[]] * 2000}), 400),
    ((EMBEDDINGS, {"input": ["data:image/png;base64,AAAA"]}), 400),
    ((EMBEDDINGS, {"input": ["data:image/png;base64,AAAA"] * 2000}), 400),
    ((EMBEDDINGS, {"input": "a", "dimensions": 3}), 400),
    ((EMBEDDINGS, {"input": "a", "encoding_format": "int8"}), 400),
    ((EMBEDDINGS, {"input": "a", "model": "gpt-9"}), 404),
    ((CHAT, {"messages": [{"role": "user", "content": "a"}]}), 404),
    ((COMPLETIONS, {"prompt": "a"}), 404),
]


def large_embeddings() -> list[Request]:
    tokens = [[5 + number % 20] * 15 for number in range(2048)]
    inputs = [tokens, ["a red circle"] * 2048, ["dog " * 400_000], [[5] * 1_000_000], [[]] * 1_000_000]
    inputs += [[data_url(file)] for file in large_images()]
    return [(EMBEDDINGS, {"input": value, "encoding_format": "base64"}) for value in inputs]


@cache
def load_of_texts() -> Load:
    return Load(good_texts(), BAD_TEXTS, LARGE_TEXTS)


@cache
def load_of_embeddings() -> Load:
    return Load(good_embeddings(), BAD_EMBEDDINGS, large_embeddings())


@contextmanager
def served_embedder(*options: str) -> Iterator[tuple[int, int]]:
    """Runs a service of a small dual encoder; yields its port and process id."""
    with run_service(FILES / "contrastive.ckpt", "--precision", "fp32", *options) as service:
        yield service


@contextmanager
def served_model(*options: str) -> Iterator[tuple[int, int]]:
    """Runs a service of a small random model that converses; yields its port and process id."""
    import torch
    from chats import saved_chat

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(5)
        saved_chat(folder, "chatml", room=WINDOW)
        with run_service(folder, "--precision", "fp32", *options) as service:
            yield service


def post(port: int, request: Request) -> tuple[int, Any, Any]:
    """Returns status, choices, vectors or error, and headers; status 0 if the connection was closed."""
    path, body = request
    http = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        http.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = http.getresponse()
        content = response.read()
        if response.status == 200 and body.get("stream"):
            return 200, join_stream(content.decode()), response.headers
        answer = json.loads(content)
        if path == EMBEDDINGS and response.status == 200:
            return 200, [read_vector(item, place) for place, item in enumerate(answer["data"])], response.headers
        return response.status, answer.get("choices", answer.get("error")), response.headers
    except (OSError, HTTPException, ValueError):
        return 0, None, {}
    finally:
        http.close()


def read_vector(item: dict[str, Any], place: int) -> list[float]:
    """Returns the vector of an answer at a place; its values are read from base64 too."""
    vector = item["embedding"]
    if isinstance(vector, str):
        vector = [value for (value,) in struct.iter_unpack("<f", base64.b64decode(vector))]
    return vector if item["index"] == place else []


def answer_alone(port: int, request: Request) -> Any:
    """Returns the answer to a request when there is no other; vectors are those of requests with one input each."""
    path, body = request
    value = body.get("input")
    if path != EMBEDDINGS or isinstance(value, str) or isinstance(value[0], int):
        return post(port, request)[1]
    return [post(port, (path, {"input": item}))[1][0] for item in value]


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
    content = json.dumps(body if path == EMBEDDINGS else body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
        line.sendall(head + content)
        time.sleep(seconds)


def is_same(answer: Any, truth: Any) -> bool:
    """Whether two answers are equal, apart from the rounding of numbers."""
    if isinstance(answer, float) and isinstance(truth, float):
        return abs(answer - truth) < TOLERANCE
    if isinstance(answer, dict) and isinstance(truth, dict):
        return answer.keys() == truth.keys() and all(is_same(answer[key], truth[key]) for key in answer)
    if isinstance(answer, list) and isinstance(truth, list):
        return len(answer) == len(truth) and all(map(is_same, answer, truth))
    return answer == truth


def send_mixed(port: int, load: Load, *, requests: int, clients: int) -> dict[str, Any]:
    """Counts answers to good and bad requests by outcome."""
    good, bad = load.good, load.bad
    truth = [answer_alone(port, request) for request in good]

    def answer(number: int) -> str:
        if number % 4 == 3:
            place = number // 4 % (len(bad) + 1)
            if place == len(bad):
                leave(port, random.choice(good), 0.05)
                return "left"
            request, status = bad[place]
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
        seconds, counts = time_call(lambda: Counter(pool.map(answer, range(requests))))
    distinct = sum(not any(map(is_same, repeat(answer), truth[:place])) for place, answer in enumerate(truth))
    return {**counts, "distinct answers": distinct, "seconds": seconds}


def attack(port: int, pid: int, load: Load, *, seconds: float) -> dict[str, Any]:
    """Returns figures of a service under attack."""
    stop, waits, statuses = threading.Event(), Counter[str](), Counter[int]()

    def send(kind: str) -> None:
        while not stop.is_set():
            if kind == "large":
                wait, _ = time_call(lambda: leave(port, random.choice(load.large), random.choice([0.1, 1, 3])))
            elif kind == "bad":
                wait, _ = time_call(lambda: post(port, random.choice(load.bad)[0]))
            elif kind == "health":
                wait, answered = time_call(lambda: healthy(port))
                assert answered
                time.sleep(0.1)
            else:
                wait, (status, *_) = time_call(lambda: post(port, load.good[0]))
                statuses[status] += 1
                time.sleep(0.2)
            waits[kind] = max(waits[kind], wait)

    kinds = ["large"] * 12 + ["bad"] * 6 + ["good"] * 2 + ["health"]
    with ThreadPoolExecutor(len(kinds)) as pool:
        futures = [pool.submit(send, kind) for kind in kinds]
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
    for name, service, load in (
        ("texts", served_model, load_of_texts()),
        ("embeddings", served_embedder, load_of_embeddings()),
    ):
        with service() as (port, pid):
            figures = send_mixed(port, load, requests=args.requests, clients=args.clients)
            print(json.dumps({f"{name}, mixed": figures}), flush=True)
            print(json.dumps({f"{name}, attack": attack(port, pid, load, seconds=args.attack)}), flush=True)


if __name__ == "__main__":
    main()
