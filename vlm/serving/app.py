"""The HTTP service of a model: its paths, its limits, and its answers in JSON."""

import asyncio
import base64
import hmac
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm import __version__
from vlm.data.images.image import ImageError, load_image
from vlm.errors import UserError, printable
from vlm.inference.image_predictor import ImagePredictor
from vlm.inference.writing import Writer
from vlm.serving.engine import Engine, Full
from vlm.serving.events import FAILED, HEADERS, MEDIA_TYPE, events
from vlm.serving.job import Job, Texts

PATIENCE = 60  # seconds for a body to come
BODY = {
    "image/*": {"schema": {"type": "string", "format": "binary"}},
    "multipart/form-data": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
    "application/json": {"schema": {"type": "object", "example": {"images": ["BASE64"]}}},
}


class Service:
    """The requests of a service, each as its inputs and its answer.

    Args:
        engine: The model.
        max_bytes: Size of the largest body.
        timeout: Seconds without a new token after which a request is given up.
        key: The key that each request has to bear, if any.
    """

    def __init__(self, engine: Engine, *, max_bytes: int, timeout: float, key: str | None) -> None:
        self.engine, self.max_bytes, self.timeout, self.key = engine, max_bytes, timeout, key
        self.codes: Counter[int] = Counter()
        self.seconds = 0.0
        self.answered = 0

    async def allow(
        self, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ):
        """Refuses a request without the key."""
        shown = "" if bearer is None else bearer.credentials
        if self.key is not None and not hmac.compare_digest(shown.encode("latin-1"), self.key.encode()):
            raise HTTPException(401, "the key is missing or wrong; send Authorization: Bearer KEY")

    async def predict(self, request: Request) -> Any:
        """The results of an image or of several, in their order, and likewise of texts.

        With `Accept: text/event-stream` they come as events: `token`, one a token as it is written, with the text so
        far; then `result`, with what is the answer otherwise, or `error`.
        """
        if self.engine.waiting >= self.engine.most:
            raise Full
        try:
            async with asyncio.timeout(PATIENCE):
                contents = await self._contents(Request(request.scope, self._limited(request.receive)))
        except TimeoutError as fault:
            raise HTTPException(408, f"the body did not come within {PATIENCE} seconds") from fault
        if not 0 < len(contents) <= self.engine.most:
            raise HTTPException(422, f"{len(contents)} inputs in a request; send 1 to {self.engine.most}")
        inputs = [await run_in_threadpool(self._input, content, place) for place, content in enumerate(contents, 1)]
        if MEDIA_TYPE in request.headers.get("accept", ""):
            return self._streamed(inputs)
        return await _unless_gone(request, self._results(self.engine.submit(inputs)))

    def _streamed(self, inputs: Sequence[Any]) -> Response:
        loop, grown = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def grow(place: int, texts: Texts) -> None:
            loop.call_soon_threadsafe(grown.put_nowait, (place, texts))

        jobs = self.engine.submit(inputs, grown=grow)
        decode = self.engine.predictor.tokenizer.decode if isinstance(self.engine.predictor, Writer) else str
        return StreamingResponse(
            events(jobs, grown, self._results(jobs), decode=decode), headers=HEADERS, media_type=MEDIA_TYPE
        )

    async def _results(self, jobs: Sequence[Job]) -> dict[str, list[Any]]:
        answers = asyncio.gather(*(asyncio.wrap_future(job.answer) for job in jobs))
        try:
            while not (await asyncio.wait({answers}, timeout=self._seconds_left(jobs)))[0]:
                if self._seconds_left(jobs) <= 0:
                    raise HTTPException(503, f"no token for {self.timeout:g} seconds; try again", {"Retry-After": "1"})
            results = answers.result()
        finally:
            answers.cancel()
            self.engine.leave(jobs)  # the others, where one failed or the client has gone
        self.answered += len(results)
        return {"results": [_answer(result, job) for result, job in zip(results, jobs, strict=True)]}

    def _seconds_left(self, jobs: Sequence[Job]) -> float:
        """Seconds until the request ends, unless one of its texts gets a token."""
        return self.timeout + max(job.progress for job in jobs) - time.monotonic()

    def _limited(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_bytes:
                raise HTTPException(413, f"the body has more than {self.max_bytes:,} bytes")
            return message

        return counted

    async def _contents(self, request: Request) -> Sequence[bytes | str]:
        """The inputs that a body holds: parts of a form, base64 or texts in JSON, or the body itself."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            parts = [part for _, part in (await request.form()).multi_items()]
            return [await part.read() if isinstance(part, UploadFile) else part for part in parts]
        body = await request.body()
        if kind != "application/json":
            return [body]
        name = "image" if isinstance(self.engine.predictor, ImagePredictor) else "text"
        try:
            content = json.loads(body)
            values = content[f"{name}s"] if f"{name}s" in content else [content[name]]
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise TypeError
            return [base64.b64decode(value, validate=True) for value in values] if name == "image" else values
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise HTTPException(400, f'the body is no JSON such as {{"{name}s": [...]}}, images in base64') from fault

    def _input(self, content: bytes | str, place: int) -> Any:
        """An input as the engine takes it.

        Raises:
            HTTPException: It is none.
        """
        try:
            if not isinstance(self.engine.predictor, ImagePredictor):
                text = content.decode() if isinstance(content, bytes) else content
                return text.encode().decode()  # halves of surrogate pairs, which JSON can say, are no text
            image = load_image(content.encode() if isinstance(content, str) else content)
        except ImageError as fault:
            raise HTTPException(400, str(fault).replace("<bytes>", f"image {place}", 1)) from fault
        except (UnicodeError, AttributeError) as fault:
            raise HTTPException(400, f"text {place}: is no text in UTF-8") from fault
        return self.engine.predictor.pixels(image) if isinstance(self.engine.predictor, Writer) else image

    def metrics(self) -> str:
        """Figures in the text format of Prometheus."""
        lines = ["# TYPE vlm_requests_total counter"]
        lines += [f'vlm_requests_total{{code="{code}"}} {count}' for code, count in sorted(self.codes.items())]
        figures = {
            "inputs_total": ("counter", self.answered),
            "request_seconds_sum": ("counter", round(self.seconds, 6)),
            "request_seconds_count": ("counter", sum(self.codes.values())),
            "waiting": ("gauge", self.engine.waiting),
            "running": ("gauge", self.engine.running),
        }
        for name, (kind, value) in figures.items():
            lines += [f"# TYPE vlm_{name} {kind}", f"vlm_{name} {value}"]
        return "\n".join(lines) + "\n"


async def _unless_gone(request: Request, results: Coroutine[Any, Any, Any]) -> Any:
    """Results for a client that waits for them; they are cancelled where it closes the connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, left = asyncio.ensure_future(results), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise HTTPException(499, "the client has gone")
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()


def _answer(result: Any, job: Job) -> Any:
    """A result as plain containers, its texts with the times of their tokens."""
    plain = _plain(result)
    for text, times in zip(plain if isinstance(plain, list) else [plain], job.times, strict=False):
        text["times"] = times[: len(text["tokens"])]
    return plain


def _plain(result: Any) -> Any:
    if is_dataclass(result) and not isinstance(result, type):
        return asdict(result)
    if isinstance(result, Mapping):
        return dict(result)
    return [_plain(one) for one in result] if isinstance(result, list | tuple) else result


class Measured:
    """Counts the answers of /predict by their status, and their seconds to the last byte."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, code = time.monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal code
            code = message.get("status", code)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            if scope.get("path") == "/predict":
                self.service.codes[code] += 1
                self.service.seconds += time.monotonic() - start


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="vlm", version=__version__, description=f"A model for {service.engine.predictor.task}.")
    guarded: dict[str, Any] = {"dependencies": [Depends(service.allow)]}
    body = {"requestBody": {"content": BODY, "required": True}}
    streams: dict[int | str, Any] = {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}}
    answers: dict[str, Any] = {"response_model": dict[str, list[Any]], "responses": streams}
    app.post("/predict", **guarded, **answers, openapi_extra=body)(service.predict)
    app.get("/metrics", **guarded, response_class=PlainTextResponse)(service.metrics)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "task": service.engine.predictor.task}

    app.add_middleware(Measured, service=service)

    def refusal(code: int, line: str) -> Response:
        headers = {"Retry-After": "1"} if code == 503 else None
        return Response(json.dumps({"detail": printable(line)}), code, headers, "application/json")

    app.exception_handler(Full)(lambda request, fault: refusal(503, "too many inputs wait; try again in a moment"))
    app.exception_handler(Exception)(lambda request, fault: refusal(500, FAILED))
    app.exception_handler(UserError)(lambda request, fault: refusal(400, str(fault)))
    return app
