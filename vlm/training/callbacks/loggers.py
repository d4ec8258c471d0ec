"""Loggers for CSV files and Weights & Biases, and a wrapper that keeps training if a logger fails."""

import csv
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import yaml
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment, Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from vlm.errors import Injected, UserError, printable
from vlm.io.files import write_text
from vlm.io.output import csv_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

T = TypeVar("T")
CLOCK_PREFIX = "throughput/"  # metrics that depend on the clock; a resumed run reproduces all others bit for bit


Row: TypeAlias = dict[str, float | str]


class Table:
    """A CSV file with one row per step and one column per metric; a resumed run appends to it.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.columns: dict[str, None] = {}
        self._read = False
        self._text, self._texts = "", 0  # formatted header and first rows, and the number of these rows

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Adds metrics to the last row, or to a new row if the step is new."""
        if not self._read:
            self._read = True
            if self.path.is_file():
                with self.path.open(newline="") as file:
                    # A resumed run repeats the steps after its checkpoint, so their rows are dropped.
                    self.rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
                self._restart_text()
        if self.rows and int(self.rows[-1]["step"]) == step:
            self.rows[-1].update(metrics)
        else:
            self.rows.append({"step": step, **metrics})
        if not self.rows[-1].keys() <= self.columns.keys():
            self._restart_text()

    def _restart_text(self) -> None:
        self.columns |= dict.fromkeys(name for row in self.rows for name in row)
        self._text, self._texts = self._lines([dict(zip(self.columns, self.columns, strict=True))]), 0

    def _lines(self, rows: list[Row]) -> str:
        return csv_text(([row.get(name) for name in self.columns] for row in rows), end="\r\n")

    def save(self) -> None:
        """Writes the file unless there are no rows.

        Raises:
            OSError: It cannot be written.
        """
        if not self.rows:
            return
        done = len(self.rows) - 1  # the last row may get further metrics
        self._text += self._lines(self.rows[self._texts : done])
        self._texts = done
        write_text(self.path, self._text + self._lines(self.rows[-1:]))


class CSVLogger(Logger):
    """Writes `metrics.csv`, and `throughput.csv` with the metrics that depend on the clock.

    Args:
        folder: The run's folder.
    """

    def __init__(self, *, folder: Injected[str]) -> None:
        super().__init__()
        self.metrics, self.throughput = (Table(Path(folder) / f"{name}.csv") for name in ("metrics", "throughput"))

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Row]:
        return self.metrics.rows

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because config.yaml has the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        timed = {name: value for name, value in metrics.items() if name.startswith(CLOCK_PREFIX)}
        if timed:
            self.throughput.add({name.removeprefix(CLOCK_PREFIX): value for name, value in timed.items()}, step or 0)
        if len(timed) < len(metrics):
            self.metrics.add({name: value for name, value in metrics.items() if name not in timed}, step or 0)

    @rank_zero_only
    def save(self) -> None:
        self.metrics.save()
        self.throughput.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


def silence_tensorboard_threads() -> None:
    """Hides tracebacks of TensorBoard's writer thread. FaultTolerantLogger prints a warning instead."""
    original = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            original(args)

    hook.is_filter = True  # type: ignore[attr-defined]
    if not hasattr(original, "is_filter"):
        threading.excepthook = hook


class FaultTolerantLogger(Logger):
    """Wraps a logger and warns once if it fails, instead of stopping the run.

    Each call tries the logger again, so that it recovers when the disk is no longer full.

    Args:
        logger: The wrapped logger.
        label: Its name in the config.
    """

    def __init__(self, logger: Logger, label: str) -> None:
        super().__init__()
        self.logger, self.label = logger, label
        self._warned = False
        silence_tensorboard_threads()

    def _try(self, action: Callable[[], T], otherwise: T | None = None) -> T | None:
        try:
            return action()
        except Exception as fault:  # third-party code may fail in any way
            if not self._warned:
                self._warned = True
                where = f"{fault.filename}: " if isinstance(fault, OSError) and fault.filename else ""
                reason = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
                cause = printable(f"{where}{reason.splitlines()[0]}")
                print(f"warning: logger.{self.label} fails ({cause}); training continues without it", file=sys.stderr)
            return otherwise

    @property
    def name(self) -> str | None:
        return self._try(lambda: self.logger.name)

    @property
    def version(self) -> int | str | None:
        return self._try(lambda: self.logger.version)

    @property
    def root_dir(self) -> str | None:
        return self._try(lambda: self.logger.root_dir)

    @property
    def log_dir(self) -> str | None:
        return self._try(lambda: self.logger.log_dir)

    @property
    def experiment(self) -> Any:
        """The experiment of the wrapped logger."""
        return self._try(lambda: self.logger.experiment, DummyExperiment())  # type: ignore[attr-defined]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._try(lambda: self.logger.log_metrics(metrics, step))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._try(lambda: self.logger.log_hyperparams(params, *args, **kwargs))

    def log_samples(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        """Logs samples with the logger's `log_samples`, or to TensorBoard. Other loggers get no samples."""
        log_samples = getattr(self.logger, "log_samples", None)
        if log_samples is not None:
            self._try(lambda: log_samples(samples, step))
        elif hasattr(self.experiment, "add_image"):
            self._try(lambda: _log_to_tensorboard(self.experiment, samples, step))

    def save(self) -> None:
        self._try(self.logger.save)

    def finalize(self, status: str) -> None:
        self._try(lambda: self.logger.finalize(status))


def _log_to_tensorboard(board: "SummaryWriter", samples: Sequence[dict[str, Any]], step: int) -> None:
    """Logs samples to TensorBoard: their lines as a single text, and the images by number."""
    lines = ["".join(f"    {line}\n" for line in sample["line"].splitlines()) for sample in samples]
    board.add_text("val/samples", "\n".join(lines), step)  # Markdown shows indented lines verbatim
    for number, sample in enumerate(samples):
        if "image" in sample:
            board.add_image(f"val/samples/{number}", sample["image"].cpu(), step)


class WandbLogger(LightningWandbLogger):
    """Lightning's W&B logger that also logs the run's config, and samples with their images.

    A resumed run continues under the id found in its folder.

    Args:
        folder: The run's folder, for the files of wandb.
        project, entity: W&B project of the run, and its owner.
        name: Name of the run in W&B; None for the folder's name.
        offline: Whether to store the run locally instead of sending it; `wandb sync` sends it later.
    Raises:
        UserError: The package wandb is not installed.
    """

    def __init__(
        self, *, folder: Injected[str], project: str, entity: str | None, name: str | None, offline: bool
    ) -> None:
        try:
            import wandb
        except ImportError as fault:
            raise UserError(
                'logger=wandb: the package wandb is not installed; pip install "vlm-lightning[wandb]", or logger=csv'
            ) from fault
        self.folder, self._has_config = Path(folder), False
        ids = sorted(path.name.rpartition("-")[2] for path in (self.folder / "wandb").glob("*run-*-*"))
        options: Any = {"entity": entity, "id": ids[0] if ids else None, "mode": "offline" if offline else None}
        options |= {"settings": wandb.Settings(quiet=True)}
        super().__init__(name=name or self.folder.name, save_dir=folder, project=project, **options)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if not self._has_config:
            self._has_config = True
            import wandb

            if wandb.run is not None:  # of the previous job in a sweep
                wandb.finish()
            config = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
            super().experiment.config.update(config, allow_val_change=True)
        return super().experiment

    @rank_zero_only
    def log_samples(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        """Logs the images of samples with their lines, or only the lines."""
        lines = [[sample["line"]] for sample in samples]
        if all("image" in sample for sample in samples):
            images = [sample["image"].permute(1, 2, 0).cpu().numpy() for sample in samples]  # (H, W, 3)
            self.log_image("val/samples", images, step, caption=[line for (line,) in lines])
        else:
            self.log_text("val/samples", ["sample"], lines, step=step)
