"""Cached features of a frozen encoder: each training image is encoded once, for all runs."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlm.config.build import build
from vlm.config.target import find
from vlm.data.features import FeatureFile, Layout, find_augment_problem, is_complete, open_features, source_hash
from vlm.data.images.image import Preprocess
from vlm.data.store.cache_file import file_lock
from vlm.models.context import Features, features_of, frozen_part, projects
from vlm.models.encoder_decoder import CHUNK_SIZE
from vlm.training.data_module import Data
from vlm.training.run.processes import is_rank_zero, rank_zero_first

PATIENCE = timedelta(days=7)  # how long the other ranks wait for the one that computes


def feature_faults(config: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each reason why the features of a config's encoder cannot be cached."""
    data, encoder = config["data"], config["model"].get("encoder")
    if not data.get("cache_features") or not encoder:
        return
    parts = ["encoder", *(["encoder.backbone"] if projects(find(encoder["_target_"])) else [])]
    if not set(parts) & set(config["task"].get("freeze", ())):
        yield f"data.cache_features: the encoder is trained, so its features change; set task.freeze=[{parts[-1]}]"
    fault = find_augment_problem(build(data["augment"], "data.augment"))
    if fault:
        yield f"data.cache_features: {fault}, or set it to false"
    for name in ("mixup", "cutmix"):
        if config["task"].get(name):
            yield f"data.cache_features: task.{name} mixes pixels, but training reads features; set it to 0"


def use_cached_features(run: Any, folder: Path) -> None:
    """Makes a run read the features of its training images; missing ones are computed and cached.

    Args:
        run: The vlm.training.run.run.Run.
        folder: The cache.
    Raises:
        UserError: There is no room for them, or they cannot be written.
    """
    trainer = run.trainer
    builder = FeatureCacheBuilder(
        encoder=run.task.model.encoder,
        spec=run.task.about["model"]["args"]["encoder"],
        data=run.data,
        device=trainer.strategy.root_device,
        precision=str(trainer.precision),
        context=trainer.precision_plugin.forward_context,
    )
    with rank_zero_first(PATIENCE):  # rank zero writes the features that the other ranks read
        run.data.use_features(builder.build(folder, lambda line: print(line, flush=True) if is_rank_zero() else None))


def as_read(images: Tensor | Features, preprocess: Preprocess) -> Tensor | Features:
    """The images of a training batch as model input: normalised pixels, or cached features."""
    return images if isinstance(images, Features) else preprocess.normalize(images)


class FeatureCacheBuilder:
    """Computes the features of a run's training images.

    They are computed on training's device and in its precision, and stored in the resulting dtype. Training is then the
    same as without them, except for rounding where the order of sums depends on the batch.

    Args:
        encoder: The encoder; its frozen part has the run's weights.
        spec: Its name and arguments, as checkpoints hold them.
        data: The training images.
        device: Where training computes.
        precision: Precision of training.
        context: Returns a context in which a forward pass has this precision.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        spec: Mapping[str, Any],
        data: Data,
        device: torch.device,
        precision: str,
        context: Callable[[], AbstractContextManager],
    ) -> None:
        self.encoder, self.spec, self.data = encoder, spec, data
        self.split, (_, self.images) = data.split("train"), data.images
        self.device, self.precision, self.context = device, precision, context

    def build(self, folder: Path, say: Callable[[str], None]) -> FeatureFile:
        """Opens the file of features in a cache; computes missing ones.

        If several processes build the same file, one computes the features while the others wait.

        Args:
            folder: The cache.
            say: Prints a line.
        Raises:
            UserError: There is no room for them, or they cannot be written.
        """
        home = next(self.encoder.parameters()).device
        frozen_part(self.encoder).eval()
        self.encoder.to(self.device)
        try:
            layout = self.layout()
            with nullcontext() if is_complete(folder, layout) else file_lock(layout.path(folder)):
                file = open_features(folder, layout)
                missing = file.missing()
                say(f"features    {layout}; {layout.images - len(missing):,} are in {file.path}")
                file.check_free_space(len(missing))
                self._fill(file, missing)
        finally:
            self.encoder.to(home)
        return file

    def layout(self) -> Layout:
        """The layout of a file of these features."""
        states = self._features(torch.zeros(1, 3, *self.images.preprocess.image_size, dtype=torch.uint8))
        return Layout(
            source=self.source(),
            images=len(self.split),
            states=states.shape[1],
            width=states.shape[2],
            dtype=str(states.dtype).removeprefix("torch."),
        )

    def source(self) -> str:
        """A hash of encoder, images, transform, device and precision."""
        spec = dict(self.spec["args"])
        if projects(self.encoder):
            spec.pop("dim", None)  # width of the projection, which comes after the features
        identity = {"name": self.spec["name"], "args": spec, "device": self.device.type, "precision": self.precision}
        digest = blake2b(json.dumps(identity, sort_keys=True, default=repr).encode(), digest_size=16)
        for name, tensor in frozen_part(self.encoder).state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        digest.update(source_hash(self.split, self.images).encode())
        return digest.hexdigest()

    def _fill(self, file: FeatureFile, missing: list[int]) -> None:
        """Computes the missing features of a file; reasons for unreadable images go to its `faults`."""
        size = CHUNK_SIZE if self.device.type == "cpu" else self.data.eval_batch_size
        for good, pixels, bad in self.data.read_images(self.images, missing, size, seed=self.data.order_seed):
            file.faults |= bad
            if pixels is not None:
                file.write(good, self._features(pixels))

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        with self.context():
            return features_of(self.encoder, self.images.preprocess.normalize(images.to(self.device)))
