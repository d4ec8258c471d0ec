"""The HTTP service of a model: paths, limits, and answers in JSON."""

import asyncio
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm import __version__
from vlm.data.images.image import ImageTooLarge
from vlm.errors import UserError, printable
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import resolve, tasks_of
from vlm.io.page import escape, page, table
from vlm.serving.bodies import Bodies, Gone
from vlm.serving.chat import Answer, ChatReader, error
from vlm.serving.demo_forms import form_of
from vlm.serving.engine import FAILED, HEADERS, MEDIA_TYPE, Engine, Full, Job, Texts, events
from vlm.serving.reader import Read, Reader
from vlm.serving.server import Sites
from vlm.tasks.chat.predictor import TO_CHAT

BODY = {
    "image/*": {"schema": {"type": "string", "format": "binary"}},
    "multipart/form-data": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
    "application/json": {"schema": {"type": "object", "example": {"images": ["BASE64"]}}},
}
PATHS = {
    "/predict": "results, by POST",
    "/v1/chat/completions": "answers in conversations, by POST",
    "/v1/models": "the name of the model",
    "/health": "whether the service runs, and its task",
    "/metrics": "figures for Prometheus",
    "/openapi.json": "what requests and answers hold, in OpenAPI",
}
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
SEND_TIME = 60.0  # seconds within which a client must accept each part of its answer
CHAT = "/v1/chat/completions"
GONE = 499  # the client has closed the connection
log = logging.getLogger("vlm.serving")


class Service:
    """Handles the requests of a service.

    Args:
        predictor: The model.
        defaults: Options of the task, unless a request sets them.
        rows: Inputs at a time.
        most: Inputs that may wait.
        max_bytes: Size of the largest body.
        timeout: Seconds without a new token after which a request fails.
        key: The key that each request must send, if any.
        sites: The sites whose pages may send requests.
        name: The name of the model, for clients of conversations.
    Raises:
        UserError: The defaults do not fit the model.
    """

    def __init__(
        self,
        predictor: Predictor,
        defaults: Mapping[str, Any],
        *,
        rows: int,
        most: int,
        max_bytes: int,
        timeout: float,
        key: str | None,
        sites: Sites,
        name: str = "vlm",
    ) -> None:
        self.predictor, self.timeout, self.key, self.sites = predictor, timeout, key, sites
        self.reader = Reader(predictor, defaults, rows)
        self.engine = Engine(predictor, rows=self.reader.rows, most=most)
        self.bodies = Bodies(max_bytes)
        self.name, self.since = name, int(time.time())
        chat = tasks_of("chat").get(predictor.task)
        kind: Any = None if chat is None else resolve(chat.predictor)
        self.chat = None if kind is None else ChatReader(kind.around(predictor), self.reader, name)
        self.codes: Counter[int] = Counter()
        self.seconds = 0.0
        self.answered = 0

    async def allow(
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        """Rejects a request from another site's page, or without the key."""
        self.sites.check(request.headers)
        shown = "" if bearer is None else bearer.credentials
        if self.key is not None and not hmac.compare_digest(shown.encode("latin-1"), self.key.encode()):
            raise HTTPException(401, "the key is missing or wrong; send Authorization: Bearer KEY")

    async def predict(self, request: Request) -> Any:
        """The results of an image or of several, in their order, and likewise of texts.

        With `Accept: text/event-stream` they come as events: `token`, one a token as it is written, with the text so
        far; then `result`, with what is the answer otherwise, or `error`.
        """
        for name in request.query_params:
            raise HTTPException(422, f"{name[:60]}: is a query parameter; send options as fields of a form or of JSON")
        async with self.bodies.read(request.headers, request.receive) as body:
            if self.engine.waiting >= self.engine.most:
                raise Full
            kind, since = request.headers.get("content-type", ""), time.monotonic()  # also the loop's clock
            asked = await self.reader.read(kind, body, most=self.engine.most, deadline=since + self.timeout)
        if all(isinstance(one, UserError) for one in asked.inputs):
            raise asked.inputs[0]
        if MEDIA_TYPE in request.headers.get("accept", ""):
            return self._streamed(asked, since)
        jobs = self.engine.submit(asked.inputs, asked.options)
        return await _unless_gone(request, self._results(jobs, asked.cut, since))

    async def complete(self, request: Request) -> Any:
        """The answer to a conversation, whole or, with `"stream": true`, as events."""
        reader = self._chat_reader()
        async with self.bodies.read(request.headers, request.receive) as body:
            if self.engine.waiting >= self.engine.most:
                raise Full
            since = time.monotonic()
            asked = await reader.read(body, deadline=since + self.timeout)
        answer, submit = Answer(self.name, asked.prompt), partial(self.engine.submit, predictor=reader.predictor)
        if not asked.stream:
            jobs = submit([asked.prompt], asked.options)
            result = await _unless_gone(request, self._results(jobs, set(), since))
            return answer.whole(result["results"][0])
        grow, grown = _queue()
        jobs = submit([asked.prompt], asked.options, grown=grow)
        how: Any = {"decode": reader.predictor.tokenizer.decode, "stops": asked.options.stop or ()}
        chunks = answer.chunks(grown, self._results(jobs, set(), since), **how, counted=asked.counted)
        return StreamingResponse(chunks, headers=HEADERS, media_type=MEDIA_TYPE)

    @property
    def is_chat(self) -> bool:
        """Whether the model reads conversations."""
        with suppress(HTTPException):
            return self._chat_reader() is not None
        return False

    async def start_page(self, request: Request) -> HTMLResponse:
        """A page that says what the service answers; it names the model only if clients need no key."""
        self.sites.check(request.headers)
        name = self.name if self.key is None else "A service of vlm"
        paths = {path: about for path, about in PATHS.items() if self.is_chat or not path.startswith("/v1")}
        examples = _examples(self.predictor, str(request.base_url).rstrip("/"), is_chat=self.is_chat)
        body = [table(("path", "what"), paths.items()), f"<pre>{escape(examples)}</pre>"]
        if not self.is_chat:
            body.append(f"<p>There is no {CHAT}: {escape(self._no_chat())}.</p>")
        return HTMLResponse(page(name, f"A model for {self.predictor.trained_task}.", body), headers=PAGE_HEADERS)

    async def models(self) -> dict[str, Any]:
        """The model that converses."""
        return {"object": "list", "data": [await self.find_model(self.name)]}

    async def find_model(self, name: str) -> dict[str, Any]:
        """The model of this name.

        Raises:
            HTTPException: There is none, or the model does not converse.
        """
        self._chat_reader().check_model(name)
        return {"id": self.name, "object": "model", "created": self.since, "owned_by": "vlm"}

    def _chat_reader(self) -> ChatReader:
        """The reader of conversations.

        Raises:
            HTTPException: The model reads none.
        """
        try:
            if self.chat is not None:
                self.chat.predictor.check_chat()
                return self.chat
        except UserError as fault:
            raise HTTPException(404, self._no_chat()) from fault
        raise HTTPException(404, self._no_chat())

    def _no_chat(self) -> str:
        """Returns what to use instead of conversations."""
        kind = "an image" if self.predictor.arguments.kind == "image" else "a text"
        line = f"a model for {self.predictor.trained_task} does not chat; send {kind} to POST /predict (see GET /)"
        form = None if self.chat is None else self.chat.predictor.form
        return f"{line}; {TO_CHAT}" if form is not None and "assistant" in getattr(form.chat, "heads", ()) else line

    def _streamed(self, asked: Read, since: float) -> Response:
        grow, grown = _queue()
        jobs = self.engine.submit(asked.inputs, asked.options, grown=grow)
        tokenizer = getattr(self.predictor, "tokenizer", None)
        decode = str if tokenizer is None else tokenizer.decode
        sent = events(jobs, grown, self._results(jobs, asked.cut, since), decode=decode)
        return StreamingResponse(sent, headers=HEADERS, media_type=MEDIA_TYPE)

    async def _results(self, jobs: Sequence[Job], cut: Set[int], since: float) -> dict[str, list[Any]]:
        """Awaits the answers of jobs; the answer to a faulty input is its error.

        Args:
            cut: Places of inputs that were truncated.
            since: When the request was complete, by `time.monotonic`.
        Raises:
            UserError: No input can be answered.
        """
        answers = asyncio.gather(*(asyncio.wrap_future(job.answer) for job in jobs), return_exceptions=True)
        answers.add_done_callback(lambda one: one.cancelled() or one.exception())  # else asyncio logs the fault
        try:
            while not (await asyncio.wait({answers}, timeout=self._seconds_left(jobs, since)))[0]:
                if self._seconds_left(jobs, since) <= 0:
                    raise HTTPException(503, f"no token for {self.timeout:g} seconds; try again", {"Retry-After": "1"})
            results = answers.result()
        finally:
            answers.cancel()
            self.engine.leave(jobs)  # if the client has gone
        faults = [one for one in results if isinstance(one, BaseException)]
        for fault in faults:
            if len(faults) == len(results) or not isinstance(fault, UserError):
                raise fault
        self.answered += len(results) - len(faults)
        plain = [_answer(result, job) for result, job in zip(results, jobs, strict=True)]
        for place in cut:
            if isinstance(plain[place], dict):
                plain[place]["truncated"] = True
        return {"results": plain}

    def _seconds_left(self, jobs: Sequence[Job], since: float) -> float:
        """Returns the seconds until the request fails, counted from its last token, at first from its reading."""
        return self.timeout + max((job.progress for job in jobs if job.times), default=since) - time.monotonic()

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


def _examples(predictor: Predictor, url: str, *, is_chat: bool) -> str:
    """Returns commands that send a request to a service of a model."""
    form = form_of(predictor)
    texts = [name for name in form.texts if name not in form.optional or name in ("text", "pair", "label")]
    fields = (["image=@photo.jpg"] if form.photos else []) + [f'{name}="..."' for name in texts]
    lines = [f"curl {' '.join(f'-F {field}' for field in fields)} {url}/predict"]
    message = '{"messages": [{"role": "user", "content": "..."}]}'
    return "\n".join([*lines, *([f"curl --json '{message}' {url}{CHAT}"] if is_chat else [])])


def _queue() -> tuple[Callable[[int, Texts], None], asyncio.Queue[Any]]:
    """Returns a function that queues growing texts from another thread, and the queue."""
    loop, grown = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def grow(place: int, texts: Texts) -> None:
        loop.call_soon_threadsafe(grown.put_nowait, (place, texts))

    return grow, grown


async def _unless_gone(request: Request, results: Coroutine[Any, Any, Any]) -> Any:
    """Awaits results; cancels them if the client closes the connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, left = asyncio.ensure_future(results), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Gone
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()


def _answer(result: Any, job: Job) -> Any:
    """Converts a result to plain containers, with the times of tokens; a fault to its message."""
    if isinstance(result, UserError):
        return {"error": printable(str(result))}
    plain = _plain(result)
    for text, times in zip(plain if isinstance(plain, list) else [plain], job.times, strict=False):
        text["times"] = times[: len(text["tokens"])]
    return plain


def _plain(result: Any) -> Any:
    if is_dataclass(result) and not isinstance(result, type):
        return asdict(result)
    if hasattr(result, "_asdict"):
        return result._asdict()
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, np.ndarray):
        return result.tolist()
    return [_plain(one) for one in result] if isinstance(result, list | tuple) else result


class Measured:
    """Counts the answers of /predict and of conversations by status, and their seconds until the last byte."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, code = time.monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal code
            code = message.get("status", code)
            async with asyncio.timeout(SEND_TIME):
                await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            if scope.get("path") in ("/predict", CHAT):
                self.service.codes[code] += 1
                self.service.seconds += time.monotonic() - start


def make_app(service: Service) -> FastAPI:
    """Builds the application of a service. FastAPI's documentation page is off: it loads scripts of other hosts."""
    about = f"A model for {service.predictor.trained_task}."
    app = FastAPI(title="vlm", version=__version__, description=about, openapi_url=None)
    guarded: dict[str, Any] = {"dependencies": [Depends(service.allow)]}
    body = {"requestBody": {"content": BODY, "required": True}}
    streams: dict[int | str, Any] = {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}}
    answers: dict[str, Any] = {"response_model": dict[str, list[Any]], "responses": streams}
    app.post("/predict", **guarded, **answers, openapi_extra=body)(service.predict)
    app.post(CHAT, **guarded, response_model=dict[str, Any], responses=streams)(service.complete)
    app.get("/v1/models", **guarded, response_model=dict[str, Any])(service.models)
    app.get("/v1/models/{name:path}", **guarded, response_model=dict[str, Any])(service.find_model)
    app.get("/", include_in_schema=False)(service.start_page)
    app.get("/metrics", **guarded, response_class=PlainTextResponse)(service.metrics)
    app.get("/openapi.json", **guarded, include_in_schema=False)(app.openapi)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "task": service.predictor.trained_task}

    app.add_middleware(Measured, service=service)
    if service.sites.origins:
        allowed: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=service.sites.origins, **allowed)

    def refusal(request: Request, code: int, line: str, headers: Any = None) -> Response:
        headers = {"Retry-After": "1"} if code == 503 else headers
        told = error(code, line) if request.url.path.startswith("/v1/") else {"detail": printable(line)}
        return Response(json.dumps(told), code, headers, "application/json")

    def gone(request: Request, fault: Exception) -> Response:
        log.info("a client has left before its answer: %s", request.client and request.client.host)
        return refusal(request, GONE, "the client has gone")

    def refused(request: Request, fault: Exception) -> Response:
        return refusal(request, 413 if isinstance(fault, ImageTooLarge) else 400, str(fault))

    def raised(request: Request, fault: Any) -> Response:
        path = request.url.path[:60]
        if fault.detail == "Not Found":  # of a path that the application does not have
            return refusal(request, 404, f"there is no {path}; GET / lists the paths")
        if fault.detail == "Method Not Allowed":
            allowed = (fault.headers or {}).get("Allow", "another method")
            return refusal(request, 405, f"{path}: does not take {request.method}; use {allowed}", fault.headers)
        return refusal(request, fault.status_code, str(fault.detail), fault.headers)

    busy = "too many inputs wait; try again in a moment"
    app.exception_handler(Gone)(gone)
    app.exception_handler(Full)(lambda request, fault: refusal(request, 503, busy))
    app.exception_handler(Exception)(lambda request, fault: refusal(request, 500, FAILED))
    app.exception_handler(UserError)(refused)
    app.exception_handler(StarletteHTTPException)(raised)
    return app
