"""A logger for Weights & Biases."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import WandbLogger as Lightnings
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from vlm.errors import Injected, UserError


class WandbLogger(Lightnings):
    """Lightning's logger, extended to log the run's config, and samples with their images.

    A resumed run continues under the id found in its folder.

    Args:
        folder: The run's folder, for the files of wandb.
        project, entity: Project of the run, and its owner.
        name: Name of the run in W&B; None for the folder's name.
        offline: Whether to send nothing; `wandb sync` does that later.
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
        self.folder, self.began = Path(folder), False
        ids = sorted(path.name.rpartition("-")[2] for path in (self.folder / "wandb").glob("*run-*-*"))
        options: Any = {"entity": entity, "id": ids[0] if ids else None, "mode": "offline" if offline else None}
        options |= {"settings": wandb.Settings(quiet=True)}
        super().__init__(name=name or self.folder.name, save_dir=folder, project=project, **options)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if not self.began:
            self.began = True
            import wandb

            if wandb.run is not None:  # of the previous job in a sweep
                wandb.finish()
            config = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
            super().experiment.config.update(config, allow_val_change=True)
        return super().experiment

    @rank_zero_only
    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Logs the images of samples with their lines, or only the lines."""
        lines = [[sample["line"]] for sample in samples]
        if all("image" in sample for sample in samples):
            images = [sample["image"].permute(1, 2, 0).cpu().numpy() for sample in samples]  # (H, W, 3)
            self.log_image("val/samples", images, step, caption=[line for (line,) in lines])
        else:
            self.log_text("val/samples", ["sample"], lines, step=step)
