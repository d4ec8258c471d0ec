"""Commands of the tasks, as their files in this folder state them.

A file that uses a task's models is named as the task is. It states its command in a literal,
``COMMAND = {"name": "caption", "help": "..."}``, and defines it in a function `command`, whose parameters are options
as in `vlm.inference.options`. The literal is read without importing the file, which would import torch. A further
command is a further literal, ``COMMAND_RETRIEVE``, which names its "function".
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """A command of `vlm`.

    Args:
        task: The task whose models it uses.
        name: Its name on the command line.
        help: Its line in --help.
        function: Its function in the module.
    """

    task: str
    name: str
    help: str
    function: str = "command"

    @property
    def module(self) -> str:
        return f"{__package__}.{self.task}"


@cache
def commands() -> tuple[Command, ...]:
    """All commands of tasks."""
    return tuple(_commands())


def _commands() -> Iterator[Command]:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "\nCOMMAND = " in text else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("COMMAND"):
                yield Command(path.stem, **ast.literal_eval(node.value))
