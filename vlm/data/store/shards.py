"""Data sets in shards: tars in WebDataset's layout, on disk or in an object store, read where they lie.

A sample is known by its shard and its place in it, so that the order of samples, ranks and resuming are those of any
other data set. `vlm.data.store.shard_index` says what a shard is.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlm.data.images.image import ImageError, load_image
from vlm.data.sources.caption_formats import Skipped
from vlm.data.sources.caption_source import is_lenient
from vlm.data.store import storage
from vlm.data.store.pipes import LEAST, Pipes
from vlm.data.store.shard_index import Record, ShardIndex
from vlm.data.store.shard_list import Shard, find_shards
from vlm.data.store.shard_scan import open_index
from vlm.data.store.shard_window import Near
from vlm.errors import UserError

AT_ONCE = 16  # shards that are opened


@dataclass(frozen=True)
class Opened:
    """A shard: its path or command, what it is called in the names of its samples, and its index."""

    path: str
    name: str
    index: ShardIndex
    piped: bool

    def sample(self, record: Record) -> str:
        """What a sample is called: as it was where the shard was written from, or else SHARD/MEMBER."""
        return record.name or f"{self.name}/{record.member}"


class Samples:
    """Samples of several shards, one after another.

    Args:
        shards: The shards.
        places: Shard and place in it of each sample.
        pipes: Where the tars of commands are.
    Shapes:
        places int64 (N, 2)
    """

    def __init__(self, shards: Sequence[Opened], places: np.ndarray, pipes: Pipes) -> None:
        self.shards, self.places, self.pipes = shards, places, pipes
        self._stamps: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.places)

    def part(self, indices: Sequence[int]) -> "Samples":
        """Some of them."""
        return Samples(self.shards, self.places[np.asarray(indices, np.int64)], self.pipes)

    @property
    def near(self) -> Near | None:
        """How the samples lie in shards, where some of these come from commands."""
        if not any(shard.piped for shard in self.shards):
            return None
        paths = [shard.path for shard in self.shards]
        return Near(self.places[:, 0], window=self.pipes.most // 2, fetch=lambda shard: self.pipes.ahead(paths[shard]))

    def shard(self, index: int) -> Opened:
        """The shard that a sample is in."""
        return self.shards[self.places[index, 0]]

    def record(self, index: int) -> Record:
        return self.shard(index).index.record(int(self.places[index, 1]))

    def name(self, index: int) -> str:
        """What a sample is called."""
        return self.shard(index).sample(self.record(index))

    def content(self, index: int) -> bytes:
        """The bytes of an image's file; an ImageError is raised where they cannot be read."""
        shard = self.shard(index)
        read = self.pipes.read if shard.piped else storage.read_span
        try:
            return read(shard.path, shard.index.span(int(self.places[index, 1])))
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self._path(index)}: {getattr(fault, 'strerror', None) or fault}") from fault

    def image(self, index: int) -> Image.Image:
        """The image in RGB; an ImageError is raised for one that cannot be read."""
        try:
            return load_image(self.content(index))
        except ImageError as fault:
            raise ImageError(str(fault).replace("<bytes>", self._path(index), 1)) from fault

    def signature(self, index: int) -> str:
        """What changes where an image does: when its shard was written, and where in it the image lies."""
        path = self.shard(index).path
        if path not in self._stamps:
            self._stamps[path] = storage.stamp(path)
        return f"{self._stamps[path]} {self.shard(index).index.span(int(self.places[index, 1]))}"

    def _path(self, index: int) -> str:
        return f"{self.shard(index).path}/{self.record(index).member}"


class ShardSource:
    """What sources in shards share: the shards are found, their indexes opened, and each sample looked at once.

    Args:
        root: Folder or URL with the shards, in ``train``, ``val`` and ``test`` or without.
        path, val_path, test_path: The shards instead: files, patterns or URLs, as given or within the root; or
            ``pipe:`` and a command, or a pattern of commands, that each write a tar.
        remote: Whether URLs may be read.
        commands: Whether commands may be run.
        write_index: Whether the index of a shard that has none is left beside it.
        cached_shards: How many tars of commands are kept on disk; half as many are mixed in training.
        cache: Folder of caches; they are kept within it.
    Attributes:
        samples: Those that can be used, by split, or by None where the data says no splits.
        known_classes: Names of the classes where `vlm shard` noted them.
        unusable: By path, what is wrong with shards that are not whole, where all faults are looked for.
        skipped: One line for each sample or caption that is not used because of a fault.
        repeated: One line for each caption that an image has twice, of which one is used.
    Raises:
        UserError: There are no shards, one is not whole, or a sample is there twice.
    """

    def __init__(
        self,
        *,
        root: str,
        path: str | None,
        val_path: str | None,
        test_path: str | None,
        remote: bool,
        commands: bool,
        write_index: bool,
        cached_shards: int,
        cache: str,
    ) -> None:
        self.root, self._write_index = root, write_index
        self.skipped: list[str] = []
        self.repeated: list[str] = []
        self.unusable: dict[str, str] = {}
        found = find_shards(
            root=root, path=path, val_path=val_path, test_path=test_path, remote=remote, commands=commands
        )
        self.shards, self.known_classes = found.splits, found.classes
        self.pipes = self._open_pipes(cache, cached_shards)
        self._base = _common([shard.path for shards in self.shards.values() for shard in shards])
        self._seen: dict[str, str] = {}
        self._parts: dict[str, Any] = {}  # what a kind of source makes of its samples, for each split that it has
        self.samples = {split: self._usable(self._open(shards)) for split, shards in self.shards.items()}
        self._seen.clear()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def why_not(self, record: Record) -> tuple[str, str] | None:
        """The kind of fault that a sample has, as `Skipped` knows it, and the fault; None for one that can be used."""
        raise TypeError(f"{type(self).__name__} uses no samples")

    def part(self, name: str) -> Any:
        """What a split holds.

        Raises:
            UserError: If there is no such split.
        """
        if name not in self.splits:
            raise UserError(f"{self.root} has no split {name!r}; it has {', '.join(self.splits)}")
        return self._parts[name]

    def damaged(self) -> list[str]:
        """A line for each shard that is not whole, or whose checksum is not the one noted; reads all of them."""
        usable = [shard for shards in self.shards.values() for shard in shards if shard.path not in self.unusable]
        return [*self.unusable.values(), *(line for shard in usable if (line := shard.damage()))]

    def _open_pipes(self, cache: str, cached_shards: int) -> Pipes:
        places = [shard.path for shards in self.shards.values() for shard in shards if shard.piped]
        setting = f"data.source.cached_shards={cached_shards}"
        if cached_shards < LEAST:
            raise UserError(f"{setting}: give at least {LEAST}")
        if len(places) > cached_shards and "val" not in self.shards:
            raise UserError(
                f"data.val_path: not given; of {len(places)} commands each would be run anew for every validation, "
                f"which takes samples of all\nname some of them as data.val_path, or keep all on disk: {setting}"
            )
        return Pipes(Path(cache) / "shards", cached_shards)

    def _open(self, shards: Sequence[Shard]) -> list[Opened]:
        """The shards with their indexes; those that have none are noted where all faults are looked for."""
        opened = []
        pool = ThreadPoolExecutor(AT_ONCE)  # a store takes its time to answer
        try:
            for shard, index in zip(shards, pool.map(self._index, shards), strict=True):
                if isinstance(index, ShardIndex):
                    opened.append(Opened(shard.path, shard.path[self._base :], index, shard.piped))
                    self._tell(shard, index)
                elif is_lenient():
                    self.unusable[shard.path] = str(index)
                else:
                    raise index
        finally:
            pool.shutdown(cancel_futures=True)
        return opened

    def _index(self, shard: Shard) -> ShardIndex | UserError:
        try:
            if shard.piped:
                return self.pipes.index(shard.path)
            shard.check_size()
            return open_index(shard.path, write=self._write_index)
        except UserError as fault:
            return fault

    def _tell(self, shard: Shard, index: ShardIndex) -> None:
        for kind, line in index.left_out:
            line = f"{shard.path}/{line}"
            if kind == "repeated":
                self.repeated.append(line)
            else:
                self.skipped.append(Skipped(line, kind))

    def _usable(self, shards: Sequence[Opened]) -> Samples:
        """The samples of a split that can be used, each of a name of its own."""
        kept: list[tuple[int, int]] = []
        for number, shard in enumerate(shards):
            for at, record in enumerate(shard.index.records()):
                name = shard.sample(record)
                if why := self.why_not(record):
                    self.skipped.append(Skipped(f"{name}: {why[1]}", why[0]))
                elif name in self._seen:
                    self._refuse(f"{shard.path}: {name} is in {self._seen[name]} too; leave one of them out")
                else:
                    self._seen[name] = shard.path
                    kept.append((number, at))
        return Samples(shards, np.array(kept, np.int64).reshape(-1, 2), self.pipes)

    def _refuse(self, message: str) -> None:
        if not is_lenient():
            raise UserError(message)
        self.skipped.append(Skipped(message, "two splits"))


def _common(paths: Sequence[str]) -> int:
    """How many characters the folder takes that all of these lie in: names do not change where the data set moves."""
    folders = [path.split("/")[:-1] for path in paths]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return sum(len(parts[0]) + 1 for parts in shared)
