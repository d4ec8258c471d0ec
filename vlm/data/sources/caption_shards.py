"""Captioned images in shards."""

from PIL import Image

from vlm.data.sources.caption_source import CaptionSplit
from vlm.data.store.shard_index import Record
from vlm.data.store.shard_list import NAMES, check_fractions
from vlm.data.store.shards import Samples, ShardSource
from vlm.errors import Count, Share, Supplied, UserError
from vlm.randomness import key


class CaptionShardSplit(CaptionSplit):
    """One split of captioned images in shards.

    Args:
        samples: What it holds.
        seed, captions_per_image: As in CaptionSplit.
    """

    def __init__(self, *, samples: Samples, seed: int = 0, captions_per_image: int | None = None) -> None:
        super().__init__(images=[], seed=seed, captions_per_image=captions_per_image)
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def content(self, index: int) -> bytes:
        return self.samples.content(index)

    def image(self, epoch: int, index: int) -> Image.Image:
        return self.samples.image(index)

    def signature(self, index: int) -> str:
        return self.samples.signature(index)

    def references(self, index: int) -> list[str]:
        return self.samples.record(index).captions

    def sample_id(self, epoch: int, index: int) -> str:
        return self.samples.name(index)


class CaptionShards(ShardSource):
    """Captioned images in shards.

    The splits are the files where `val_path` or `test_path` is given, else those that `vlm shard` wrote, else the
    folders of the root that are named so, else drawn by image.

    Args:
        root, path, val_path, test_path, remote, commands, write_index, cached_shards, cache: As in ShardSource.
        val_fraction: Part of the images held out for validation where the data says no splits.
        test_fraction: Part of the images held out for test where the data says no splits.
        seed: Seed of which images are held out and which captions are drawn.
        captions_per_image: The most captions of an image that an epoch of ``train`` uses; None for all.
    Attributes:
        splits: Those of ``train``, ``val`` and ``test`` that hold an image, in this order.
        skipped: One line for each sample or caption that is not used because of a fault.
        repeated: One line for each caption that an image has twice, of which one is used.
    Raises:
        UserError: There are no shards, one is not whole, or a sample is there twice.
    """

    def __init__(
        self,
        *,
        root: str,
        path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        remote: bool = False,
        commands: bool = False,
        write_index: bool = False,
        cached_shards: Count = 32,
        cache: Supplied[str] = "runs/cache",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        captions_per_image: Count | None = None,
    ) -> None:
        if captions_per_image is not None and captions_per_image < 1:
            raise UserError(f"data.source.captions_per_image={captions_per_image}: give at least 1, or null for all")
        check_fractions(val_fraction, test_fraction)
        super().__init__(
            root=root,
            path=path,
            val_path=val_path,
            test_path=test_path,
            remote=remote,
            commands=commands,
            write_index=write_index,
            cached_shards=cached_shards,
            cache=cache,
        )
        self.seed, self.captions_per_image = seed, captions_per_image
        kept = self.samples
        if None in kept:
            kept = _drawn(kept[None], val_fraction, test_fraction, seed)
        self._parts = {name: kept[name] for name in NAMES if len(kept.get(name, ()))}
        if "train" not in self._parts:
            faults = [*self.unusable.values(), *self.skipped]
            why = f" ({len(faults)} faults; the first: {faults[0]})" if faults else ""
            raise UserError(f"{root}: the shards hold no image with a caption to train on{why}; check data.root")

    def why_not(self, record: Record) -> tuple[str, str] | None:
        return None if record.captions else ("no caption", "has no caption")

    def split(self, name: str) -> CaptionShardSplit:
        """The split of this name.

        Raises:
            UserError: If there is no such split.
        """
        drawn = self.captions_per_image if name == "train" else None
        return CaptionShardSplit(samples=self.part(name), seed=self.seed, captions_per_image=drawn)


def _drawn(samples: Samples, val_fraction: float, test_fraction: float, seed: int) -> dict[str | None, Samples]:
    """Splits by a hash of each sample's name, as other data sets of captioned images draw them."""
    found: dict[str | None, list[int]] = {name: [] for name in NAMES}
    for index in range(len(samples)):
        at = key("split", seed, samples.name(index)) / 2**63
        found["val" if at < val_fraction else "test" if at < val_fraction + test_fraction else "train"].append(index)
    return {name: samples.part(indices) for name, indices in found.items()}
