"""Methods of the Python API: signature, documentation and arguments of a command, made from its options dataclass."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from vlm.errors import UserError
from vlm.inference.options import declared, hints_of
from vlm.inference.tasks import Command

if TYPE_CHECKING:
    from vlm.inference.predictor import Predictor

INPUTS = "inputs"


def bind(name: str, kind: type["Predictor"], given: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a method by name; the parts of an input, such as a question, may be given by position.

    Args:
        name: The name of the method, for messages.
        kind: Its predictor.
        given: Arguments by position.
        options: Arguments by name.
    Raises:
        UserError: The inputs are missing, or an argument has no place or two.
    """
    names = [INPUTS, *_parts(kind)]
    if len(given) > len(names):
        takes = " and ".join(names)
        raise UserError(f"{name}: takes {takes} by position, got {len(given)} values; give a list, or options by name")
    bound = dict(zip(names, given, strict=False))
    if twice := next((one for one in bound if one in options), None):
        raise UserError(f"{twice}: given twice, by position and by name; leave one of them out")
    bound |= options
    if INPUTS not in bound:
        raise UserError(f"{INPUTS}: missing; {name} needs them: one {kind.arguments.kind} or a list")
    return bound


def _parts(kind: type["Predictor"]) -> list[str]:
    """Names of the options that are parts of an input; those that are needed first."""
    known = declared(kind.options)
    parts = [one for one in fields(kind.options) if known[one.name].beside]
    return [one.name for one in sorted(parts, key=lambda one: one.default is not MISSING)]


@cache
def signature_of(kind: type["Predictor"]) -> Signature:
    """The signature of the method of a predictor."""
    hints, parts = hints_of(kind.options), _parts(kind)
    parameters = [Parameter(INPUTS, Parameter.POSITIONAL_OR_KEYWORD)]
    for one in _offered(kind):
        place = Parameter.POSITIONAL_OR_KEYWORD if one.name in parts else Parameter.KEYWORD_ONLY
        default = Parameter.empty if one.default is MISSING else one.default
        parameters.append(Parameter(one.name, place, default=default, annotation=hints[one.name].__origin__))
    return Signature(parameters)


@cache
def documentation_of(command: Command, kind: type["Predictor"]) -> str:
    """The docstring of the method of a command."""
    known = declared(kind.options)
    summary = re.split(r"[:.](?:\s|$)", command.help)[0]  # without what concerns the command line only
    lines = [f"{summary}.", "", "Args:"]
    lines.append(f"    {INPUTS}: One {kind.arguments.kind}, which gives one result, or a list, which gives a list.")
    for one in _offered(kind):
        default = "" if one.default in (MISSING, None) else f" [default: {one.default!r}]"
        lines.append(f"    {one.name}: {known[one.name].help}{default}")
    return "\n".join([*lines, "", "Returns:", f"    {returned(kind)}", *_fields_of(kind.result)])


def returned(kind: type["Predictor"]) -> str:
    """Returns the sentence on what a method returns."""
    return kind.returns if kind.returns.endswith(".") else f"{kind.returns}; of several inputs, a list."


def _fields_of(result: type | None) -> Iterator[str]:
    """Yields a line for each field of a result, as its docstring describes it."""
    if result is not None:
        yield from (f"    {line}" for line in inspect.getdoc(result).partition("Args:\n")[2].splitlines())  # type: ignore[union-attr]


def _offered(kind: type["Predictor"]) -> list[Field]:
    """The options that Python may set, parts of an input first."""
    known, parts = declared(kind.options), _parts(kind)
    own = [one for one in fields(kind.options) if known[one.name].scope != "command"]
    return sorted(own, key=lambda one: parts.index(one.name) if one.name in parts else len(parts))
