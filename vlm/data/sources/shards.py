"""Sharded data sets, as written by img2dataset and `vlm shard`."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile

import numpy as np

from vlm.data.hold_out import check_fractions, draw_splits, draw_stratified_splits
from vlm.data.records import NAMES, ListSplit, Record, SkipMessage, Source, Split, error_summary, report_error
from vlm.data.sources.caption_source import choose_captions
from vlm.data.store.shard_sets import Shard, find_shards
from vlm.data.store.shards import IndexedShard, Samples, ShardIndex, ShardRecord, open_index
from vlm.errors import Count, Injected, Share, UserError

OPEN_THREADS = 16  # number of shards opened in parallel
MAX_CLASSES = 100_000


class Shards(Source):
    """Images in shards with captions (``KEY.txt`` or ``KEY.json``), a class (``KEY.cls``: name or number), or both.

    Splits are separate files if `val_path` or `test_path` is given, else those written by `vlm shard`, else folders of
    the root with names of splits, else drawn by image, with stratification if labels are needed.

    Args:
        root: Folder or URL of the shards, with or without subfolders ``train``, ``val`` and ``test``.
        path, val_path, test_path: The shards instead: files, patterns or URLs; may be relative to the root.
        remote: Whether URLs may be read.
        write_index: Whether to save the index of a shard that has none.
        needs: Names of values that a sample must have to be used.
        val_fraction, test_fraction: Held-out shares if the data has no splits.
        seed: Seed of the held-out images and of the choice of captions.
        captions_per_image: Maximum number of captions per image in an epoch of ``train``; None for all.
    Raises:
        UserError: There are no shards, one is damaged, a sample is repeated, there are fewer than two classes, or val
            or test has a class that train lacks.
    """

    holds = ("image", "captions", "label")
    name = "webdataset"

    def __init__(
        self,
        *,
        root: str,
        path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        remote: bool = False,
        write_index: bool = False,
        needs: Injected[Sequence[str]] = (),
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        captions_per_image: Count | None = None,
    ) -> None:
        check_fractions(val_fraction, test_fraction)
        self.root, self.needs, self._write_index = root, needs, write_index
        self.seed, self.captions_per_image = seed, captions_per_image
        self.skipped: list[str] = []
        self.repeated: list[str] = []
        self._unusable: dict[str, str] = {}
        places = find_shards(root=root, path=path, val_path=val_path, test_path=test_path, remote=remote)
        self._shards = places.splits
        self._base = _common_prefix_length([shard.path for shards in self._shards.values() for shard in shards])
        self._shard_of_id: dict[str, str] = {}
        samples = {split: self._select_usable(self._open(shards)) for split, shards in self._shards.items()}
        self._shard_of_id.clear()
        texts = {split: _class_texts(part) for split, part in samples.items()} if "label" in needs else {}
        if "label" in needs:
            self.classes = self._class_names(texts.get("train", []) + texts.get(None, []), places.classes)
            self._labels = {name: label for label, name in enumerate(self.classes)}
            if places.classes:
                self._labels = {str(label): label for label in range(len(self.classes))}
        if None in samples:
            samples = self._draw(samples[None], texts.get(None), {"val": val_fraction, "test": test_fraction})
        self._samples = {name: samples[name] for name in NAMES if len(samples.get(name, ()))}
        self.splits = tuple(self._samples)
        if "train" not in self._samples:
            faults = [*self._unusable.values(), *self.skipped]
            wanted = " and ".join(name for name in needs if name != "image") or "image"
            raise UserError(
                f"{root}: the shards have no image with {wanted} to train on{error_summary(faults)}; check data.root"
            )
        self._check_labels()

    def open(self, name: str) -> Split:
        samples = self._samples[name]
        most = self.captions_per_image if name == "train" else None
        return ListSplit(range(len(samples)), partial(self._record, samples, most))

    def _record(self, samples: Samples, most: int | None, index: int, epoch: int) -> Record:
        shard = samples.record(index)
        name = samples.name(index)
        values: dict[str, object] = {}
        if shard.captions:
            captions = choose_captions(shard.captions, most, self.seed, epoch, name)
            values |= {"captions": captions, "references": shard.captions}
        if "label" in self.needs:
            label = self._labels[_class_text(shard)]
            values |= {"label": label, "class": self.classes[label]}
        read = (partial(function, index) for function in (samples.image, samples.content, samples.stamp))
        return Record(name, values, *read)  # type: ignore[arg-type]

    def check_archives(self) -> tuple[list[str], int]:
        shards = [shard for shards in self._shards.values() for shard in shards]
        usable = (shard for shard in shards if shard.path not in self._unusable)
        return [*self._unusable.values(), *(line for shard in usable if (line := shard.damage()))], len(shards)

    def _draw(
        self, samples: Samples, classes: Sequence[str] | None, fractions: dict[str, float]
    ) -> dict[str | None, Samples]:
        names = [samples.name(index) for index in range(len(samples))]
        if classes is None:
            parts = draw_splits(names, fractions, self.seed)
        else:
            labels = [self._labels[text] for text in classes]
            parts = draw_stratified_splits(
                labels, names, {name: fractions[name] for name in ("test", "val")}, self.seed
            )
        return {split: samples.part(indices) for split, indices in parts.items()}

    def _class_names(self, texts: Sequence[str], noted: list[str] | None) -> list[str]:
        """Names of the classes: as written by `vlm shard`; else sorted, or the numbers up to the largest."""
        names = noted or sorted(set(texts))
        if not noted and names and all(name.isdecimal() and name.isascii() and len(name) < 7 for name in names):
            names = [str(number) for number in range(1 + max(map(int, names)))]
        if not 2 <= len(names) <= MAX_CLASSES:
            raise UserError(
                f"{self.root}: the training shards have {len(names)} classes in .cls files; "
                f"give from 2 to {MAX_CLASSES:,}"
            )
        return names

    def _check_labels(self) -> None:
        for samples in self._samples.values() if "label" in self.needs else ():
            for index, text in enumerate(_class_texts(samples)):
                if text not in self._labels:
                    raise UserError(
                        f"{samples.name(index)}: has class {text!r}, which the training shards lack; "
                        "remove its shard, or add such images to train"
                    )

    def _open(self, shards: Sequence[Shard]) -> list[IndexedShard]:
        """Opens the shards with their indexes; inside `collect_errors`, failures are recorded."""
        opened = []
        pool = ThreadPoolExecutor(OPEN_THREADS)  # object stores are slow to respond
        try:
            for shard, index in zip(shards, pool.map(self._try_open, shards), strict=True):
                if isinstance(index, ShardIndex):
                    opened.append(IndexedShard(shard.path, shard.path[self._base :], index))
                    for kind, message in index.skipped_parts:
                        line = f"{shard.path}/{message}"
                        if kind == "repeated":
                            self.repeated.append(line)
                        else:
                            self.skipped.append(SkipMessage(line, kind))
                else:
                    report_error(str(index))
                    self._unusable[shard.path] = str(index)
        finally:
            pool.shutdown(cancel_futures=True)
        return opened

    def _try_open(self, shard: Shard) -> ShardIndex | UserError:
        try:
            shard.check_size()
            return open_index(shard.path, write=self._write_index)
        except UserError as fault:
            return fault

    def _select_usable(self, shards: Sequence[IndexedShard]) -> Samples:
        """The usable samples of a split, with unique names."""
        places: list[tuple[int, int]] = []
        for number, shard in enumerate(shards):
            for at, record in enumerate(shard.index.records()):
                name = shard.sample(record)
                if "captions" in self.needs and not record.captions:
                    self.skipped.append(SkipMessage(f"{name}: has no caption", "no caption"))
                elif "label" in self.needs and not record.label:
                    self.skipped.append(SkipMessage(f"{name}: has no class", ""))
                elif name in self._shard_of_id:
                    self._refuse(f"{shard.path}: {name} is in {self._shard_of_id[name]} too; remove one of them")
                else:
                    self._shard_of_id[name] = shard.path
                    places.append((number, at))
        return Samples(shards, np.array(places, np.int64).reshape(-1, 2))

    def _refuse(self, message: str) -> None:
        report_error(message)
        self.skipped.append(SkipMessage(message, "two splits"))


def _class_text(record: ShardRecord) -> str:
    """The class of a sample, without leading zeros if it is a number."""
    text = record.label or ""
    return text.lstrip("0") or "0" if text.isdecimal() else text


def _class_texts(samples: Samples) -> list[str]:
    return [_class_text(samples.record(index)) for index in range(len(samples))]


def _common_prefix_length(paths: Sequence[str]) -> int:
    """Length of the common folder of these paths, so that names stay the same when the data set is moved."""
    folders = [path.split("/")[:-1] for path in paths]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return sum(len(parts[0]) + 1 for parts in shared)
