"""Arguments of commands that name inputs. torch is imported only when images are named."""

import errno
import glob
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from vlm.errors import UserError, excerpt
from vlm.inference.options import Kind, Option, as_list

GAP = "[MASK]"
Texts = Annotated[list[str] | None, Option("Input text. Repeatable. By default, lines of stdin.")]
Files = Annotated[list[str], Option("Images, or text files if the model reads texts.", positional=True)]


@dataclass(kw_only=True)
class Arguments(ABC):
    """The arguments of a command that specify its inputs; each field is annotated with an `Option`.

    Attributes:
        kind: The kind of an input: text or image.
        words: The field for the arguments of `vlm predict`.
        types: Types of an input in Python.
    """

    kind: ClassVar[Kind] = "text"
    words: ClassVar[str] = "text"
    types: ClassVar[tuple[type, ...]] = (str,)

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Self:
        """Returns the arguments for `vlm predict WORDS`."""
        return cls(**{cls.words: list(words)})

    @abstractmethod
    def read(self) -> list[Any]:
        """Returns the inputs.

        Raises:
            UserError: There are no inputs, or an input cannot be read.
        """

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        """Returns the files that are read for the inputs from `read`; outputs may not replace them."""
        return []

    @classmethod
    def from_python(cls, value: Any) -> tuple[list[Any], bool]:
        """Converts a value in Python to inputs; also returns whether it was a single input.

        Raises:
            UserError: It is not an input.
        """
        is_single = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
        inputs = [value] if is_single else list(value)
        for item in inputs:
            if not isinstance(item, cls.types):
                raise UserError(f"inputs: a {type(item).__name__} is not a {cls.kind}; give a str or a list of them")
        check_utf8([item for item in inputs if isinstance(item, str)])
        return inputs, is_single


@dataclass(kw_only=True)
class WordArguments(Arguments):
    """Words of the command line: the default inputs for a task of a user's package."""

    words = "inputs"
    types = (object,)
    inputs: Annotated[list[str], Option("Inputs.", positional=True)]

    def read(self) -> list[str]:
        return list(self.inputs)


@dataclass(kw_only=True)
class ImageArguments(Arguments):
    """Images; in Python also Pillow images and arrays."""

    kind = "image"
    words = "images"
    images: Annotated[list[str], Option("Image files, folders or patterns.", positional=True)]

    def read(self) -> list[str]:
        from vlm.inference.inputs import find_images

        return find_images(self.images)

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(map(str, inputs))

    @classmethod
    def from_python(cls, value: Any) -> tuple[list[Any], bool]:
        from vlm.inference.inputs import collect_images

        return collect_images(value)


@dataclass(kw_only=True)
class ImageFileArguments(Arguments):
    """Image files; one may be given several times, for models that read several images together."""

    kind = "image"
    words = "files"
    files: Files

    def read(self) -> list[str]:
        from vlm.inference.inputs import find_images

        return find_images(self.files, repeated=True)

    paths = ImageArguments.paths
    from_python = ImageArguments.from_python


@dataclass(kw_only=True)
class FileArguments(Arguments):
    """Text files, each one input. In Python a `Path` is a file, and a str is the text itself."""

    words = "files"
    types = (str, os.PathLike)
    files: Files

    def read(self) -> list[Path]:
        return list(map(Path, self.files))

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(map(str, inputs))


@dataclass(kw_only=True)
class TextArguments(Arguments):
    """Texts; on a command line, lines of stdin by default."""

    text: Texts = None

    def read(self) -> list[str]:
        return read_texts([], self.text or [])


@dataclass(kw_only=True)
class LineArguments(Arguments):
    """Texts; on a command line, lines of files, or of stdin by default."""

    files: Annotated[list[str] | None, Option("Files with one text per line. By default, stdin.", positional=True)] = (
        None
    )
    text: Texts = None

    def read(self) -> list[str]:
        return read_texts(self.files or [], self.text or [])

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(self.files or [])


@dataclass(kw_only=True)
class MaskedTextArguments(Arguments):
    """Texts with gaps, by default lines of stdin."""

    words = "texts"
    texts: Annotated[
        list[str] | None, Option(f"Texts with {GAP} for each masked word. By default, lines of stdin.", positional=True)
    ] = None

    def read(self) -> list[str]:
        return read_texts([], self.texts or [])


@dataclass(kw_only=True)
class PromptArguments(Arguments):
    """Prompts; on a command line, lines of stdin by default."""

    words = "prompt"
    prompt: Annotated[list[str] | None, Option("Text to continue. Repeatable. By default, lines of stdin.")] = None

    def read(self) -> list[str]:
        return read_texts([], self.prompt or [], named="--prompt TEXT")


@dataclass(kw_only=True)
class EmbeddingArguments(Arguments):
    """Images and texts. In Python a str is a text, to a model that reads none a path."""

    types = (object,)  # `prepare` checks them
    files: Annotated[
        list[str] | None,
        Option("Images, folders or patterns; for a model of texts, files with one text per line.", positional=True),
    ] = None
    text: Texts = None

    def read(self) -> list[Any]:
        texts = read_texts([], self.text or []) if self.text or not self.files else []
        return [*map(Path, self.files or []), *texts]

    def paths(self, inputs: Sequence[Any]) -> list[str]:
        return list(self.files or [])

    @classmethod
    def from_python(cls, value: Any) -> tuple[list[Any], bool]:
        import numpy as np

        from vlm.inference.inputs import collect_images

        return collect_images(value) if isinstance(value, np.ndarray) else super().from_python(value)


class ImagesToEmbed(EmbeddingArguments):
    """The arguments for a model that reads no texts."""

    kind = "image"


def read_texts(files: Sequence[str], texts: Sequence[str], *, named: str = "--text TEXT, a file") -> list[str]:
    """Returns texts and the lines of files, or of stdin if there are neither; only a line feed ends a line.

    Args:
        named: The arguments to suggest in an error message.
    Raises:
        UserError: There is no text, a file cannot be read, or a text is not UTF-8.
    """
    from vlm.data.text.words import read_lines, split_lines  # Pillow and regex, which `vlm --help` needs not

    lines = [] if files or texts else split_lines("".join(sys.stdin))
    for file in files:
        lines += split_lines("".join(read_lines(Path(file))))
    lines = [*texts, *lines]
    if files and not lines:
        raise UserError(f"{files[0]}: is empty; write one text per line")
    if not lines:
        raise UserError(f"no input text; give {named}, or one text per line on stdin")
    check_utf8(lines)
    return lines


def list_questions(question: str | list[str]) -> list[str]:
    """Returns the questions of an option as a list.

    Raises:
        UserError: There is none, or one is empty or not UTF-8.
    """
    questions = as_list(question)
    if not questions or not all(map(str.strip, questions)):
        raise UserError(f"--question: {'is empty' if questions else 'missing'}; give a question, or several")
    check_utf8(questions)
    return questions


def single_prompt(prompt: str | list[str] | None) -> str | None:
    """Returns the prompt of an option, if there is one.

    Raises:
        UserError: There are several.
    """
    prompts = [] if prompt is None else as_list(prompt)
    if len(prompts) > 1:
        raise UserError("--prompt: given more than once; this model takes one")
    check_utf8(prompts)
    return next(iter(prompts), None)


def check_utf8(texts: Sequence[str]) -> None:
    """Checks that texts are valid UTF-8.

    Raises:
        UserError: One is not.
    """
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise UserError(f"text {excerpt(text)}: is not UTF-8; give text in UTF-8")


def check_readable(files: Sequence[str], *, status: int = 1) -> None:
    """Checks that at least one of the files that a command names can be read, before a model is loaded.

    Loading takes seconds. If only some of the files cannot be read, these are named when the others have results.

    Args:
        files: Files, folders and patterns; "-" for names on stdin.
        status: The exit status if none can be read.
    Raises:
        UserError: None can be read.
    """
    faults = []
    for file in files:
        if file in ("", "-") or "\0" in file:
            return
        try:
            os.stat(file)
            reason = None if os.access(file, os.R_OK) else os.strerror(errno.EACCES)
        except OSError as fault:
            reason = None if glob.has_magic(file) else fault.strerror
        if reason is None:
            return
        faults.append(f"{file}: {reason}")
    if faults:
        raise UserError("\n".join(faults), status)
