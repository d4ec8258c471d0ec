"""`vlm shard`: writes a data set as shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from vlm.config.compose import compose
from vlm.data.records import NAMES
from vlm.data.store.shard_writer import files_of, write_manifest, write_split
from vlm.errors import UserError, print_error, printable
from vlm.inference.options import Option, Overrides
from vlm.io.files import progress


def shard(
    out: Annotated[str, Option("Folder that is made for the shards.", metavar="DIR")],
    overrides: Overrides = None,
    shard_size: Annotated[int, Option("The most images of a shard.", least=1)] = 10_000,
    shard_mb: Annotated[int, Option("Megabytes at which a shard is ended.", least=1)] = 1000,
) -> int:
    """Writes every split of a data set of images as shards and returns the exit status: 1 if images are missing.

    Raises:
        UserError: The config is at fault, the data cannot be opened, are no images, or the folder cannot be written.
    """
    from vlm.data.sources.shards import Shards
    from vlm.io.shell import train_command
    from vlm.training.config.check import check
    from vlm.training.config.nodes import check_fit
    from vlm.training.run.run import build_data, skipped_lines

    config = compose(overrides or [], check)
    check_fit(config)
    folder = _empty(Path(out))
    data: Any = build_data(config)
    if "image" not in data.source.holds:
        raise UserError("vlm shard: these data have no images; text is read from files that are mapped into memory")
    if data.source.languages:
        raise UserError("vlm shard: shards do not keep the languages of captions; train on the files themselves")
    check_fit(config, Shards)  # the shards must keep what the task reads
    print("".join(f"{line}\n" for line in skipped_lines(data.source.skipped)), end="")
    lost: list[str] = []
    splits = {}
    try:
        write_manifest(folder, {}, None)  # marks the shards as unfinished if the process is killed
        for name in (name for name in NAMES if name in data.splits):
            samples = files_of(data.split(name), lost)
            splits[name] = write_split(
                progress(samples, len(data.split(name)), "images"),
                folder / name,
                shard_size=shard_size,
                shard_bytes=shard_mb * 10**6,
            )
        write_manifest(folder, splits, list(data.source.classes) or None)
    except OSError as fault:
        raise UserError(
            f"--out {out}: cannot be written ({fault.strerror}); remove it, and choose another", 1
        ) from fault
    print("\n".join(_lines(splits)))
    for reason in lost:
        print_error(printable(reason))
    option = "webdataset_classes" if data.source.classes else "webdataset"
    command = train_command(f"task={config['task_name']}", f"data={option}", f"data.root={out}")
    print(f"try         {printable(command)}")
    return 1 if lost else 0


def _empty(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--out {folder}: is not empty; choose another folder, or empty it")
    except OSError as fault:
        raise UserError(f"--out {folder}: cannot be written ({fault.strerror}); choose another folder") from fault
    return folder


def _lines(splits: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for name, entries in splits.items():
        samples, size = (sum(entry[key] for entry in entries) for key in ("samples", "bytes"))
        yield f"{name:<12}{samples:,} images in {len(entries):,} shards, {size / 10**6:,.1f} MB"
