"""The HTTP service of a model: its paths, its limits, and its answers in JSON."""

import asyncio
import base64
import hmac
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import UploadFile

from vlm import __version__
from vlm.data.images.image import ImageError, load_image
from vlm.errors import UserError, printable
from vlm.inference.image_predictor import ImagePredictor
from vlm.inference.writing import Writer
from vlm.serving.engine import Engine, Full

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
        key: The key that each request has to bear, if any.
    """

    def __init__(self, engine: Engine, *, max_bytes: int, key: str | None) -> None:
        self.engine, self.max_bytes, self.key = engine, max_bytes, key
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

    async def predict(self, request: Request) -> dict[str, list[Any]]:
        """The results of an image or of several, in their order, and likewise of texts."""
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
        answers: list[Future] = self.engine.submit(inputs)
        results = await asyncio.gather(*map(asyncio.wrap_future, answers))
        self.answered += len(results)
        return {"results": [_plain(result) for result in results]}

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
            return [base64.b64decode(value, validate=True) for value in values] if name == "image" else list(values)
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


def _plain(result: Any) -> Any:
    if is_dataclass(result) and not isinstance(result, type):
        return asdict(result)
    if isinstance(result, Mapping):
        return dict(result)
    return [_plain(one) for one in result] if isinstance(result, list | tuple) else result


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="vlm", version=__version__, description=f"A model for {service.engine.predictor.task}.")
    guarded: dict[str, Any] = {"dependencies": [Depends(service.allow)]}
    body = {"requestBody": {"content": BODY, "required": True}}
    app.post("/predict", **guarded, openapi_extra=body)(service.predict)
    app.get("/metrics", **guarded, response_class=PlainTextResponse)(service.metrics)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "task": service.engine.predictor.task}

    @app.middleware("http")
    async def measured(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        start, code = time.monotonic(), 500
        try:
            response = await call_next(request)
            code = response.status_code
            return response
        finally:
            if request.url.path == "/predict":
                service.codes[code] += 1
                service.seconds += time.monotonic() - start

    def refusal(code: int, line: str) -> Response:
        headers = {"Retry-After": "1"} if code == 503 else None
        return Response(json.dumps({"detail": printable(line)}), code, headers, "application/json")

    app.exception_handler(Full)(lambda request, fault: refusal(503, "too many inputs wait; try again in a moment"))
    app.exception_handler(Exception)(lambda request, fault: refusal(500, "the model failed; its log says why"))
    app.exception_handler(UserError)(lambda request, fault: refusal(400, str(fault)))
    return app
