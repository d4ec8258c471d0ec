"""Stand-ins for libraries that take seconds to import, so that a config can be checked without them.

`install` replaces torch, Lightning and the like in a process that ends after the check. Modules of vlm that import them
can then be imported, and the signatures of their classes inspected, but nothing can be computed. Those classes of the
libraries that a config may name have the signatures in their source files.
"""

import ast
import builtins
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator
from functools import cached_property
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

LIBRARIES = (
    "numpy",
    "PIL",
    "torch",
    "lightning",
    "torchmetrics",
    "torchvision",
    "timm",
    "transformers",
    "tensorboard",
    "peft",
)
# Parts of vlm with nothing that a config may name, and that no argument of such a class is annotated with.
PARTS = (
    "vlm.models.pretrained",
    *("vlm.checkpoint.load", "vlm.checkpoint.adapters", "vlm.checkpoint.base", "vlm.checkpoint.save"),
    *("vlm.checkpoint.hugging_face", "vlm.inference.use", "vlm.inference.attention"),
)
NAMED = ("torch.optim", "lightning")  # packages whose classes a config may name


class LibraryNeeded(BaseException):
    """A function of a replaced library is called; no UserError may be made of it."""


class StandInMeta(ABCMeta):
    """The class of stand-ins: each has any attribute, can be subclassed and subscripted, and computes nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = stand_in(name, f"{cls.__module__}.{cls.__qualname__}")
        setattr(cls, name, attribute)
        return attribute

    @property
    def __signature__(cls) -> inspect.Signature:  # inspect would return that of __call__ below
        _, *others = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(others)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        if sys._getframe(1).f_code.co_flags & inspect.CO_OPTIMIZED:
            raise LibraryNeeded(cls.__qualname__)
        raise TypeError(f"{cls.__qualname__} stands in for an unknown object")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_flags & inspect.CO_OPTIMIZED:  # in a function, not while a module or class is defined
            raise LibraryNeeded(cls.__qualname__)
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | type):  # a decorator
            return args[0]
        return stand_in("value", cls.__module__)


def stand_in(name: str, module: str) -> Any:
    return StandInMeta(name, (), {"__module__": module})


class StandInModule(ModuleType):
    """A module of a replaced library; attributes are modules, or classes with signatures, or plain stand-ins."""

    def __init__(self, name: str, file: Path | None) -> None:
        super().__init__(name)
        self._file = file
        self.__path__ = [str(file.parent)] if file and file.name == "__init__.py" else []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            try:
                return version(self.__name__)
            except PackageNotFoundError:
                raise AttributeError(name) from None
        if name.startswith("__"):
            raise AttributeError(name)
        if _source(f"{self.__name__}.{name}"):
            __import__(f"{self.__name__}.{name}")
            return sys.modules[f"{self.__name__}.{name}"]
        if not f"{self.__name__}.".startswith(tuple(f"{package}." for package in NAMED)):
            attribute = stand_in(name, self.__name__)
        elif name in self._definitions:
            attribute = self._define(name)
        else:
            raise AttributeError(f"{self.__name__} has no {name}")
        setattr(self, name, attribute)
        return attribute

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._definitions]

    @cached_property
    def _definitions(self) -> dict[str, ast.stmt]:
        """The statements that define the names of a module."""
        tree = ast.parse(self._file.read_bytes()) if self._file else ast.Module([], [])
        return {name: statement for statement in _statements(tree.body) for name in _names(statement)}

    def _define(self, name: str) -> Any:
        statement = self._definitions[name]
        if isinstance(statement, ast.ImportFrom):
            package = self.__name__ if self.__path__ else self.__name__.rpartition(".")[0]
            levels = package.split(".")
            home = ".".join([*levels[: len(levels) - statement.level + 1], *filter(None, [statement.module])])
            module = __import__(home if statement.level else str(statement.module), fromlist=["_"])
            return getattr(
                module, next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
            )
        if isinstance(statement, ast.ClassDef):
            bases = tuple(base for node in statement.bases if isinstance(base := self._value(node), StandInMeta))
            members = {"__module__": self.__name__, "__qualname__": name, "__doc__": None}
            functions = {node.name: node for node in statement.body if isinstance(node, ast.FunctionDef)}
            if function := functions.get("__init__"):
                members["__init__"] = self._function(function)  # type: ignore[assignment]
            return StandInMeta(name, bases, members)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return self._value(statement.value)
        return stand_in(name, self.__name__)

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression in this module; a stand-in if it cannot be evaluated."""
        try:
            return eval(compile(ast.Expression(node), self.__name__, "eval"), self._scope(node))
        except Exception:  # any expression of a library
            return stand_in("value", self.__name__)

    def _scope(self, node: ast.AST) -> dict[str, Any]:
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - vars(builtins).keys()
        imports = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        return {name: getattr(self, name) for name in names | imports if name in self._definitions}

    def _function(self, node: ast.FunctionDef) -> FunctionType:
        """A function with the signature of another one; annotations are evaluated."""
        arguments = node.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        hints = {one.arg: self._value(one.annotation) for one in listed if one.annotation is not None}
        for one in [*listed, *filter(None, [arguments.vararg, arguments.kwarg])]:
            one.annotation = None
        constant = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
        shown = {id(one): one if isinstance(one, ast.Constant) else ast.Constant(...) for one in constant}
        arguments.defaults = [shown[id(one)] for one in arguments.defaults]
        arguments.kw_defaults = [one and shown[id(one)] for one in arguments.kw_defaults]
        plain = ast.FunctionDef(node.name, arguments, [ast.Pass()], [])
        scope: dict[str, Any] = {}
        module = ast.fix_missing_locations(ast.Module([plain], []))
        exec(compile(module, self.__name__, "exec"), scope)
        function: FunctionType = scope[node.name]
        function.__annotations__ = hints
        return function


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements([*statement.body, *statement.orelse])
        else:
            yield statement


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


_folders: dict[str, Path | None] = {}


def _source(name: str) -> Path | None:
    """The source file of a module of a replaced library; None if there is none."""
    first, *rest = name.split(".")
    folder = _folders.get(first)
    if folder is None:
        return None
    for file in (folder.joinpath(*rest) / "__init__.py", folder.joinpath(*rest).with_suffix(".py")):
        if file.is_file():
            return file
    return None


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.startswith("vlm."):
            is_part = f"{name}.".startswith(tuple(f"{part}." for part in PARTS))
            return ModuleSpec(name, self, is_package=True) if is_part else None
        if name.split(".")[0] not in _folders:
            return None
        strict = f"{name}.".startswith(tuple(f"{package}." for package in NAMED))
        return None if strict and _source(name) is None else ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name, _source(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Replaces the libraries in this process; call it before any of them is imported."""
    for name in LIBRARIES:
        spec = find_spec(name)
        _folders[name] = Path(spec.origin).parent if spec and spec.origin else None
    sys.meta_path.insert(0, _Finder())
