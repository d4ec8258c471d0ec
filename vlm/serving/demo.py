"""`vlm demo`: a page to try a model, behind a guard of paths, body sizes and request rates."""

import asyncio
import json
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vlm.errors import UserError, print_error
from vlm.inference.options import ModelOptions, Option
from vlm.serving.bodies import Bodies, Gone
from vlm.serving.server import LOCAL, Sites, listen, urls

Scope = MutableMapping[str, Any]
PATHS = re.compile(
    r"/|/(config/?|theme\.css|favicon\.ico|manifest\.json|robots\.txt)|/(assets|static)/[\w./@-]+"
    r"|/gradio_api/(queue/(join|data)|heartbeat/\w+|startup-events|cancel|reset/?|app_id|theme\.css)"
)
ASKS = "/gradio_api/queue/join"
MINUTE = 60.0
CLIENTS = 4096  # most clients whose rates are remembered
HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; "
    "form-action 'self'; base-uri 'self'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """An ASGI application behind a guard.

    Args:
        app: The application.
        local: Whether requests must address it by a name of this machine, which pages of other sites cannot do.
        max_bytes: Size of the largest body.
        rate: Most requests to the model per minute and client.
    """

    def __init__(self, app: Any, *, local: bool, max_bytes: int, rate: int) -> None:
        self.app, self.rate, self.bodies, self.sites = app, rate, Bodies(max_bytes), Sites(local=local)
        self._asked: OrderedDict[str, deque[float]] = OrderedDict()
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Ends the streams of open pages, which would never end by themselves."""
        self._ended.set()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets are not supported
            return
        try:
            receive = await self._admitted(scope, receive)
        except HTTPException as fault:
            await JSONResponse({"detail": fault.detail}, fault.status_code, fault.headers)(scope, receive, send)
            return
        except Gone:
            return

        async def sealed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, sealed)

    async def _admitted(self, scope: Scope, receive: Any) -> Any:
        """Checks a request and reads its body; returns a receive function that replays it.

        Raises:
            HTTPException: The page sends no such request, it is too large, or the client sends too many.
        """
        path, headers = scope["path"], Headers(scope=scope)
        self.sites.check(headers)
        if ".." in path or PATHS.fullmatch(path) is None:
            raise HTTPException(404, "there is nothing here")
        if path in ("/", "/config"):
            scope["query_string"] = b""  # else Gradio would read a file of its cache that the query names
        if scope["method"] != "POST":
            return partial(self._until_end, receive)
        if path == ASKS:
            self._count((scope.get("client") or ("", 0))[0])
        async with self.bodies.read(headers, receive) as body:
            if path == ASKS and not await asyncio.to_thread(_is_plain, body):
                raise HTTPException(422, "this page sends no such request")
            return _replayed(bytes(body), receive)

    async def _until_end(self, receive: Any) -> MutableMapping[str, Any]:
        """Returns the next message of the client; after `end`, a disconnection."""
        message, end = asyncio.ensure_future(receive()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({message, end}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            end.cancel()

    def _count(self, client: str) -> None:
        """Counts a request to the model.

        Raises:
            HTTPException: The client has sent too many within a minute.
        """
        times, now = self._asked.pop(client, deque()), time.monotonic()
        while times and times[0] < now - MINUTE:
            times.popleft()
        self._asked[client] = times
        if len(self._asked) > CLIENTS:
            self._asked.popitem(last=False)
        if len(times) >= self.rate:
            raise HTTPException(429, f"more than {self.rate} requests in a minute; wait a moment")
        times.append(now)


def _is_plain(body: bytearray) -> bool:
    """Returns True for a request of plain values: Gradio would open paths and URLs in dictionaries."""
    try:
        values = json.loads(body)["data"]
        return isinstance(values, list) and all(isinstance(one, str | int | float | None) for one in values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _replayed(body: bytes, receive: Any) -> Any:
    """Returns a receive function that replays a body which has been read."""
    message: MutableMapping[str, Any] | None = {"type": "http.request", "body": body, "more_body": False}

    async def again() -> Any:
        nonlocal message
        if message is not None:
            first, message = message, None
            return first
        return await receive()

    return again


GRACE = 5  # seconds after a signal in which pages requested before it are still sent
SPARE = 64  # connections in addition to those whose requests may wait; each page holds two
MEGABYTE = 10**6


def demo(
    model: ModelOptions,
    host: Annotated[str, Option("Bind address. The default accepts local connections only.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 for any free port.", least=0, most=65535)] = 7860,
    queue: Annotated[int, Option("Maximum number of queued requests; further ones are refused.", least=1)] = 16,
    max_mb: Annotated[int, Option("Maximum size of a photo, in megabytes.", least=1)] = 16,
    rate: Annotated[int, Option("Maximum number of requests per client and minute.", least=1)] = 120,
) -> int:
    """Shows the page of a model until a signal; returns 128 and its number as the exit status.

    Raises:
        UserError: The extra is not installed, or the address cannot be had.
    """
    with TemporaryDirectory(prefix="vlm-demo-") as folder:
        # Gradio then sends no reports, and its folder stays empty.
        os.environ.update({"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder})
        app = make_app(model, local=host in LOCAL, queue=queue, max_bytes=max_mb * MEGABYTE, rate=rate)
        if host not in LOCAL:
            remedy = "a proxy before it can ask for a password"
            print_error(f"whoever reaches {host} may use the model; {remedy}", "warning")
        lines = [f"page        {url}" for url in urls(host)]
        options: Any = {"connections": 2 * queue + SPARE, "grace": GRACE, "ending": app.end}
        return listen(app, host=host, port=port, lines=lines, **options)


def make_app(model: ModelOptions, *, local: bool, queue: int, max_bytes: int, rate: int) -> Any:
    """Builds the page of a model as an ASGI application; arguments as in `Guard`, but max_bytes is a photo's.

    Raises:
        UserError: The extra is not installed.
    """
    try:
        from vlm.serving.demo_page import Page, chat_of, mounted
    except ModuleNotFoundError as fault:
        raise UserError(f'vlm demo: needs {fault.name}; pip install "vlm-lightning[demo]"') from fault
    from vlm.inference.predictor import load_predictor
    from vlm.serving.demo_forms import form_of
    from vlm.serving.demo_page import samples_of

    predictor = model.load(load_predictor)
    predictor.prepack(1)
    path, form = Path(model.checkpoint), form_of(predictor)
    samples = samples_of(path)
    name = path.name if path.is_dir() else f"{samples.parent.name}/{path.name}"  # without paths of this machine
    sizes: Any = {"samples": samples, "max_bytes": max_bytes}
    page = Page(task=predictor.trained_task, name=name, form=form, **sizes, chat=chat_of(predictor))
    body = max_bytes * max(1, form.photos) * 4 // 3 + MEGABYTE  # photos in base64, and texts
    return Guard(mounted(page, queue=queue), local=local, max_bytes=body, rate=rate)
