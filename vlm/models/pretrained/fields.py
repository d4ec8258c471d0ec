"""Values of a stranger's JSON file, read by name: each has a type and a range, and a fault is one line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlm.errors import UserError
from vlm.nn.image_size import plain

REQUIRED: Any = object()  # default of a field that a file has to state


@dataclass(frozen=True)
class Entry:
    """A value of a file.

    Args:
        name: Its name there.
        default: Value of a file that leaves it out, in the file's terms; null counts as left out where this is None.
        wanted: What it has to be, in words.
        read: Our value of theirs; ValueError, KeyError or TypeError for one that does not fit.
        write: Their value of ours; ValueError says what it is not.
    """

    name: str
    default: Any
    wanted: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def integer(name: str, default: Any = None, low: int = 1, high: int = 2**20) -> Entry:
    return Entry(name, default, f"a whole number from {low} to {high}", lambda value: _within(value, (int,), low, high))


def number(name: str, default: Any = None, low: float = 0, high: float = 1) -> Entry:
    return Entry(name, default, f"a number from {low:g} to {high:g}", lambda v: _within(v, (int, float), low, high))


def numbers(name: str, default: Any, count: int, low: float, high: float) -> Entry:
    """A list of `count` numbers."""

    def read(values: Any) -> list[float]:
        if type(values) is not list or len(values) != count:
            raise ValueError
        return [_within(value, (int, float), low, high) for value in values]

    return Entry(name, default, f"a list of {count} numbers from {low:g} to {high:g}", read)


def flag(name: str, default: Any = None) -> Entry:
    return Entry(name, default, "true or false", lambda value: _within(value, (bool,), False, True))


def text(name: str, default: Any = None) -> Entry:
    def read(value: Any) -> str:
        if type(value) is not str:
            raise ValueError
        return value

    return Entry(name, default, "a text", read)


def choice(name: str, default: Any, options: Mapping[Any, Any]) -> Entry:
    """One of several values, each with its name of ours; of two that mean the same, the first is written."""
    back = {ours: theirs for theirs, ours in reversed([*options.items()])}

    def write(value: Any) -> Any:
        if value not in back:
            raise ValueError(f"not one of {', '.join(dict.fromkeys(options.values()))}")
        return back[value]

    return Entry(name, default, f"one of {', '.join(map(str, options))}", options.__getitem__, write)


def square(name: str, default: Any) -> Entry:
    """The side of a square, stated as one number or as two."""

    def read(value: Any) -> int:
        sides = value if type(value) is list and len(value) == 2 else [value]
        if len({_within(side, (int,), 1, 4096) for side in sides}) != 1:
            raise ValueError
        return sides[0]

    def write(value: Any) -> Any:
        if not isinstance(value, int):
            raise ValueError("not a square")
        return value

    return Entry(name, default, "the side of a square, from 1 to 4096", read, write)


def image_size(name: str, default: Any) -> Entry:
    """The side of square images, or their height and width."""

    def read(value: Any) -> int | list[int]:
        each = value if type(value) is list and len(value) == 2 else [value]
        height, width = (each * 2)[:2]
        return plain((_within(height, (int,), 1, 4096), _within(width, (int,), 1, 4096)))

    return Entry(name, default, "a side, or height and width, from 1 to 4096", read)


def _within(value: Any, kinds: tuple[type, ...], low: Any, high: Any) -> Any:
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError
    return value


class Fields:
    """An object of a JSON file.

    Args:
        values: Its content.
        file: The file's path.
        within: Where the object stands in the file, such as "text_config.".
    """

    def __init__(self, values: Mapping[str, Any], file: str, within: str = "") -> None:
        self.values, self.file, self.within = values, file, within

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __or__(self, values: Mapping[str, Any]) -> "Fields":
        """The object with other values."""
        return Fields({**self.values, **values}, self.file, self.within)

    def read(self, field: Entry) -> Any:
        """The value of a field, in our terms.

        Raises:
            UserError: It is missing, or is not what it has to be.
        """
        value = self.values.get(field.name, field.default)
        if value is REQUIRED:
            raise UserError(f"{self.file}: has no {self.within}{field.name}; choose another folder")
        if value is None and field.default is None:
            return None
        try:
            return field.read(value)
        except (ValueError, KeyError, TypeError):
            raise self.fault(field.name, f"not {field.wanted}") from None

    def part(self, name: str, default: Mapping[str, Any] | None = None) -> "Fields":
        """An object within this one.

        Raises:
            UserError: It is missing and has no default, or is no object.
        """
        value = self.values.get(name, default)
        if not isinstance(value, Mapping):
            if value is None:
                raise UserError(f"{self.file}: has no {self.within}{name}; choose another folder")
            raise self.fault(name, "not an object")
        return Fields(value, self.file, f"{self.within}{name}.")

    def require(self, needed: Mapping[str, Any], who: str) -> None:
        """Refuses other values than those needed; one that is left out is as needed.

        Args:
            who: What else would compute something else.
        Raises:
            UserError: One is another.
        """
        for name, value in needed.items():
            if self.values.get(name, value) != value:
                raise self.fault(name, f"which {who} does not do")

    def fault(self, name: str, words: str) -> UserError:
        """A fault of a value, as one line."""
        value = " ".join(f"{self.values.get(name)!r:.60}".split())
        return UserError(f"{self.file}: {self.within}{name} is {value}, {words}; choose another folder")
