"""Images in classes in shards."""

from collections.abc import Sequence

from PIL import Image

from vlm.data.sources.class_source import stratified
from vlm.data.store.shard_index import Record
from vlm.data.store.shard_list import NAMES, check_fractions
from vlm.data.store.shards import Samples, ShardSource
from vlm.errors import Count, Share, Supplied, UserError

MAX_CLASSES = 100_000


class ClassShardSplit:
    """One split of images in classes in shards, the same in every epoch."""

    fresh = False

    def __init__(self, samples: Samples, labels: Sequence[int]) -> None:
        self.samples, self.labels = samples, labels

    def __len__(self) -> int:
        return len(self.samples)

    def content(self, index: int) -> bytes:
        return self.samples.content(index)

    def image(self, epoch: int, index: int) -> Image.Image:
        """The image in RGB; an ImageError is raised for one that cannot be read."""
        return self.samples.image(index)

    def signature(self, index: int) -> str:
        return self.samples.signature(index)

    def label(self, epoch: int, index: int) -> int:
        return self.labels[index]

    def sample_id(self, epoch: int, index: int) -> str:
        return self.samples.name(index)


class ClassShards(ShardSource):
    """Images in classes in shards: ``KEY.cls`` beside each image holds its class, a name or a number from 0.

    The splits are found as `CaptionShards` finds them; where nothing says them they are drawn, each class keeping its
    share.

    Args:
        root, path, val_path, test_path, remote, commands, write_index, cached_shards, cache: As in ShardSource.
        val_fraction: Part of each class held out for validation where the data says no splits.
        test_fraction: Part of each class held out for test where the data says no splits.
        seed: Seed of which images are held out.
    Attributes:
        splits: Those of ``train``, ``val`` and ``test`` that hold an image, in this order.
        classes: As `vlm shard` noted them; else the names, sorted, or the numbers up to the largest.
        skipped: One line for each sample that is not used because of a fault.
    Raises:
        UserError: There are no shards, one is not whole, a sample is there twice, there are fewer than two classes, or
            val or test has a class that train lacks.
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
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.0,
        seed: int = 0,
    ) -> None:
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
        texts = {split: _texts(samples) for split, samples in self.samples.items()}
        self.classes = self._classes(texts.get("train", []) + texts.get(None, []))
        numbers = {name: label for label, name in enumerate(self.classes)}
        if self.known_classes:
            numbers = {str(label): label for label in range(len(self.classes))}
        parts = {split: self._labelled(samples, texts[split], numbers) for split, samples in self.samples.items()}
        if None in parts:
            parts = _drawn(*parts[None], {"test": test_fraction, "val": val_fraction}, seed)
        self._parts = {name: parts[name] for name in NAMES if name in parts and len(parts[name][0])}
        if "train" not in self._parts:
            raise UserError(f"{root}: the shards hold no image with a class to train on; check data.root")

    def why_not(self, record: Record) -> tuple[str, str] | None:
        return None if record.label else ("", "has no class")

    def split(self, name: str) -> ClassShardSplit:
        """The split of this name.

        Raises:
            UserError: If there is no such split.
        """
        return ClassShardSplit(*self.part(name))

    def _classes(self, texts: Sequence[str]) -> list[str]:
        names = sorted(set(texts))
        if self.known_classes:
            names = self.known_classes
        elif names and all(name.isdecimal() and name.isascii() and len(name) < 7 for name in names):
            names = [str(number) for number in range(1 + max(map(int, names)))]
        if not 2 <= len(names) <= MAX_CLASSES:
            raise UserError(
                f"{self.root}: the training shards have {len(names)} classes in .cls files; "
                f"give from 2 to {MAX_CLASSES:,}"
            )
        return names

    def _labelled(self, samples: Samples, texts: Sequence[str], numbers: dict[str, int]) -> tuple[Samples, list[int]]:
        for index, text in enumerate(texts):
            if text not in numbers:
                raise UserError(
                    f"{samples.name(index)}: is of class {text!r}, which the training shards do not have; "
                    "leave its shard out, or add such images to train"
                )
        return samples, [numbers[text] for text in texts]


def _texts(samples: Samples) -> list[str]:
    """The class of each sample as its shard has it, a number without leading zeros."""
    texts = [samples.record(index).label or "" for index in range(len(samples))]
    return [text.lstrip("0") or "0" if text.isdecimal() else text for text in texts]


def _drawn(
    samples: Samples, labels: Sequence[int], fractions: dict[str, float], seed: int
) -> dict[str | None, tuple[Samples, list[int]]]:
    """The splits by fractions of each class, drawn as class folders are."""
    names = [samples.name(index) for index in range(len(samples))]
    rest, found = list(range(len(samples))), {}
    counts = {split: round(fraction * len(rest)) for split, fraction in fractions.items()}
    for split, count in counts.items():
        chosen = stratified([labels[index] for index in rest], [names[index] for index in rest], count, seed=seed)
        found[split] = [rest[at] for at in chosen]
        rest = sorted(set(rest).difference(found[split]))
    found["train"] = rest
    return {split: (samples.part(indices), [labels[i] for i in indices]) for split, indices in found.items()}
