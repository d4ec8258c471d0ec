"""A logger that cannot stop training."""

import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers.logger import DummyExperiment, Logger

from vlm.errors import printable


def silence_writer_threads() -> None:
    """Stops TensorBoard's writer thread from printing tracebacks; a warning is printed anyway."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    hook.hushes = True  # type: ignore[attr-defined]
    if not hasattr(before, "hushes"):
        threading.excepthook = hook


def _passed_on(attribute: str) -> Any:
    """Returns a property that reads an attribute of the wrapped logger."""
    return property(lambda steady: steady._try(lambda: getattr(steady.logger, attribute)))


class FaultTolerantLogger(Logger):
    """Wraps a logger and warns once if it fails, instead of stopping the run.

    Each call tries the logger again, so that one whose disk was full for a while goes on.

    Args:
        logger: The wrapped logger.
        label: Its name in the config.
    """

    def __init__(self, logger: Logger, label: str) -> None:
        super().__init__()
        self.logger, self.label = logger, label
        self._warned = False
        silence_writer_threads()

    def _try(self, action: Callable[[], Any], otherwise: Any = None) -> Any:
        try:
            return action()
        except Exception as fault:  # third-party code may fail in any way
            if not self._warned:
                self._warned = True
                where = f"{fault.filename}: " if isinstance(fault, OSError) and fault.filename else ""
                reason = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
                why = printable(f"{where}{reason.splitlines()[0]}")
                print(f"warning: logger.{self.label} fails ({why}); training goes on without it", file=sys.stderr)
            return otherwise

    name, version, root_dir, log_dir = map(_passed_on, ("name", "version", "root_dir", "log_dir"))

    @property
    def experiment(self) -> Any:
        """The experiment of the wrapped logger."""
        return self._try(lambda: self.logger.experiment, DummyExperiment())  # type: ignore[attr-defined]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._try(lambda: self.logger.log_metrics(metrics, step))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._try(lambda: self.logger.log_hyperparams(params, *args, **kwargs))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Logs samples by the logger's own `log_samples`, or to TensorBoard; other loggers get none."""
        own = getattr(self.logger, "log_samples", None)
        if own is not None:
            self._try(lambda: own(samples, step))
        elif hasattr(self.experiment, "add_image"):
            self._try(lambda: _show(self.experiment, samples, step))

    def save(self) -> None:
        self._try(self.logger.save)

    def finalize(self, status: str) -> None:
        self._try(lambda: self.logger.finalize(status))


def _show(board: Any, samples: Sequence[Mapping[str, Any]], step: int) -> None:
    """Adds samples to TensorBoard: their lines as one text, and each image under its number."""
    lines = ["".join(f"    {line}\n" for line in sample["line"].splitlines()) for sample in samples]
    board.add_text("val/samples", "\n".join(lines), step)  # Markdown shows indented lines verbatim
    for place, sample in enumerate(samples):
        if "image" in sample:
            board.add_image(f"val/samples/{place}", sample["image"].cpu(), step)
