"""The HTTP service of a model: endpoints, authorization, streaming and error responses."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence, Set
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from vlm import __version__
from vlm.data.images.image import ImageTooLarge
from vlm.errors import UserError, printable
from vlm.inference.predictor import Predictor
from vlm.io.page import escape, page, table
from vlm.serving.chat import ChatReader
from vlm.serving.completion import CompletionReader
from vlm.serving.demo_forms import build_form
from vlm.serving.embeddings import EmbeddingReader, find_embedder
from vlm.serving.engine import (
    FAILED,
    HEADERS,
    MEDIA_TYPE,
    Engine,
    Job,
    QueueFullError,
    Results,
    make_update_queue,
    stream_events,
)
from vlm.serving.fields import check_model, format_error
from vlm.serving.generation import TextRequest
from vlm.serving.metrics import CONTENT_TYPE, Measurements, MetricsMiddleware
from vlm.serving.reader import RequestReader
from vlm.serving.replies import ChatFormatter, CompletionFormatter, ReplyFields, ReplyFormatter
from vlm.serving.server import ClientDisconnected, OriginPolicy, RequestBodyLimiter
from vlm.tasks.chat.completion import find_completion_predictor
from vlm.tasks.chat.predictor import TO_CHAT, ContextFullError, find_chat_predictor
from vlm.tasks.text_to_image.predict import encode_base64
from vlm.untrusted.sizes import JsonValue

BODY = {
    "image/*": {"schema": {"type": "string", "format": "binary"}},
    "multipart/form-data": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
    "application/json": {"schema": {"type": "object", "example": {"images": ["BASE64"]}}},
}
PATHS = {
    "/predict": "POST: predictions for images or texts",
    "/v1/chat/completions": "POST: chat completions",
    "/v1/completions": "POST: continuations of prompts",
    "/v1/embeddings": "POST: vectors of texts and images",
    "/v1/models": "the name of the model",
    "/health": "status and task of the service",
    "/metrics": "metrics for Prometheus",
    "/openapi.json": "OpenAPI schema of requests and responses",
}
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MODEL_PATHS = ("/predict", CHAT, COMPLETIONS, EMBEDDINGS)
# Endpoints of OpenAI that are not supported; {path} stands for any path.
UNSUPPORTED = ("/v1/responses", "/v1/responses/{path:path}", "/v1/audio/{path:path}", "/v1/images/{path:path}")
SEED_HEADER = "X-Vlm-Seed"
CHAT_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]}'
CLIENT_CLOSED_REQUEST = 499  # the client has closed the connection
log = logging.getLogger("vlm.serving")
T = TypeVar("T")


class Service:
    """Handles the requests of a service.

    Args:
        predictor: The model.
        defaults: Options of the task, unless a request sets them.
        rows: Number of inputs computed at the same time.
        max_queued: Maximum number of queued inputs.
        max_bytes: Maximum size of a request body.
        timeout: Seconds without a new token after which a request fails.
        key: The API key that each request must send, if any.
        origin_policy: The web origins whose pages may send requests.
        name: The name of the model in the chat API.
    Raises:
        UserError: The defaults do not fit the model.
    """

    def __init__(
        self,
        predictor: Predictor,
        defaults: Mapping[str, JsonValue],
        *,
        rows: int,
        max_queued: int,
        max_bytes: int,
        timeout: float,
        key: str | None,
        origin_policy: OriginPolicy,
        name: str = "vlm",
    ) -> None:
        self.predictor, self.timeout, self.key, self.origin_policy = predictor, timeout, key, origin_policy
        self.reader = RequestReader(predictor, defaults, rows)
        self.engine = Engine(predictor, rows=self.reader.rows, max_queued=max_queued)
        self.body_limiter = RequestBodyLimiter(max_bytes)
        self.name, self.created = name, int(time.time())
        chat, completion = find_chat_predictor(predictor), find_completion_predictor(predictor)
        self.chat = None if chat is None else ChatReader(chat, self.reader, name, max_prompts=max_queued)
        self.completion = (
            None if completion is None else CompletionReader(completion, self.reader, name, max_prompts=max_queued)
        )
        embedder = find_embedder(predictor)
        self.embedding = (
            None if embedder is None else EmbeddingReader(embedder, self.reader, name, max_images=max_queued)
        )
        self.measurements = Measurements(MODEL_PATHS)

    async def authorize(
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        """Rejects a request from a web page of another origin, or without the API key."""
        self.origin_policy.check(request.headers)
        token = "" if bearer is None else bearer.credentials
        if self.key is not None and not hmac.compare_digest(token.encode("latin-1"), self.key.encode()):
            raise HTTPException(401, "the key is missing or wrong; send Authorization: Bearer KEY")

    async def predict(self, request: Request) -> Response | Results:
        """Predictions for one or several images or texts, in their order.

        With `Accept: text/event-stream`, the response is a stream of events: one `token` for each generated token, with
        the text so far; then `result`, with the content of the response without streaming, or `error`.
        """
        for name in request.query_params:
            raise HTTPException(422, f"{name[:60]}: is a query parameter; send options as fields of a form or of JSON")
        async with self.body_limiter.read(request.headers, request.receive) as body:
            if self.engine.waiting >= self.engine.max_queued:
                raise QueueFullError
            kind, since = request.headers.get("content-type", ""), time.monotonic()  # also the loop's clock
            parsed = await self.reader.read(kind, body, most=self.engine.max_queued, deadline=since + self.timeout)
        if all(isinstance(content, UserError) for content in parsed.inputs):
            raise parsed.inputs[0]
        if MEDIA_TYPE in request.headers.get("accept", ""):
            on_tokens, updates = make_update_queue()
            jobs = self.engine.submit(parsed.inputs, parsed.options, on_tokens=on_tokens)
            tokenizer = getattr(self.predictor, "tokenizer", None)
            decode = str if tokenizer is None else tokenizer.decode
            stream = stream_events(jobs, updates, self._await_results(jobs, parsed.truncated, since), decode=decode)
            return StreamingResponse(stream, headers=HEADERS, media_type=MEDIA_TYPE)
        jobs = self.engine.submit(parsed.inputs, parsed.options)
        return await _cancel_on_disconnect(request, self._await_results(jobs, parsed.truncated, since))

    async def chat_completions(self, request: Request) -> Response:
        """The answers to a conversation: one object or, with `"stream": true`, a stream of events."""
        reader = self._require_chat()
        text_request, since = await self._read_texts(request, reader)
        formatter = ChatFormatter(self.name, text_request, reader.predictor)
        return await self._answer_texts(request, formatter, since)

    async def completions(self, request: Request) -> Response:
        """The continuations of prompts: one object or, with `"stream": true`, a stream of events."""
        if self.completion is None:
            raise HTTPException(404, self._explain_missing("complete texts"))
        text_request, since = await self._read_texts(request, self.completion)
        formatter = CompletionFormatter(self.name, text_request, self.completion.predictor)
        return await self._answer_texts(request, formatter, since)

    async def embeddings(self, request: Request) -> Response:
        """The vectors of texts, token ids and images."""
        reader = self.embedding
        if reader is None:
            raise HTTPException(404, self._explain_missing("embed"))
        async with self.body_limiter.read(request.headers, request.receive) as body:
            if self.engine.waiting >= self.engine.max_queued:
                raise QueueFullError
            deadline = time.monotonic() + self.timeout
            embedding_request = await reader.read(body, deadline=deadline)
        inputs, options, size = embedding_request.inputs, embedding_request.options, self.engine.max_queued
        use: dict[str, Any] = {"predictor": reader.embedder, "endpoint": EMBEDDINGS}

        async def embed_in_parts() -> list[Any]:
            vectors = list[Any]()
            for start in range(0, len(inputs), size):  # more inputs than the queue holds
                jobs = self.engine.submit(inputs[start : start + size], options, **use)
                vectors += (await self._await_results(jobs, set(), time.monotonic()))["results"]
            return vectors

        vectors = await _cancel_on_disconnect(request, embed_in_parts())
        content = await run_in_threadpool(reader.format_object, embedding_request, vectors)
        return Response(content, media_type="application/json")

    async def _read_texts(self, request: Request, reader: ChatReader | CompletionReader) -> tuple[TextRequest, float]:
        """Returns a request for texts, and the time at which it was complete, by `time.monotonic`.

        Raises:
            QueueFullError: The queue is full.
        """
        async with self.body_limiter.read(request.headers, request.receive) as body:
            if self.engine.waiting >= self.engine.max_queued:
                raise QueueFullError
            since = time.monotonic()
            return await reader.read(body, deadline=since + self.timeout), since

    async def _answer_texts(self, request: Request, formatter: ReplyFormatter, since: float) -> Response:
        text_request, predictor = formatter.request, formatter.predictor
        prompts, options = text_request.prompts, text_request.options
        headers = {SEED_HEADER: str(text_request.seed)}
        use: dict[str, Any] = {"predictor": predictor, "endpoint": request.url.path}
        if not text_request.stream:
            jobs = self.engine.submit(prompts, options, **use)
            result = await _cancel_on_disconnect(request, self._await_results(jobs, set(), since))
            # In a thread, because log-probabilities may be hundreds of thousands.
            content = await run_in_threadpool(formatter.format_json, cast(list[ReplyFields], result["results"]))
            return Response(content, headers=headers, media_type="application/json")
        on_tokens, updates = make_update_queue()
        jobs = self.engine.submit(prompts, options, on_tokens=on_tokens, **use)
        chunks = formatter.stream_chunks(jobs, updates, self._await_results(jobs, set(), since))
        return StreamingResponse(chunks, headers=HEADERS | headers, media_type=MEDIA_TYPE)

    async def refuse_path(self, request: Request) -> Response:
        """Answers that an endpoint of OpenAI is not supported."""
        use = CHAT if self.chat is not None else "/predict"
        raise HTTPException(404, f"{request.url.path[:60]}: not supported; use {use} (GET / lists the paths)")

    async def start_page(self, request: Request) -> HTMLResponse:
        """A page that lists the endpoints; it names the model only if clients need no key."""
        self.origin_policy.check(request.headers)
        name = self.name if self.key is None else "A service of vlm"
        unavailable = {
            CHAT: self.chat is None,
            COMPLETIONS: self.completion is None,
            EMBEDDINGS: self.embedding is None,
            "/v1/models": self.completion is None and self.embedding is None,
        }
        paths = {path: about for path, about in PATHS.items() if not unavailable.get(path)}
        form, url = build_form(self.predictor), str(request.base_url).rstrip("/")
        texts = [name for name in form.texts if name not in form.optional or name in ("text", "pair", "label")]
        fields = (["image=@photo.jpg"] if form.photos else []) + [f'{name}="..."' for name in texts]
        examples = [f"curl {' '.join(f'-F {field}' for field in fields)} {url}/predict"]
        if self.chat is not None:
            examples.append(f"curl --json '{CHAT_EXAMPLE}' {url}{CHAT}")
        body = [table(("path", "what"), paths.items()), "<pre>" + escape("\n".join(examples)) + "</pre>"]
        if self.chat is None:
            body.append(f"<p>There is no {CHAT}: {escape(self._explain_missing('chat'))}.</p>")
        return HTMLResponse(page(name, f"A model for {self.predictor.trained_task}.", body), headers=PAGE_HEADERS)

    async def models(self) -> dict[str, JsonValue]:
        """The models of the API."""
        return {"object": "list", "data": [await self.find_model(self.name)]}

    async def find_model(self, name: str) -> dict[str, JsonValue]:
        """The model of this name.

        Raises:
            HTTPException: There is no such model, or it supports none of conversations, completions and embeddings.
        """
        if self.completion is None and self.embedding is None:  # every model that converses completes texts
            raise HTTPException(404, self._explain_missing("chat"))
        check_model(name, self.name)
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "vlm"}

    def _require_chat(self) -> ChatReader:
        """Returns the reader of conversations.

        Raises:
            HTTPException: The model does not support them.
        """
        if self.chat is None:
            raise HTTPException(404, self._explain_missing("chat"))
        return self.chat

    def _explain_missing(self, use: str) -> str:
        """Returns the message for a model that does not support a use."""
        kind = "an image" if self.predictor.arguments.kind == "image" else "a text"
        line = f"a model for {self.predictor.trained_task} does not {use}; send {kind} to POST /predict (see GET /)"
        form = getattr(self.predictor, "form", None)
        return f"{line}; {TO_CHAT}" if use == "chat" and form is not None and form.can_chat else line

    async def _await_results(self, jobs: Sequence[Job], cut: Set[int], since: float) -> Results:
        """Awaits the answers of jobs; the answer to an invalid input is its error.

        Args:
            cut: Indices of truncated inputs.
            since: Time at which the request was complete, by `time.monotonic`.
        Raises:
            UserError: All inputs are invalid.
        """
        answers = asyncio.gather(*(asyncio.wrap_future(job.answer) for job in jobs), return_exceptions=True)
        answers.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs the fault
        try:
            while not (await asyncio.wait({answers}, timeout=self._remaining_seconds(jobs, since)))[0]:
                if self._remaining_seconds(jobs, since) <= 0:
                    raise HTTPException(503, f"no token for {self.timeout:g} seconds; try again", {"Retry-After": "1"})
            results = answers.result()
        finally:
            answers.cancel()
            self.engine.cancel(jobs)  # if the client has disconnected
        faults = [answer for answer in results if isinstance(answer, BaseException)]
        for fault in faults:
            if len(faults) == len(results) or not isinstance(fault, UserError):
                raise fault
        for job, result in zip(jobs, results, strict=True):
            if not isinstance(result, BaseException):
                self.measurements.observe_job(job)
        plain = list[Any]()
        for place, (result, job) in enumerate(zip(results, jobs, strict=True)):
            if isinstance(result, UserError):
                answer: Any = {"error": printable(str(result))}
            else:
                answer = _to_plain(result)
                for text, times in zip(answer if isinstance(answer, list) else [answer], job.times, strict=False):
                    text["times"] = times[: len(text["tokens"])]
            if place in cut and isinstance(answer, dict):
                answer["truncated"] = True
            plain.append(answer)
        return {"results": plain}

    def _remaining_seconds(self, jobs: Sequence[Job], since: float) -> float:
        """Returns the seconds until the request times out, since its last token or, without one, since its arrival."""
        return self.timeout + max((job.progress for job in jobs if job.times), default=since) - time.monotonic()

    def metrics(self) -> PlainTextResponse:
        """Metrics in the text format of Prometheus."""
        return PlainTextResponse(self.measurements.format(self.engine), media_type=CONTENT_TYPE)


async def _cancel_on_disconnect(request: Request, results: Awaitable[T]) -> T:
    """Awaits results; cancels them and raises ClientDisconnected if the client closes the connection."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, disconnect = asyncio.ensure_future(results), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnected
        return answer.result()
    finally:
        answer.cancel()
        disconnect.cancel()


def _to_plain(result: Any) -> Any:
    """Converts a result to JSON types."""
    if is_dataclass(result) and not isinstance(result, type):
        return asdict(result)
    if hasattr(result, "_asdict"):
        return result._asdict()
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, np.ndarray):
        return result.tolist()
    if isinstance(result, Image.Image):
        return encode_base64(result)
    return [_to_plain(item) for item in result] if isinstance(result, list | tuple) else result


def make_app(service: Service) -> FastAPI:
    """Builds the application of a service. FastAPI's documentation page is off: it loads scripts of other hosts."""
    about = f"A model for {service.predictor.trained_task}."
    app = FastAPI(title="vlm", version=__version__, description=about, openapi_url=None)
    guard = [Depends(service.authorize)]
    body = {"requestBody": {"content": BODY, "required": True}}
    streams: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}}
    results, fields = dict[str, list[Any]], dict[str, Any]
    app.post("/predict", dependencies=guard, response_model=results, responses=streams, openapi_extra=body)(
        service.predict
    )
    app.post(CHAT, dependencies=guard, response_model=fields, responses=streams)(service.chat_completions)
    app.post(COMPLETIONS, dependencies=guard, response_model=fields, responses=streams)(service.completions)
    app.post(EMBEDDINGS, dependencies=guard, response_model=fields)(service.embeddings)
    for path in UNSUPPORTED:
        app.api_route(path, methods=["GET", "POST", "DELETE"], dependencies=guard, include_in_schema=False)(
            service.refuse_path
        )
    app.get("/v1/models", dependencies=guard, response_model=fields)(service.models)
    app.get("/v1/models/{name:path}", dependencies=guard, response_model=fields)(service.find_model)
    app.get("/", include_in_schema=False)(service.start_page)
    app.get("/metrics", dependencies=guard, response_class=PlainTextResponse)(service.metrics)
    app.get("/openapi.json", dependencies=guard, include_in_schema=False)(app.openapi)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "task": service.predictor.trained_task}

    app.add_middleware(MetricsMiddleware, measurements=service.measurements)
    if service.origin_policy.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.origin_policy.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[SEED_HEADER],
        )

    def error_response(
        request: Request,
        status: int,
        line: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> Response:
        headers = {"Retry-After": "1"} if status == 503 else headers
        content: Mapping[str, JsonValue] = {"detail": printable(line)}
        if request.url.path.startswith("/v1/"):
            content = format_error(status, line, param=param, code=code)
        return Response(json.dumps(content), status, headers, "application/json")

    @app.exception_handler(ClientDisconnected)
    def answer_disconnect(request: Request, fault: ClientDisconnected) -> Response:
        log.info("client disconnected before the response: %s", request.client and request.client.host)
        return error_response(request, CLIENT_CLOSED_REQUEST, "the client closed the connection")

    @app.exception_handler(UserError)
    def answer_user_error(request: Request, fault: UserError) -> Response:
        status = 413 if isinstance(fault, ImageTooLarge) else 400
        code = "context_length_exceeded" if isinstance(fault, ContextFullError) else None
        return error_response(request, status, str(fault), code=code)

    @app.exception_handler(StarletteHTTPException)
    def answer_http_error(request: Request, fault: StarletteHTTPException) -> Response:
        path = request.url.path[:60]
        if fault.detail == "Not Found":  # of a path that the application does not have
            return error_response(request, 404, f"{path}: not found; GET / lists the paths")
        if fault.detail == "Method Not Allowed":
            allowed = (fault.headers or {}).get("Allow", "another method")
            line = f"{path}: {request.method} is not allowed; use {allowed}"
            return error_response(request, 405, line, fault.headers)
        names = {name: getattr(fault, name, None) for name in ("param", "code")}
        return error_response(request, fault.status_code, str(fault.detail), fault.headers, **names)

    busy = "the queue is full; try again later"
    app.exception_handler(QueueFullError)(lambda request, fault: error_response(request, 503, busy))
    app.exception_handler(Exception)(lambda request, fault: error_response(request, 500, FAILED))
    return app
