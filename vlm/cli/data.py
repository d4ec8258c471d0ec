"""The commands of `vlm` that take a config: of training, and of data sets. torch is imported only inside a command."""

from typing import Annotated

import typer

from vlm.cli.options import Overrides


def train(overrides: Overrides = None) -> int:
    """Only for `vlm --help`; `main` takes the command before options are parsed, since overrides are Hydra's."""
    from vlm.training.fit import main

    return main(overrides or [])


def check_data(
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="Folder for a page with faults and samples.", metavar="DIR")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Samples of each split that are read; all by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples on the page.")] = 0,
) -> int:
    """Look a data set over before hours are spent on it; exit status 1 if something would spoil a run."""
    from vlm.cli.check_data import check

    return check(overrides or [], out=out, limit=limit, seed=seed)


def shard(
    out: Annotated[str, typer.Option(help="Folder that is made for the shards.", metavar="DIR")],
    overrides: Overrides = None,
    shard_size: Annotated[int, typer.Option(min=1, help="The most images of a shard.")] = 10_000,
    shard_mb: Annotated[int, typer.Option(min=1, help="Megabytes at which a shard is ended.")] = 1000,
) -> int:
    """Write a data set of images as shards: tars with checksums, which data=webdataset reads where they lie."""
    from vlm.cli.shard import shard

    return shard(overrides or [], out=out, shard_size=shard_size, shard_mb=shard_mb)
