"""Chat templates of other people: rendered by Jinja2 in a sandbox, in a separate process with limits.

A chat template is a program. Jinja2's sandbox limits what it can reach, but neither time nor memory, so a warm worker
process compiles and renders templates (`template_worker.py`). The kernel ends the worker if a template exceeds its
limits; the next request starts another one.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from signal import SIGPROF, SIGXCPU
from time import monotonic
from typing import Any, NamedTuple

from vlm.errors import UserError
from vlm.untrusted.sizes import JsonValue

MAX_LENGTH = 2**16  # characters of a template
MAX_OUTPUT = 2**22  # characters of a rendered text
CPU_SECONDS = 0.5  # per rendering
MEMORY = 2**27  # bytes that a template may add to those of the worker
WAIT = 60.0  # seconds for an answer, which takes longer than CPU_SECONDS if the machine is busy
MAX_CACHED = 2**24  # characters of cached requests and texts
GENERATION = "{% generation %}"


class RenderedTemplate(NamedTuple):
    """The text that a template wrote.

    Args:
        text: The text.
        spans: Beginning and end, in characters, of each block in {% generation %}, if they were requested.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()


class TemplateError(UserError):
    """A chat template cannot be rendered, or refuses a conversation."""


class TemplateRefusalError(TemplateError):
    """A chat template refused a conversation by `raise_exception`."""


def render_template(
    template: str, variables: Mapping[str, JsonValue], *, now: datetime | None = None, spans: bool = False
) -> RenderedTemplate:
    """Renders a chat template; cached.

    Args:
        variables: The names that it reads, such as messages, add_generation_prompt and bos_token.
        now: The time that `strftime_now` returns; by default the current one.
        spans: Whether to find the blocks in {% generation %}.
    Raises:
        TemplateRefusalError: The template called `raise_exception`.
        TemplateError: It is too long, has an error, or exceeds the time, the memory or the output that it may use.
    """
    if len(template) > MAX_LENGTH:
        raise TemplateError(f"the chat template has {len(template):,} characters; the maximum is {MAX_LENGTH:,}")
    # A template that does not read the time has the same text at any time, so that it is cached once.
    time = (now or datetime.now()) if "strftime_now" in template else datetime.min
    request = {"template": template, "variables": dict(variables), "spans": spans}
    request["now"] = time.isoformat(timespec="seconds")
    data = json.dumps(request).encode()
    if (rendered := _CACHE.find(data)) is None:
        rendered = _read_reply(_WORKER.ask(data))
        _CACHE.store(data, rendered)
    return rendered


def _read_reply(reply: Mapping[str, Any]) -> RenderedTemplate:
    failure, detail = reply.get("failure"), " ".join(reply.get("detail", "").split())[:300]
    if failure == "refusal":
        raise TemplateRefusalError(f"the chat template refuses the conversation: {detail}")
    if failure is not None:
        reasons = {
            "output": f"writes more than {MAX_OUTPUT:,} characters",
            "memory": f"uses more than {MEMORY >> 20} MB",
            "time": f"takes more than {CPU_SECONDS} s of CPU time",
            "syntax": f"has a syntax error: {detail}",
            "error": f"fails: {detail}",
        }
        raise TemplateError(f"the chat template {reasons[failure]}; use another template")
    text = reply["text"]
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise TemplateError("the chat template writes half of a surrogate pair; use another template")
    return RenderedTemplate(text, tuple((begin, end) for begin, end in reply["spans"]))


class _Cache:
    """The most recent renderings, up to a number of characters."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, RenderedTemplate] = OrderedDict()
        self.size, self.lock = 0, threading.Lock()

    def find(self, request: bytes) -> RenderedTemplate | None:
        with self.lock:
            if request in self.entries:
                self.entries.move_to_end(request)
            return self.entries.get(request)

    def store(self, request: bytes, rendered: RenderedTemplate) -> None:
        with self.lock:
            if request not in self.entries:
                self.entries[request] = rendered
                self.size += len(request) + len(rendered.text)
            while self.size > MAX_CACHED:
                oldest, dropped = self.entries.popitem(last=False)
                self.size -= len(oldest) + len(dropped.text)


class _Worker:
    """The worker process, which is started when it is needed; threads take turns."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def ask(self, data: bytes) -> Mapping[str, Any]:
        """Sends a request; returns the reply, or the reason why the worker ended without one."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = self._start()
            try:
                reply = self._exchange(self.process, data)
                if reply.get("failure") == "memory":  # what is left of its memory may not be enough for another
                    self._end(self.process)
                return reply
            except (OSError, EOFError):
                status = self._end(self.process)
            except BaseException:  # such as an interrupt: the worker's reply would be read as that of another request
                self._end(self.process)
                raise
        if status in (-SIGPROF, -SIGXCPU):
            return {"failure": "time"}
        return {"failure": "error", "detail": f"the process that renders it ended with status {status}"}

    def _start(self) -> "subprocess.Popen[bytes]":
        found = find_spec("jinja2")
        assert found is not None and found.origin is not None
        script, packages = Path(__file__).with_name("template_worker.py"), Path(found.origin).parent.parent
        limits = map(str, (CPU_SECONDS, MEMORY, MAX_OUTPUT))
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
        return subprocess.Popen(
            # -I and -S: no variables of the environment, no user's folders, no site-packages.
            [sys.executable, "-I", "-S", str(script), str(packages), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # a forked process must have no copy of what is still to be written
            env=kept,
            cwd="/",
            process_group=0,  # an interrupt in the terminal is this process's, not the worker's
        )

    def _exchange(self, process: "subprocess.Popen[bytes]", data: bytes) -> Mapping[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        deadline = monotonic() + WAIT
        remaining = memoryview(len(data).to_bytes(4, "big") + data)
        while remaining:
            remaining = remaining[process.stdin.write(remaining) :]
        descriptor, received, length = process.stdout.fileno(), bytearray(), 4
        while len(received) < length:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - monotonic()))
            part = os.read(descriptor, 2**20) if readable else b""
            if not part:
                raise EOFError
            received += part
            length = 4 + int.from_bytes(received[:4], "big") if len(received) >= 4 else 4
        return json.loads(received[4:])

    def _end(self, process: "subprocess.Popen[bytes]") -> int:
        """Ends the worker; returns its exit status."""
        self.process = None
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        """Ends the worker when this process ends."""
        if self.process is not None:
            self._end(self.process)

    def forget(self) -> None:
        """Leaves the worker to the process that this one was forked from."""
        process, self.process, self.lock = self.process, None, threading.Lock()
        if process is not None:
            process.returncode = 0  # it is not a child of this process
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


_CACHE, _WORKER = _Cache(), _Worker()


def _reset_after_fork() -> None:
    _WORKER.forget()
    _CACHE.lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(_WORKER.close)
