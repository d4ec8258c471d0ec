"""Compares reading photos from shards with reading the same photos from files: images a second of one process.

    python benchmarks/shards.py --root FOLDER [--out FILE.json]

FOLDER is Flickr8k's; its training split is first written as `vlm shard` does. Both sides then read the same photos in
the same training order, determined by seed and epoch, in alternating blocks: the bytes alone, and the image as a
training step gets it (decoded, resized to 224). Ratios are medians over blocks. After a warm-up the files are in the
page cache, so the work of reading is compared, not the disk.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import report

from vlm.data.images.image import Preprocess
from vlm.data.records import Split
from vlm.data.samples import TrainBatches
from vlm.data.sources.captions import Flickr8k
from vlm.data.sources.shards import Shards
from vlm.data.store.shard_sets import iter_sample_files, write_manifest, write_split

Read = Callable[[int], object]


def order(size: int) -> Iterator[int]:
    """Yields indices in training order, epoch after epoch."""
    for epoch in range(10**6):
        batches = TrainBatches(size=size, batch_size=64, seed=0, position=lambda epoch=epoch: (epoch, 0))
        yield from (key.index for batch in batches for key in batch)


def content(split: Split, index: int) -> bytes | None:
    """Returns the bytes of a sample's file."""
    read = split.record(index).read_file
    return read() if read else None


def time_reads(read: Read, indices: list[int]) -> float:
    start = time.perf_counter()
    for index in indices:
        read(index)
    return (time.perf_counter() - start) / len(indices)


def compare(ours: Read, peer: Read, indices: Iterator[int], *, block: int, rounds: int) -> dict[str, float]:
    """Returns seconds per image of both sides, and how many times as fast ours is; sides take turns in going first."""
    times: list[tuple[float, float]] = []
    for turn in range(rounds + 2):
        chosen = list(islice(indices, block))
        for read in (ours, peer):
            time_reads(read, chosen[: block // 4])  # warm-up
        if turn % 2:
            own, other = time_reads(ours, chosen), time_reads(peer, chosen)
        else:
            other, own = time_reads(peer, chosen), time_reads(ours, chosen)
        times.append((own, other))
    ratios = sorted(other / own for own, other in times[2:])
    return {
        "ours_s": statistics.median(own for own, _ in times[2:]),
        "peer_s": statistics.median(other for _, other in times[2:]),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--shard-size", type=int, default=1000)
    parser.add_argument("--block", type=int, default=500, help="images of a block")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    files = Flickr8k(root=args.root).split("train")
    with tempfile.TemporaryDirectory() as folder:
        entries = write_split(
            iter_sample_files(files, []), Path(folder) / "train", shard_size=args.shard_size, shard_bytes=10**9
        )
        write_manifest(Path(folder), {"train": entries}, None)
        shards = Shards(root=folder, needs=("captions",)).split("train")
        for index in range(len(files)):  # brings both sides into the page cache, and checks that they are equal
            assert content(shards, index) == content(files, index)
        preprocess, indices = Preprocess(image_size=224), order(len(files))
        options = {"block": args.block, "rounds": args.rounds}
        rows = {
            "bytes of a photo": compare(partial(content, shards), partial(content, files), indices, **options),
            "a photo, decoded and resized": compare(
                lambda index: preprocess(shards.record(index).image()),
                lambda index: preprocess(files.record(index).image()),
                indices,
                **options,
            ),
        }
    print(f"ours: {len(entries)} shards; peer: {len(files):,} files")
    report(rows, args.out)


if __name__ == "__main__":
    main()
