"""Features of a frozen encoder, kept from run to run: what a config must be for it, and how a run comes by them."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from vlm.config.build import build
from vlm.config.target import find

PATIENCE = timedelta(days=7)  # others wait for the process that makes them, for as long as it lives


def feature_faults(config: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each reason why the features of a config's encoder cannot be kept."""
    data, encoder = config["data"], config["model"].get("encoder")
    if not data.get("cache_features") or not encoder:
        return
    from vlm.data.features.fingerprint import augment_fault
    from vlm.models.frozen_features import projects

    parts = ["encoder", *(["encoder.backbone"] if projects(find(encoder["_target_"])) else [])]
    if not set(parts) & set(config["task"].get("freeze", ())):
        yield f"data.cache_features: the encoder is trained, and what it makes changes; set task.freeze=[{parts[-1]}]"
    fault = augment_fault(build(data["augment"], "data.augment"))
    if fault:
        yield f"data.cache_features: {fault}, or set it to false"
    for name in ("mixup", "cutmix"):
        if config["task"].get(name):
            yield f"data.cache_features: task.{name} mixes pixels, of which there are none then; set it to 0"


def keep_features(run: Any, folder: Path) -> None:
    """Lets a run read the features of its training images, which are made where they are not in the cache yet.

    Args:
        run: The vlm.training.run.Run.
        folder: The cache.
    Raises:
        UserError: There is no room for them, or they cannot be written.
    """
    from vlm.training.feature_cache import Keeper
    from vlm.training.processes import first, first_alone

    trainer = run.trainer
    keeper = Keeper(
        encoder=run.task.model.encoder,
        spec=run.task.about["model"]["args"]["encoder"],
        data=run.data,
        device=trainer.strategy.root_device,
        precision=str(trainer.precision),
        context=trainer.precision_plugin.forward_context,
    )
    with first_alone(PATIENCE):  # what it writes, the others read
        run.data.use_features(keeper.keep(folder, lambda line: print(line, flush=True) if first() else None))
