"""Speed of training, and the share of the device that it uses."""

import resource
import sys
import time
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor

from vlm.models.flop import Flop, model_flop
from vlm.training.step import compiling
from vlm.training.step.step import accumulates, is_logged, summed
from vlm.training.step.task import Task

# Peak FLOP/s of dense matrix products in 16 bits, in TF32 and in plain 32 bits. Where a source includes a factor of two
# for sparse matrices, it is taken out. Sources: NVIDIA's data sheets of the H200, H100, A100, L40S and L4, and the
# white papers of the Ada and Ampere GeForce cards (16 bits, summed in 32). The keys are full device names.
PEAKS = {
    "NVIDIA H200": (989e12, 494e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494e12, 67e12),
    "NVIDIA H100 PCIe": (756e12, 378e12, 51e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12, 19.5e12),
    "NVIDIA L40S": (362e12, 183e12, 91.6e12),
    "NVIDIA L4": (121e12, 60e12, 30.3e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12, 82.6e12),
    "NVIDIA GeForce RTX 3090": (71e12, 35.6e12, 35.6e12),
}


class Throughput(L.Callback):
    """Logs, as `throughput/...`, at the trainer's logging interval and over the steps since the last time:

    - `images_per_s`, `tokens_per_s`: of all devices; tokens that the loss counts, without padding. A task that
      counts texts or words has `texts_per_s` or `words_per_s`.
    - `data_wait`: share of the time in which this process waited for its loader.
    - `flop_per_s`: of all devices, as vlm.models.flop counts; `mfu`: this over the device's peak, if PEAKS has it.
    - `peak_memory_gib`: so far; what torch allocated on a GPU, else what this process held, its workers not counted.

    The time of validation and torch.compile is not counted. Only logging waits for the device.
    """

    def __init__(self) -> None:
        self.flop: Flop | None = None
        self._since = self._compiled = self._paused = 0.0
        self._counted: Tensor | float = 0.0
        self.loader: Any = None
        self.restart()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        preprocess: Any = getattr(pl_module, "preprocess", None)
        try:
            self.flop = model_flop(cast(Task, pl_module).model, image_size=getattr(preprocess, "image_size", 0))
        except TypeError:  # a custom model; the other figures are logged
            self.flop = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loader = trainer.train_dataloader
        self.restart()

    def restart(self) -> None:
        """Measures from now on."""
        self._since, self._compiled = time.perf_counter(), compiling.seconds()
        self._waited = self.loader.waited if self.loader else 0.0
        self._images, self._tokens, self._flop, self._counted = 0, False, 0.0, 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        task = cast(Task, pl_module)
        self.add(task, batch, outputs)
        if is_logged(trainer.global_step, trainer) and not accumulates(trainer):
            figures = {f"throughput/{name}": value for name, value in self.figures(trainer, task).items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, trainer.global_step - 1)
            self.restart()

    def add(self, task: Task, batch: Any, outputs: Any) -> None:
        """Counts a batch that this process has trained on.

        Args:
            outputs: Outputs of the training step, with the count of the loss's first term.
        """
        if self._paused:  # leaves out the validation, up to the request for this batch
            self._since += self.loader.asked - self._paused
            self._paused = 0.0
        self._counted = self._counted + outputs["count"]
        work = task.work(batch)
        self._images, self._tokens = self._images + work.images, self._tokens or work.rows > 0
        if self.flop is not None:
            self._flop += self.flop.training(work, 0)

    def figures(self, trainer: L.Trainer, task: Task) -> dict[str, float]:
        """Returns the figures to log of the steps since the last restart; all ranks call it together."""
        elapsed = time.perf_counter() - self._since - (compiling.seconds() - self._compiled)
        counted = float(self._counted)
        flop = self._flop + (0.0 if self.flop is None else 3 * self.flop.head * counted)
        waited = self.loader.waited - self._waited
        own = torch.tensor([self._images, counted, flop, waited], dtype=torch.float64)
        images, tokens, flop, waited = summed(own.to(task.device) if trainer.world_size > 1 else own, trainer).tolist()
        peak = peak_flop(trainer, task.device)
        values = {
            "images_per_s": images / elapsed if self._images else None,
            f"{task.counted_unit}_per_s": tokens / elapsed if self._tokens else None,
            "data_wait": waited / trainer.world_size / elapsed,
            "flop_per_s": flop / elapsed if self.flop is not None else None,
            "mfu": flop / elapsed / peak / trainer.world_size if self.flop is not None and peak else None,
            "peak_memory_gib": peak_memory(task.device) / 2**30,
        }
        return {name: float(f"{value:.5g}") for name, value in values.items() if value is not None}


def peak_flop(trainer: L.Trainer, device: torch.device) -> float | None:
    """Peak FLOP/s of a device in the precision of a trainer; None for a device that PEAKS does not list."""
    if device.type != "cuda" or (peaks := PEAKS.get(torch.cuda.get_device_name(device))) is None:
        return None
    half, tf32, single = peaks
    if "16" in str(trainer.precision):
        return half
    return single if torch.get_float32_matmul_precision() == "highest" else tf32


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of torch's tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would start from the peak of the parent process
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
