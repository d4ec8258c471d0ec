"""The process that renders chat templates: run as a script by `vlm.untrusted.templates`, never imported.

Reads requests from stdin and writes replies to stdout, each as JSON after its length in 4 bytes. A template runs in
Jinja2's `ImmutableSandboxedEnvironment` with the options, names and filters that transformers gives it. The kernel
ends the process if a template takes too much CPU time, and refuses it memory and files. Imports nothing of vlm, so
that the process starts fast and stays small.
"""

import html  # noqa: F401  # filters import this and the two others when they are used, but then no file can be opened
import json
import os
import pprint  # noqa: F401
import resource
import signal
import sys
import textwrap  # noqa: F401
from datetime import datetime
from functools import lru_cache
from time import process_time
from typing import Any, BinaryIO

sys.path.append(sys.argv[1])  # the folder of jinja2: the process starts without site-packages

import jinja2
import jinja2.constants
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class RefusalError(jinja2.TemplateError):
    """A template called `raise_exception`."""


class OutputError(Exception):
    """A template wrote too much."""


class Generation(Extension):
    """The tag {% generation %}, which encloses what the model writes.

    Attributes:
        marks: Texts that are written before and after each block, so that it can be found; empty for none.
    """

    tags = {"generation"}  # noqa: RUF012  # Jinja2 changes it for each environment
    marks = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return str(caller()).join(Generation.marks)


class DictType:
    """The `dict` of templates, without the other attributes of a type."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """The `namespace` of templates, whose names do not begin with an underscore."""

    def __init__(*args: Any, **entries: Any) -> None:
        self, *rest = args  # so that a namespace may have an entry "self"
        values = dict(*rest, **entries)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r:.40}")


def raise_exception(message: Any) -> None:
    raise RefusalError(str(message))


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def create_environment() -> ImmutableSandboxedEnvironment:
    """Creates an environment as transformers has it, except for the time, which a request states."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "dict": DictType(), "namespace": PublicNamespace}
    return environment


ENVIRONMENT = create_environment()


@lru_cache(maxsize=8)
def compile_template(text: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(text)


def generate_text(request: dict[str, Any], longest: int) -> str:
    """Renders a template.

    Raises:
        OutputError: The text is longer than this.
    """
    template, now = compile_template(request["template"]), datetime.fromisoformat(request["now"])
    pieces, length = [], 0
    for piece in template.generate(**request["variables"], strftime_now=lambda form: now.strftime(form)):
        length += len(piece)
        if length > longest:
            raise OutputError
        pieces.append(piece)
    return "".join(pieces)


def render(request: dict[str, Any], longest: int) -> dict[str, Any]:
    """Renders a template; returns its text and, if requested, the spans of characters in {% generation %}."""
    text = generate_text(request, longest)
    if not request["spans"]:
        return {"text": text, "spans": []}
    begin, end = (f"<{os.urandom(16).hex()}>" for _ in range(2))
    Generation.marks = (begin, end)
    try:
        marked = generate_text(request, 2 * longest)
    finally:
        Generation.marks = ("", "")
    plain, spans = "", []
    first, *blocks = marked.split(begin)
    pieces = [first]
    place = len(first)
    for block in blocks:
        inside, *after = block.split(end)
        if len(after) != 1:
            raise RefusalError("it nests {% generation %}, or changes the text of a block after its end")
        pieces += [inside, after[0]]
        spans.append((place, place + len(inside)))
        place += len(inside) + len(after[0])
    plain = "".join(pieces)
    if plain != text:
        raise RefusalError("it changes the text of a {% generation %} block after its end")
    return {"text": text, "spans": spans}


def reply_to(request: dict[str, Any], longest: int) -> dict[str, Any]:
    """Renders a template; returns its text, or the kind of its failure and what is known of it."""
    try:
        return render(request, longest)
    except RefusalError as refusal:
        return {"failure": "refusal", "detail": str(refusal)[:500]}
    except OutputError:
        return {"failure": "output"}
    except MemoryError:
        return {"failure": "memory"}
    except jinja2.TemplateSyntaxError as fault:
        return {"failure": "syntax", "detail": f"line {fault.lineno}: {fault.message}"[:500]}
    except RecursionError:
        return {"failure": "error", "detail": "it recurses too deeply"}
    except Exception as fault:  # a template may raise whatever its filters raise
        lines, trace = [], fault.__traceback__
        while trace is not None:
            lines += [trace.tb_lineno] if trace.tb_frame.f_code.co_filename == "<unknown>" else []
            trace = trace.tb_next
        place = f"line {lines[-1]}: " if lines else ""
        return {"failure": "error", "detail": f"{place}{type(fault).__name__}: {fault}"[:500]}


def set_limit(kind: int, value: int) -> None:
    """Lowers a limit of this process if the system has it."""
    _, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    except (OSError, ValueError):  # macOS does not limit address space
        return


def read_message(stream: BinaryIO) -> Any:
    """Reads a message; None at the end of the stream."""
    head = stream.read(4)
    return json.loads(stream.read(int.from_bytes(head, "big"))) if len(head) == 4 else None


def serve(seconds: float, memory: int, longest: int) -> None:
    """Answers requests until the end of stdin.

    Args:
        seconds: Maximum CPU time per request.
        memory: Maximum number of bytes that a template may add to those of the process.
        longest: Maximum number of characters of a rendered text.
    """
    try:
        with open("/proc/self/statm", "rb") as sizes:
            pages = int(sizes.read().split()[0])
        set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    except OSError:  # macOS has no /proc
        pass
    # Loads the modules that compiling and errors need.
    first = {"template": r"{{ 'a\n' | wordcount | tojson }}{{ a.b.c }}", "variables": {}, "now": "2000-01-01"}
    reply_to({**first, "spans": True}, longest)
    set_limit(resource.RLIMIT_FSIZE, 0)
    set_limit(resource.RLIMIT_NOFILE, 3)  # stdin, stdout and stderr; no other file can be opened
    while (request := read_message(sys.stdin.buffer)) is not None:
        set_limit(resource.RLIMIT_CPU, int(process_time() + seconds) + 2)  # if the timer is not enough
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also inside C code
        answer = reply_to(request, longest)
        data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
