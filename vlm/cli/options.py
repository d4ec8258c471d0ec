"""Options as typer takes them, from functions whose parameters are annotated with `vlm.inference.options.Option`."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from vlm.errors import unknown_choice
from vlm.inference.options import Option

METAVARS = {
    "N": int,
    "X": float,
    "TEXT": str,
    " ": bool,
}  # short names of types in --help, which leave room for the text


def to_typer_command(command: Callable[..., int]) -> Callable[..., int]:
    """Returns a function with a command's options for typer; the fields of a dataclass parameter become options."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if is_dataclass(kind)}
    declared = list(_list_options(command))
    options = {name: get_args(hint)[1] for name, hint, _ in declared}

    def run(**values: Any) -> int:
        _check_values(options, values)
        parts = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})  # type: ignore[operator]
            for name, kind in groups.items()
        }
        return command(**values, **parts)

    parameters = sorted(
        (_make_parameter(*option) for option in declared),
        key=lambda parameter: parameter.default is not inspect.Parameter.empty,
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _check_values(options: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Checks the values of a command line, whose names and types typer has checked, before the command runs.

    Raises:
        UserError: A value is not one of its choices, or the check of an option refuses it.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if (choices := options[name].choices) and value not in choices:
            flag = options[name].flags[-1] if options[name].flags else f"--{name}"
            raise unknown_choice(flag, value, choices)
    for name, value in given.items():
        if (check := options[name].check) is not None:
            check(value)


def _list_options(command: Callable[..., int]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the annotated type and the default of each option."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            yield name, kind, parameter.default
            continue
        inner = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield field.name, inner[field.name], default


def _make_parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    kind: Any
    option: Option
    kind, option = get_args(hint)
    kind = kind if option.cli_type is None else option.cli_type
    if option.positional:
        argument: Any = typer.Argument(help=option.help, metavar=option.metavar or name.upper())
    else:
        metavar = option.metavar or next(
            name for name, type_of_metavar in METAVARS.items() if type_of_metavar in _nested_types(kind)
        )
        argument = typer.Option(*option.flags, help=option.help, metavar=metavar, min=option.least, max=option.most)
    annotation = Annotated[kind, argument]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _nested_types(hint: Any) -> list[Any]:
    """Returns a type and all types inside it."""
    return [hint, *(inner for part in get_args(hint) for inner in _nested_types(part))]
