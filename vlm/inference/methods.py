"""Methods of the Python API: signature, documentation and arguments of a command, made from its options dataclass."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from vlm.errors import UserError
from vlm.inference.options import cached_type_hints, get_options
from vlm.inference.tasks import Command

if TYPE_CHECKING:
    from vlm.inference.predictor import Predictor

INPUTS = "inputs"


def bind_arguments(
    name: str, kind: type["Predictor"], given: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a method by name; input parts, such as a question, may be given by position.

    Args:
        name: The name of the method, for messages.
        kind: Its predictor.
        given: Arguments by position.
        options: Arguments by name.
    Raises:
        UserError: The inputs are missing, there are too many arguments, or an argument is given twice.
    """
    names = [INPUTS, *_input_parts(kind)]
    if len(given) > len(names):
        takes = " and ".join(names)
        raise UserError(f"{name}: takes {takes} by position, got {len(given)} values; give a list, or options by name")
    bound = dict(zip(names, given, strict=False))
    if repeated := next((parameter for parameter in bound if parameter in options), None):
        raise UserError(f"{repeated}: given both by position and by name; give it once")
    bound |= options
    if INPUTS not in bound:
        raise UserError(f"{INPUTS}: missing; {name} needs one {kind.arguments.kind}, or a list")
    return bound


def _input_parts(kind: type["Predictor"]) -> list[str]:
    """Returns the names of the options that are input parts, required ones first."""
    declared_options = get_options(kind.options)
    parts = [option for option in fields(kind.options) if declared_options[option.name].input_kind]
    return [option.name for option in sorted(parts, key=lambda option: option.default is not MISSING)]


@cache
def build_signature(kind: type["Predictor"]) -> Signature:
    """Returns the signature of a predictor's method."""
    hints, parts = cached_type_hints(kind.options), _input_parts(kind)
    parameters = [Parameter(INPUTS, Parameter.POSITIONAL_OR_KEYWORD)]
    for option in _python_options(kind):
        place = Parameter.POSITIONAL_OR_KEYWORD if option.name in parts else Parameter.KEYWORD_ONLY
        default = Parameter.empty if option.default is MISSING else option.default
        parameters.append(Parameter(option.name, place, default=default, annotation=hints[option.name].__origin__))
    return Signature(parameters)


@cache
def build_docstring(command: Command, kind: type["Predictor"]) -> str:
    """Returns the docstring of a command's method."""
    declared_options = get_options(kind.options)
    summary = re.split(r"[:.](?:\s|$)", command.help)[0]  # without the part about the command line
    lines = [f"{summary}.", "", "Args:"]
    lines.append(f"    {INPUTS}: One {kind.arguments.kind}, which gives one result, or a list, which gives a list.")
    for option in _python_options(kind):
        default = "" if option.default in (MISSING, None) else f" [default: {option.default!r}]"
        lines.append(f"    {option.name}: {declared_options[option.name].help}{default}")
    lines += ["", "Returns:", f"    {describe_return(kind)}"]
    if kind.result is not None:  # with the fields of a result, as its docstring describes them
        lines += [f"    {line}" for line in (inspect.getdoc(kind.result) or "").partition("Args:\n")[2].splitlines()]
    return "\n".join(lines)


def describe_return(kind: type["Predictor"]) -> str:
    """Returns the sentence on what a method returns."""
    return kind.returns if kind.returns.endswith(".") else f"{kind.returns}; of several inputs, a list."


def _python_options(kind: type["Predictor"]) -> list[Field]:
    """Returns the options of the Python API, input parts first."""
    declared_options, parts = get_options(kind.options), _input_parts(kind)
    offered = [option for option in fields(kind.options) if declared_options[option.name].scope != "command"]
    return sorted(offered, key=lambda option: parts.index(option.name) if option.name in parts else len(parts))
