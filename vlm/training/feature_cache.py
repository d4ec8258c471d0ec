"""Features of a frozen encoder: each training image is encoded once, and training reads what came of it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlm.data.features.feature_file import FeatureFile, Layout, is_complete, open_features
from vlm.data.features.fingerprint import fingerprint
from vlm.data.images.image import Preprocess
from vlm.data.store.cache_file import alone
from vlm.inference.files import progress
from vlm.models.encoder_decoder import AT_ONCE
from vlm.models.frozen_features import Features, features_of, frozen_part, projects


def as_read(images: Tensor, preprocess: Preprocess) -> Tensor | Features:
    """The images of a training batch as a model takes them: pixels normalised, or the features kept of them."""
    return Features(images) if images.is_floating_point() else preprocess.normalize(images)


class Keeper:
    """Makes the features of the training images of a run.

    They are made as training would make them, on its device and in its precision, and kept in the type that comes out:
    training is then what it is without, to the rounding of products whose sums are ordered by the batch.

    Args:
        encoder: The encoder, its frozen part with the weights that the run has.
        spec: Its name and arguments, as checkpoints hold them.
        data: The training images.
        device: Where training computes.
        precision: What training computes in.
        context: Lets a forward pass compute in it.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        spec: Mapping[str, Any],
        data: Any,
        device: torch.device,
        precision: str,
        context: Callable[[], AbstractContextManager],
    ) -> None:
        self.encoder, self.spec, self.data = encoder, spec, data
        self.device, self.precision, self.context = device, precision, context

    def keep(self, folder: Path, say: Callable[[str], None]) -> FeatureFile:
        """The features in a file of a cache; those that are not there yet are made.

        Of the processes that ask at once, one makes them and the others wait for it.

        Args:
            folder: The cache.
            say: Takes a line for a person.
        Raises:
            UserError: There is no room for them, or they cannot be written.
        """
        home = next(self.encoder.parameters()).device
        frozen_part(self.encoder).eval()
        self.encoder.to(self.device)
        try:
            layout = self.layout()
            with nullcontext() if is_complete(folder, layout) else alone(layout.path(folder)):
                file = open_features(folder, layout)
                missing = file.missing()
                say(f"features    {layout}; {layout.images - len(missing):,} are in {file.path}")
                file.check_room(len(missing))
                self._fill(file, missing)
        finally:
            self.encoder.to(home)
        return file

    def layout(self) -> Layout:
        """What a file of these features holds."""
        size = self.data.augment.image_size
        states = self._features(torch.zeros(1, 3, size, size, dtype=torch.uint8))
        return Layout(
            source=self.source(),
            images=len(self.data.split("train")),
            states=states.shape[1],
            width=states.shape[2],
            dtype=str(states.dtype).removeprefix("torch."),
        )

    def source(self) -> str:
        """Tells encoder, images and transform from all others, and how the encoder computes."""
        spec = dict(self.spec["args"])
        if projects(self.encoder):
            spec.pop("dim", None)  # of what the features are projected to
        said = {"name": self.spec["name"], "args": spec, "device": self.device.type, "precision": self.precision}
        digest = blake2b(json.dumps(said, sort_keys=True, default=repr).encode(), digest_size=16)
        for name, tensor in frozen_part(self.encoder).state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        digest.update(fingerprint(self.data).encode())
        return digest.hexdigest()

    def _fill(self, file: FeatureFile, missing: list[int]) -> None:
        """Makes what a file misses; what cannot be read is noted in its faults."""
        split = self.data.split("train")
        for indices, batch in self._batches(missing):
            bad = {sample.id: sample.reason for sample in batch.bad}
            names = {index: split.sample_id(0, index) for index in indices}
            file.faults |= {index: bad[name] for index, name in names.items() if name in bad}
            good = [index for index, name in names.items() if name not in bad]
            if good:
                file.write(good, self._features(batch.images))

    def _batches(self, indices: list[int]) -> Iterator[tuple[list[int], Any]]:
        """Batches of pixels with the indices of their images, those of bad ones too."""
        size = AT_ONCE if self.device.type == "cpu" else self.data.eval_batch_size
        parts = [indices[at : at + size] for at in range(0, len(indices), size)]
        dataset = self.data.dataset("train", augmented=True)
        loader = self.data.loader(dataset, [[(0, index) for index in part] for part in parts])
        yield from zip(parts, progress(loader, len(parts), f"batches of {size} images"), strict=True)

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        with self.context():
            return features_of(self.encoder, self.data.preprocess.normalize(images.to(self.device)))
