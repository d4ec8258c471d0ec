"""What a task declares once is offered everywhere: its command, `vlm predict`, the Python API and the records."""

import base64
import inspect
import json
import pydoc
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import services
from PIL import Image
from services import TEXTS, predictor_of, tiny
from tiny_checkpoints import IMAGES, STORY

import vlm
from vlm.cli.main import run
from vlm.errors import UserError
from vlm.inference.options import build_options, get_options, without_input_parts
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import TASKS, import_object

EXACT = ["--device", "cpu", "--precision", "fp32", "--format", "jsonl"]
# Of each task some inputs as Python has them, and options.
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    **services.CASES,
    "captioning": (IMAGES[:2], {"beam": 2, "results": 2, "max_tokens": 8, "workers": 1}),
    "embedding": (TEXTS, {"pooling": "first", "normalize": True}),
    "image_questions": (IMAGES[:2], {"question": ["is there a circle?", "how many?"], "batch_size": 1}),
    "photo_translation": (TEXTS, {"image": IMAGES[:2], "max_tokens": 6, "sample": True, "results": 2}),
    "span_answering": ([Path("story.txt")], {"question": ["what is left of the cross?", "what is red?"]}),
    "tagging": ([*TEXTS, "It isn't!"], {"words": True}),
}


def kind_of(task: str) -> type[Predictor]:
    return import_object(TASKS[task].predictor)


def flags(kind: type) -> dict[str, str]:
    """The fields of a dataclass as they are typed; those without a name are left out."""
    named = {name: one for name, one in get_options(kind).items() if not one.positional}
    return {name: (*one.flags, f"--{name.replace('_', '-')}")[0].split("/")[0] for name, one in named.items()}


def to_words(kind: type, values: dict[str, Any]) -> list[str]:
    """Values as words of a command line."""
    names, words = flags(kind), list[str]()
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if name not in names else [names[name]] if one is True else [names[name], str(one)]
            words += [str(one)] if name not in names else []
    return words


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert run([*words, *EXACT]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def folder(task: str, tmp_path: Path) -> list[str]:
    """The option that a command needs beside inputs and options of its task."""
    return ["--out", str(tmp_path)] if task == "text_to_image" else []


def plain(value: Any, number: Any = lambda one: one) -> Any:
    """A result as plain containers, and of its numbers what a function makes of them."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, dict):
        return {name: plain(one, number) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, number) for one in value]
    return number(value) if isinstance(value, float) else value


def round_result(value: Any) -> Any:
    """A result without the digits that depend on the layout of weights."""
    return plain(value, lambda one: pytest.approx(one, rel=1e-3, abs=1e-4))


@pytest.fixture(autouse=True)
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("story.txt").write_text(STORY)


@pytest.mark.parametrize("task", TASKS)
def test_every_option_has_a_type_a_help_and_a_default_or_is_needed(task: str) -> None:
    for command in TASKS[task].commands:
        kind = import_object(command.predictor)
        for holder in (kind.options, kind.arguments):
            assert all(option.help.endswith(".") for option in get_options(holder).values())
            assert {*get_type_hints(holder)} >= {one.name for one in fields(holder)}
        assert all(one.kw_only for one in fields(kind.options))


@pytest.mark.parametrize("task", TASKS)
def test_predict_and_the_command_offer_every_option(
    task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    kind, helps = kind_of(task), {}
    for command in ("predict", TASKS[task].main.name):
        assert run([command, "--help"]) == 0
        helps[command] = capsys.readouterr().out
    for name, flag in flags(kind.options).items():
        assert all(flag in said for said in helps.values()), name
    for flag in flags(kind.arguments).values():
        assert flag in helps[TASKS[task].main.name]


@pytest.mark.parametrize("task", TASKS)
def test_command_predict_python_and_record_agree(task: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    inputs, values = CASES[task]
    kind, path = kind_of(task), tiny(task)
    options = to_words(kind.options, values)
    field = next(one.name for one in fields(kind.arguments) if one.name == kind.arguments.words)
    words = [*to_words(kind.arguments, {field: inputs}), *options, *folder(task, tmp_path)]
    own = run_command(capsys, TASKS[task].main.name, *words, "-c", path)
    assert len(own) >= len(inputs)
    for record in own:
        if "path" in record:  # of a picture, which the record of other uses holds
            record["image"] = base64.b64encode(Path(record.pop("path")).read_bytes()).decode()
    assert run_command(capsys, "predict", *map(str, inputs), *options, "-c", path) == own

    predictor = predictor_of(path)
    chosen = build_options(kind.options, values, use="this")
    sources = predictor.sources(inputs, chosen)
    prepared = [predictor.prepare(source, chosen) for source in sources]
    results = dict(predictor.results([prepared], without_input_parts(chosen)))
    found = [one for at, source in enumerate(sources) for one in predictor.record(source, results[at], chosen)]
    assert own == [round_result(json.loads(json.dumps(record))) for record in found]

    model = vlm.load(path, device="cpu", precision="fp32")
    answers = getattr(model, TASKS[task].main.name)(inputs, **values)
    expected = [predictor.answer(results[place], chosen) for place in range(len(sources))]
    assert [plain(one) for one in answers] == [round_result(one) for one in expected]
    result = answers
    while isinstance(result, list):
        (result, *_) = result
    assert isinstance(result, kind.result or (np.ndarray, Image.Image))


@pytest.mark.parametrize("task", TASKS)
def test_inputs_come_while_results_leave_and_who_closes_stops_the_model(task: str) -> None:
    """Batches of one, the next asked for only when the model has room; None is the end where nothing is left to do."""
    inputs, values = CASES[task]
    predictor = predictor_of(tiny(task))
    options = build_options(predictor.options, {**values, "batch_size": 1}, use="this")
    sources = predictor.sources(inputs, options)
    asked = 0

    def batches():
        nonlocal asked
        for source in sources * 3:
            asked += 1
            yield [predictor.prepare(source, options)]
        while True:
            yield None

    found = predictor.results(batches(), options)
    place, first = next(iter(found))
    assert place == 0 and asked < 3 * len(sources) + 1
    rest = dict(found)
    assert [*rest] == list(range(1, 3 * len(sources)))
    assert round_result(plain(first)) == plain(rest[len(sources)])
    stopped = predictor.results(batches(), options)
    asked = 0
    next(iter(stopped))
    stopped.close()  # type: ignore[attr-defined]
    assert asked <= 2 and not list(stopped)


@pytest.mark.parametrize("task", TASKS)
def test_python_and_clients_are_told_of_wrong_names_types_and_ranges(task: str) -> None:
    kind = kind_of(task)
    good = {name: value for name, value in CASES[task][1].items() if get_options(kind.options)[name].scope == "anyone"}
    assert build_options(kind.options, good, use="this", client=True)
    for wrong in ({"batch_sise": 1}, {"batch_size": 0}, {"batch_size": "many"}, {"trace": "file"}, {"labels": "file"}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            build_options(kind.options, {**CASES[task][1], **wrong}, use="this")
    for own in ("batch_size", "workers"):
        with pytest.raises(UserError, match=own):
            build_options(kind.options, {**good, own: 1}, use="this", client=True)
    for one in fields(kind.options):
        if one.default is MISSING:
            with pytest.raises(UserError, match=f"{one.name}: missing"):
                build_options(kind.options, {}, use="this")


WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((None,), {}),
    ((5,), {}),
    (([5],), {}),
    ((object(),), {"batch_sise": 1}),
    (("a", 5), {}),
    (("a", "b", "c", "d"), {}),
    (("a",), {"question": 5, "pair": 5, "image": 5}),
]


@pytest.mark.parametrize("task", TASKS)
def test_every_method_answers_or_has_the_words_of_the_command(
    task: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No call ends with a TypeError, an AssertionError or another error than `vlm.Error`."""
    model, inputs = vlm.load(tiny(task), device="cpu", precision="fp32"), CASES[task][0]
    for name in sorted({command.name for entry in TASKS.values() for command in entry.commands} - {"chat"}):
        for given, options in WRONG:
            with pytest.raises(vlm.Error) as caught:
                getattr(model, name)(*given, **options)
            assert len(str(caught.value).split("\n")) <= 2, (name, given, options)
    for command in TASKS[task].commands:
        if command.name == "chat":
            with pytest.raises(vlm.Error, match="this model"):  # none of these models was taught to converse
                model.chat()
            continue
        kind = import_object(command.predictor)
        parts = {"question": "what?", "label": ["a", "b"], "text": "a", "image": IMAGES[:1]}
        options = {name: value for name, value in parts.items() if name in get_options(kind.options)}
        words = [*to_words(kind.options, options), *to_words(kind.arguments, {kind.arguments.words: inputs[:1]})]
        status = run([command.name, *words, *folder(task, tmp_path), "-c", tiny(task), *EXACT])
        said = capsys.readouterr().err.removeprefix("error: ").strip()
        fault = None
        try:
            getattr(model, command.name)(inputs[0], **options)
        except vlm.Error as error:
            fault = str(error)
        assert (fault is None) == (status == 0), (command.name, said, fault)
        assert fault is None or fault in said


@pytest.mark.parametrize("task", TASKS)
def test_help_of_a_method_shows_every_option(task: str) -> None:
    model = vlm.load(tiny(task), device="cpu", precision="fp32")
    for command in TASKS[task].commands:
        if command.name == "chat":
            continue
        kind, method = import_object(command.predictor), getattr(model, command.name)
        shown, known = inspect.signature(method).parameters, get_options(kind.options)
        offered = [one for one in fields(kind.options) if known[one.name].scope != "command"]
        assert {*shown} == {"inputs", *(one.name for one in offered)}
        for one in offered:
            assert f"{one.name}: {known[one.name].help}" in method.__doc__
            assert shown[one.name].default == (shown[one.name].empty if one.default is MISSING else one.default)
        assert method.__name__ == command.name and "lambda" not in pydoc.render_doc(method)
        summary = method.__doc__.splitlines()[0]
        assert command.help.startswith(summary[:-1]) and summary.count(".") == 1 and "--" not in summary
        returned = method.__doc__.partition("\nReturns:\n")[2]
        assert returned.strip() and (kind.result is None) == (command.name in ("draw", "embed", "retrieve"))
        assert kind.result is None or kind.result.__name__ in returned
        for name in getattr(kind.result, "_fields", None) or getattr(kind.result, "__dataclass_fields__", ()):
            assert f"\n        {name}: " in f"\n{returned}", (command.name, name)


@pytest.mark.parametrize("task", [task for task in TASKS if {"question", "pair", "image"} & {*CASES[task][1]}])
def test_a_part_of_an_input_may_be_given_by_position(task: str) -> None:
    model, (inputs, values) = vlm.load(tiny(task), device="cpu", precision="fp32"), CASES[task]
    (name,) = {"question", "pair", "image"} & {*values}
    others = {key: value for key, value in values.items() if key != name}
    answers = model.predict(inputs, values[name], **others)
    assert plain(answers) == plain(getattr(model, TASKS[task].main.name)(inputs, **values))
    with pytest.raises(vlm.Error, match=f"{name}: given both by position and by name"):
        model.predict(inputs, values[name], **values)
