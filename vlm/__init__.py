"""vlm: train, resume, evaluate and use small vision-language models."""

__version__ = "0.2.0"
__all__ = ["Error", "Model", "Run", "load", "score", "train"]

import os

if os.name == "nt":  # locks, signals and memory limits of a run are POSIX's
    raise SystemExit("error: vlm runs on Linux, on macOS and in WSL, but not on Windows itself")

TYPE_CHECKING = False  # true for a checker of types; the module of that name costs more than all the rest
if TYPE_CHECKING:
    from vlm.api import Error, Model, Run, load, score, train
else:

    def __getattr__(name: str) -> object:
        """The names of the API, imported when they are used: importing vlm itself loads nothing."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from vlm import api

        return getattr(api, name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
