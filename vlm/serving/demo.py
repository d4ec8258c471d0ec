"""`vlm demo`: a page to try a model, with limits on paths, request bodies and request rates."""

import asyncio
import json
import os
import re
import time
from collections import OrderedDict, deque
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm.errors import print_error
from vlm.inference.options import ModelOptions, Option
from vlm.serving.server import LOCAL_HOSTS, ClientDisconnected, OriginPolicy, RequestBodyLimiter, listen, reachable_urls

PATHS = re.compile(
    r"/|/(config/?|theme\.css|favicon\.ico|manifest\.json|robots\.txt)|/(assets|static)/[\w./@-]+"
    r"|/gradio_api/(queue/(join|data)|heartbeat/\w+|startup-events|cancel|reset/?|app_id|theme\.css)"
)
JOIN_PATH = "/gradio_api/queue/join"
MINUTE = 60.0
MAX_CLIENTS = 4096  # maximum number of clients whose request times are stored
HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; "
    "form-action 'self'; base-uri 'self'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """ASGI middleware that rejects requests which the page does not send, and limits their size and rate.

    Args:
        app: The application.
        local: As in `OriginPolicy`.
        max_bytes: Maximum size of a request body.
        rate: Maximum number of requests to the model per minute and client.
    """

    def __init__(self, app: ASGIApp, *, local: bool, max_bytes: int, rate: int) -> None:
        self.app, self.rate = app, rate
        self.body_limiter, self.origin_policy = RequestBodyLimiter(max_bytes), OriginPolicy(local=local)
        self._request_times: OrderedDict[str, deque[float]] = OrderedDict()
        self._shutdown = asyncio.Event()

    def end(self) -> None:
        """Ends the event streams of open pages, which would otherwise not end."""
        self._shutdown.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets are not supported
            return
        try:
            receive = await self._admit(scope, receive)
        except HTTPException as fault:
            await JSONResponse({"detail": fault.detail}, fault.status_code, fault.headers)(scope, receive, send)
            return
        except ClientDisconnected:
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, send_with_headers)

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Checks a request and reads its body; returns a receive function that replays it.

        Raises:
            HTTPException: The page does not send such a request, it is too large, or the client sends too many.
        """
        path, headers = scope["path"], Headers(scope=scope)
        self.origin_policy.check(headers)
        if ".." in path or PATHS.fullmatch(path) is None:
            raise HTTPException(404, "not found")
        if path in ("/", "/config"):
            scope["query_string"] = b""  # else Gradio would read a file of its cache that the query names
        if scope["method"] != "POST":
            return partial(self._receive_until_shutdown, receive)
        if path == JOIN_PATH:
            self._limit_rate((scope.get("client") or ("", 0))[0])
        async with self.body_limiter.read(headers, receive) as body:
            if path == JOIN_PATH and not await asyncio.to_thread(_has_plain_values, body):
                raise HTTPException(422, "this page does not send such requests")
            message: Message = {"type": "http.request", "body": bytes(body), "more_body": False}
        messages = [message]

        async def replay_body() -> Message:
            return messages.pop() if messages else await receive()

        return replay_body

    async def _receive_until_shutdown(self, receive: Receive) -> Message:
        """Returns the next message of the client; after `end`, a disconnect message."""
        message, end = asyncio.ensure_future(receive()), asyncio.ensure_future(self._shutdown.wait())
        try:
            await asyncio.wait({message, end}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            end.cancel()

    def _limit_rate(self, client: str) -> None:
        """Counts a request to the model.

        Raises:
            HTTPException: The client has sent too many requests within a minute.
        """
        times, now = self._request_times.pop(client, deque()), time.monotonic()
        while times and times[0] < now - MINUTE:
            times.popleft()
        self._request_times[client] = times
        if len(self._request_times) > MAX_CLIENTS:
            self._request_times.popitem(last=False)
        if len(times) >= self.rate:
            raise HTTPException(429, f"more than {self.rate} requests per minute; try again later")
        times.append(now)


def _has_plain_values(body: bytearray) -> bool:
    """Returns True for a request without objects: Gradio would open paths and URLs in objects."""
    try:
        values = json.loads(body)["data"]
        return isinstance(values, list) and all(isinstance(value, str | int | float | None) for value in values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


GRACE = 5  # seconds after a signal in which earlier requests are still answered
SPARE_CONNECTIONS = 64  # connections in addition to those of queued requests; each page holds two
MEGABYTE = 10**6


def demo(
    model: ModelOptions,
    host: Annotated[str, Option("Bind address. The default accepts local connections only.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 for any free port.", least=0, most=65535)] = 7860,
    queue: Annotated[int, Option("Maximum number of queued requests; further ones are refused.", least=1)] = 16,
    max_mb: Annotated[int, Option("Maximum size of a photo, in megabytes.", least=1)] = 16,
    rate: Annotated[int, Option("Maximum number of requests per client and minute.", least=1)] = 120,
) -> int:
    """Serves the page of a model until a signal; returns 128 plus the signal number as the exit status.

    Raises:
        UserError: The address is not available.
    """
    with TemporaryDirectory(prefix="vlm-demo-") as folder:
        # Turns off telemetry; the folder stays empty.
        os.environ.update({"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder})
        app = make_app(model, local=host in LOCAL_HOSTS, queue=queue, max_bytes=max_mb * MEGABYTE, rate=rate)
        if host not in LOCAL_HOSTS:
            remedy = "use a reverse proxy with a password to restrict access"
            print_error(f"anyone who can reach {host} can use the model; {remedy}", "warning")
        lines = [f"page        {url}" for url in reachable_urls(host)]
        connections = 2 * queue + SPARE_CONNECTIONS
        return listen(app, host=host, port=port, lines=lines, connections=connections, grace=GRACE, on_signal=app.end)


def make_app(model: ModelOptions, *, local: bool, queue: int, max_bytes: int, rate: int) -> Guard:
    """Builds the page of a model as an ASGI application.

    Args:
        local, rate: As in `Guard`.
        queue: Maximum number of queued requests.
        max_bytes: Maximum size of a photo.
    """
    from vlm.inference.predictor import load_predictor
    from vlm.serving.demo_forms import build_form
    from vlm.serving.demo_page import Page, find_samples_folder, mount_page
    from vlm.tasks.chat.predictor import find_chat_predictor

    predictor = model.load(load_predictor)
    predictor.prepack(1)
    path, form = Path(model.checkpoint), build_form(predictor)
    samples = find_samples_folder(path)
    name = path.name if path.is_dir() else f"{samples.parent.name}/{path.name}"  # without local paths
    page = Page(
        task=predictor.trained_task,
        name=name,
        form=form,
        samples=samples,
        max_bytes=max_bytes,
        chat=find_chat_predictor(predictor),
    )
    body = max_bytes * max(1, form.photos) * 4 // 3 + MEGABYTE  # photos in base64, and texts
    return Guard(mount_page(page, queue=queue), local=local, max_bytes=body, rate=rate)
