"""Chat templates in the worker process, compared with transformers; and templates that would take all of a machine."""

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import HOSTILE, TEMPLATES
from transformers.utils import chat_template_utils

from vlm.errors import UserError
from vlm.untrusted import templates
from vlm.untrusted.templates import RenderedTemplate, TemplateRefusalError, render_template

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def worker() -> Iterator[templates._Worker]:
    """The worker, which is started anew, so that its resources are those of the test's templates."""
    templates._WORKER.close()
    yield templates._WORKER
    templates._WORKER.close()


def seconds_of_children() -> float:
    """CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds_of(pid: int) -> float:
    """CPU time of a process that runs."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(name: str, worker: templates._Worker, monkeypatch) -> None:
    """By a process whose memory, resident or not, is at most 200 MB, and whose CPU time the kernel limits."""
    template, reason = HOSTILE[name]
    if reason == "MB":
        monkeypatch.setattr(templates, "CPU_SECONDS", 5.0)  # where memory is slow, the time would be over first
    render_template("{{ name }}", {"name": name})
    assert worker.process is not None
    assert 0 < resource.prlimit(worker.process.pid, resource.RLIMIT_AS)[0] < 200 * 2**20
    before = seconds_of_children() + seconds_of(worker.process.pid)
    with pytest.raises(UserError, match=reason):
        render_template(template, {"messages": HELLO})
    worker.close()  # so that its resources are counted
    assert seconds_of_children() - before < templates.CPU_SECONDS + 2  # see RLIMIT_CPU in template_worker.py
    assert render_template("{{ messages[0].role }}", {"messages": HELLO}).text == "user"  # by another worker


def test_a_refusal_of_the_template_is_quoted() -> None:
    with pytest.raises(TemplateRefusalError, match=r"refuses the conversation: no system\\n role$"):
        render_template(r"{{ raise_exception('no system\\n role') }}", {})


@pytest.mark.parametrize(
    ("template", "text", "spans"),
    [
        ("a{% generation %}bc{% endgeneration %}d", "abcd", ((1, 3),)),
        (
            "{% for m in 'xy' %}{{ m }}{% generation %}{{ m }}!{% endgeneration %}{% endfor %}",
            "xx!yy!",
            ((1, 3), (4, 6)),
        ),
        ("{% macro f(x) %}{% generation %}{{ x }}{% endgeneration %}{% endmacro %}a{{ f('é') }}", "aé", ((1, 2),)),
        ("no block", "no block", ()),
    ],
)
def test_spans_are_those_of_generation_blocks(template: str, text: str, spans: tuple[tuple[int, int], ...]) -> None:
    assert render_template(template, {}, spans=True) == RenderedTemplate(text, spans)
    assert render_template(template, {}) == RenderedTemplate(text)


@pytest.mark.parametrize(
    "template",
    [
        "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | length }}",
        "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}",
        "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
    ],
)
def test_generation_blocks_that_are_changed_later_are_refused(template: str) -> None:
    with pytest.raises(UserError, match="generation"):
        render_template(template, {}, spans=True)


def test_the_time_is_the_given_one() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    assert render_template(template, {}, now=datetime(2024, 7, 26)).text == "26 Jul 2024"
    assert render_template(template, {}, now=datetime(2025, 1, 2)).text == "02 Jan 2025"


def test_a_rendering_is_cached(worker: templates._Worker) -> None:
    variables = {"messages": [{"role": "user", "content": "cached once"}]}
    first = render_template("{{ messages[0].content }}", variables)
    worker.close()
    assert render_template("{{ messages[0].content }}", variables) == first and worker.process is None


def test_the_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = templates._Cache()
    monkeypatch.setattr(templates, "MAX_CACHED", 10)
    for request in (b"1", b"2", b"3"):
        cache.store(request, RenderedTemplate("abcd"))
    assert (cache.find(b"1"), cache.size) == (None, 10) and cache.find(b"3") is not None


def test_a_worker_that_is_killed_is_replaced(worker: templates._Worker) -> None:
    render_template("{{ 'first' }}", {})
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert render_template("{{ 'second' }}", {}).text == "second"


def test_threads_take_turns() -> None:
    texts: dict[int, str] = {}

    def render(number: int) -> None:
        texts[number] = render_template("{{ n }}" * 10, {"n": number}).text

    threads = [threading.Thread(target=render, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) * 10 for number in range(20)}


def _render_in_child(results: "multiprocessing.SimpleQueue[tuple[str, int]]") -> None:
    text = render_template("{{ 'in the child' }}", {}).text
    process = templates._WORKER.process
    assert process is not None
    results.put((text, process.pid))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
def test_a_forked_process_starts_its_own_worker(worker: templates._Worker) -> None:
    render_template("{{ 'in the parent' }}", {})
    assert worker.process is not None
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[tuple[str, int]] = context.SimpleQueue()
    child = context.Process(target=_render_in_child, args=(results,))
    child.start()
    child.join()
    text, pid = results.get()
    assert (text, child.exitcode) == ("in the child", 0) and pid != worker.process.pid
    assert render_template("{{ 'in the parent again' }}", {}).text == "in the parent again"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_weather",
            "description": "Finds the weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "find_weather", "arguments": {"city": "Zürich"}}}
THOUGHT = "<think>\nlet me see\n</think>\n\nThree."


def make_parts(*texts: str, images: int = 0) -> list[dict[str, str]]:
    return [*[{"type": "image"}] * images, *({"type": "text", "text": text} for text in texts)]


def make_messages(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a question": {"messages": make_messages(("user", "What is this?"))},
    "a system turn": {"messages": make_messages(("system", "Be brief. /no_think"), ("user", "What is this?"))},
    "an answer": {"messages": make_messages(("user", "What?"), ("assistant", "A dog."))},
    "turns": {
        "messages": make_messages(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    },
    "two users": {"messages": make_messages(("user", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"))},
    "thoughts": {
        "messages": make_messages(("user", "2?"), ("assistant", THOUGHT), ("user", "3?"), ("assistant", THOUGHT)),
        "enable_thinking": False,
    },
    "odd texts": {
        "messages": make_messages(
            ("user", " \n <b>\"é\" & '本' \U0001f600 {{ x }} {% y %}\n\n"), ("assistant", "\n\ta \n")
        )
    },
    "tools": {
        "messages": [
            *make_messages(("system", "s"), ("user", "Weather?")),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"sun": true}', "name": "find_weather", "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": "Sunny."},
        ],
        "tools": TOOLS,
        "documents": [{"title": "A", "text": "b"}],
    },
    "images": {
        "messages": make_messages(
            ("system", make_parts("Be brief.")),
            ("user", make_parts("What", "is it?", images=2)),
            ("assistant", make_parts("Dogs.")),
            ("user", make_parts("And?")),
        )
    },
    "images between texts": {
        "messages": make_messages(
            ("user", [*make_parts("First", images=1), *make_parts("second", images=1), {"type": "image"}]),
            ("assistant", make_parts("Three.")),
        )
    },
}
MARKS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_what_they_write_in_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten conversations each, with and without the prompt of an answer; what they refuse is refused here too."""
    template, now, written = TEMPLATES[name], datetime(2025, 3, 9, 14, 5), 0
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: now))
    for conversation in CONVERSATIONS.values():
        for answering in (False, True):
            variables = {"tools": None, "documents": None, **conversation, **MARKS, "add_generation_prompt": answering}
            options = {key: value for key, value in variables.items() if key != "messages"}
            try:
                texts, spans = chat_template_utils.render_jinja_template(
                    conversations=[variables["messages"]],
                    chat_template=template,
                    return_assistant_tokens_mask="generation" in template,
                    **options,
                )
            except Exception:
                with pytest.raises(UserError):
                    render_template(template, variables, now=now)
                continue
            rendered = render_template(template, variables, now=now, spans=True)
            assert rendered == RenderedTemplate(texts[0], tuple(spans[0]) if spans else ())
            written += bool(rendered.text.strip())
    assert written >= 4
