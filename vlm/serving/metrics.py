"""Measurements of a service for Prometheus: requests, tokens, the queue and the KV cache of each endpoint."""

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm.serving.engine import Engine, Job

# Of the format of https://prometheus.io/docs/instrumenting/exposition_formats/
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SEND_TIME = 60.0  # seconds within which a client must accept each part of a response
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
RATES = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)  # tokens per second
Labels = Mapping[str, str]


class Histogram:
    """Counts of values up to some limits, for each endpoint.

    Args:
        name, about: Its name and description.
        limits: Upper limits of the buckets, inclusive.
    """

    def __init__(self, name: str, about: str, limits: Sequence[float]) -> None:
        self.name, self.about, self.limits = name, about, limits
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0] * (1 + len(limits)))
        self._sums: dict[str, float] = defaultdict(float)

    def observe(self, endpoint: str, value: float) -> None:
        """Counts a value."""
        self._counts[endpoint][bisect_left(self.limits, value)] += 1
        self._sums[endpoint] += value

    def lines(self) -> Iterator[str]:
        """Yields its lines in the format of Prometheus."""
        yield from _format_head(self.name, "histogram", self.about)
        names = [*(f"{limit:g}" for limit in self.limits), "+Inf"]
        for endpoint, counts in sorted(self._counts.items()):
            for limit, count in zip(names, accumulate(counts), strict=True):
                yield _format_sample(f"{self.name}_bucket", {"endpoint": endpoint, "le": limit}, count)
            yield _format_sample(f"{self.name}_sum", {"endpoint": endpoint}, round(self._sums[endpoint], 6))
            yield _format_sample(f"{self.name}_count", {"endpoint": endpoint}, sum(counts))


def _format_head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _format_sample(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value}"


class Measurements:
    """What a service has measured.

    Args:
        endpoints: The paths that run the model.
    Attributes:
        requests: Number of requests by endpoint and HTTP status.
    """

    def __init__(self, endpoints: Collection[str]) -> None:
        self.endpoints = endpoints
        self.requests: Counter[tuple[str, int]] = Counter()
        self._inputs: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._request_seconds = Histogram(
            "vlm_request_seconds", "Seconds from the beginning of a request to the end of its response.", SECONDS
        )
        self._first_token = Histogram(
            "vlm_time_to_first_token_seconds",
            "Seconds from acceptance into the queue to the first token of a text.",
            SECONDS,
        )
        self._rate = Histogram(
            "vlm_tokens_per_second", "Tokens per second of a text after its first token; not of beam search.", RATES
        )

    def observe_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Counts a request whose response has ended."""
        self.requests[endpoint, status] += 1
        self._request_seconds.observe(endpoint, seconds)

    def observe_job(self, job: Job) -> None:
        """Counts an input that was answered, and the times of its tokens."""
        self._inputs[job.endpoint] += 1
        for times in job.times:
            if times:
                self._tokens[job.endpoint] += len(times)
                self._first_token.observe(job.endpoint, times[0])
            if len(times) > 1 and times[-1] > times[0]:  # beam search has the time of the end for all
                self._rate.observe(job.endpoint, (len(times) - 1) / (times[-1] - times[0]))

    def format(self, engine: Engine) -> str:
        """Returns all measurements in the format of Prometheus."""
        lines = _format_head("vlm_requests_total", "counter", "Requests by endpoint and HTTP status.")
        for (endpoint, status), count in sorted(self.requests.items()):
            lines.append(_format_sample("vlm_requests_total", {"endpoint": endpoint, "code": str(status)}, count))
        lines += self._request_seconds.lines()
        lines += self._format_counts("vlm_inputs_total", "counter", "Inputs that were answered.", self._inputs)
        lines += self._format_counts("vlm_tokens_total", "counter", "Tokens that were generated.", self._tokens)
        lines += [*self._first_token.lines(), *self._rate.lines()]
        waiting, running = engine.list_waiting(), engine.list_running()
        lines += self._format_counts("vlm_waiting", "gauge", "Inputs in the queue.", _count_jobs(waiting))
        lines += self._format_counts("vlm_running", "gauge", "Inputs that the model computes.", _count_jobs(running))
        cached = Counter[str]()
        for job in running:
            cached[job.endpoint] += job.count_cached_tokens()
        about = "Tokens of running inputs in the KV cache: those of prompts with their images, and generated ones."
        lines += self._format_counts("vlm_cache_tokens", "gauge", about, cached)
        lines += _format_head("vlm_queue_capacity", "gauge", "Maximum number of inputs in the queue.")
        lines.append(f"vlm_queue_capacity {engine.max_queued}")
        return "\n".join(lines) + "\n"

    def _format_counts(self, name: str, kind: str, about: str, counts: Counter[str]) -> list[str]:
        samples = [_format_sample(name, {"endpoint": endpoint}, counts[endpoint]) for endpoint in self.endpoints]
        return [*_format_head(name, kind, about), *samples]


def _count_jobs(jobs: Iterable[Job]) -> Counter[str]:
    return Counter(job.endpoint for job in jobs)


class MetricsMiddleware:
    """ASGI middleware that measures requests, and limits the time in which a client must accept each part.

    Args:
        measurements: Where requests to its endpoints are counted.
    """

    def __init__(self, app: ASGIApp, measurements: Measurements) -> None:
        self.app, self.measurements = app, measurements

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = time.monotonic(), 500

        async def send_in_time(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            async with asyncio.timeout(SEND_TIME):
                await send(message)

        try:
            await self.app(scope, receive, send_in_time)
        finally:
            if scope.get("path") in self.measurements.endpoints:
                self.measurements.observe_request(scope["path"], status, time.monotonic() - start)
