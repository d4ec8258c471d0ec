"""vlm: train, resume, evaluate and use small vision-language models."""

__version__ = "0.2.0"
__all__ = ["Error", "Model", "Run", "load", "score", "train"]

import os

if os.name == "nt":  # runs use POSIX locks, signals and memory limits
    raise SystemExit("error: vlm runs on Linux, on macOS and in WSL, but not on Windows itself")

TYPE_CHECKING = False  # type checkers assume True; importing typing would cost more than all the rest
if TYPE_CHECKING:
    from vlm.api import Error, Model, Run, load, score, train
else:

    def __getattr__(name: str) -> object:
        """Imports the names of the API when they are used; importing vlm itself loads nothing."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from vlm import api

        return getattr(api, name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
