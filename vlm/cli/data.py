"""The commands that look at data: `vlm check-data` and `vlm shard`. torch is imported only inside a command."""

from typing import Annotated

from vlm.cli.options import Overrides
from vlm.inference.options import Option


def check_data(
    overrides: Overrides = None,
    out: Annotated[str | None, Option("Folder for a page with faults and samples.", metavar="DIR")] = None,
    limit: Annotated[int | None, Option("Samples of each split that are read; all by default.", least=1)] = None,
    seed: Annotated[int, Option("Seed of the choice of samples on the page.")] = 0,
) -> int:
    """Look a data set over before hours are spent on it; exit status 1 if something would spoil a run."""
    from vlm.cli.check_data import check

    return check(overrides or [], out=out, limit=limit, seed=seed)


def shard(
    out: Annotated[str, Option("Folder that is made for the shards.", metavar="DIR")],
    overrides: Overrides = None,
    shard_size: Annotated[int, Option("The most images of a shard.", least=1)] = 10_000,
    shard_mb: Annotated[int, Option("Megabytes at which a shard is ended.", least=1)] = 1000,
) -> int:
    """Write a data set of images as shards: tars with checksums, which data=webdataset reads where they lie."""
    from vlm.cli.shard import shard

    return shard(overrides or [], out=out, shard_size=shard_size, shard_mb=shard_mb)
