"""`vlm check-data` and `vlm shard`. torch is imported only when they run."""

from pathlib import Path
from typing import Annotated

from vlm.errors import UserError, print_error, printable
from vlm.inference.options import Option, Overrides
from vlm.io.files import progress, write_text
from vlm.io.output import output_folder


def check_data(
    overrides: Overrides = None,
    out: Annotated[str | None, Option("Output folder for an HTML report with samples.", metavar="DIR")] = None,
    limit: Annotated[int | None, Option("Read at most N samples per split. By default, all.", least=1)] = None,
    seed: Annotated[int, Option("Random seed for the choice of samples in the report.")] = 0,
) -> int:
    """Prints the problems of a data set; returns 1 if training would stop or give invalid scores.

    Raises:
        UserError: The config is invalid, or the data cannot be opened.
    """
    from vlm.config.compose import compose
    from vlm.training.config.check import check

    config = compose(overrides or [], check)
    from vlm.cli.check_data import fault_lines, group_errors, inspect_data, render_page
    from vlm.data.records import Split, collect_errors
    from vlm.evaluation.data_check.faults import Faults
    from vlm.io.terminal import fold

    folder = None if out is None else output_folder(out)
    faults, about, splits = Faults(), list[str](), dict[str, Split]()
    with collect_errors() as faults.errors:
        try:
            training = inspect_data(config, faults, about, splits, limit)
        except UserError as error:
            if not about and not faults.errors:  # it cannot be opened
                raise
            faults.errors.append(str(error))
    if faults.errors:
        more = len(group_errors(faults.errors)) - 1
        also = f" (and for {more} other reason{'s' * (more > 1)}, see STOPS)" if more else ""
        first = faults.errors[0].partition("\n")[0].removesuffix(":")
        training = f"stops: {first}{also}"
    lines = [*about, *fault_lines(faults), f"training    {training}"]
    print(fold("\n".join(map(printable, lines))), flush=True)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "report.html", render_page(about or ["data"], faults, splits, seed=seed))
        except OSError as fault:
            reason = f"cannot be written ({fault.strerror})"
            raise UserError(f"--out {folder}: {reason}; choose another folder", 1) from fault
        print(f"page        {folder / 'report.html'}")
    return 1 if faults.errors or faults.spoiling else 0


def shard(
    out: Annotated[str, Option("Output folder. Created if missing; must be empty.", metavar="DIR")],
    overrides: Overrides = None,
    shard_size: Annotated[int, Option("Maximum number of images per shard.", least=1)] = 10_000,
    shard_mb: Annotated[int, Option("Maximum size of a shard, in megabytes.", least=1)] = 1000,
) -> int:
    """Writes every split of a data set of images as shards and returns the exit status: 1 if images are missing.

    Raises:
        UserError: The config is invalid, the data cannot be opened or have no images, or the folder cannot be written.
    """
    from vlm.config.compose import compose
    from vlm.training.config.check import check

    config = compose(overrides or [], check)
    from vlm.data.records import NAMES
    from vlm.data.sources.shards import Shards
    from vlm.data.store.shard_sets import iter_sample_files, write_manifest, write_split
    from vlm.io.terminal import train_command
    from vlm.training.config.nodes import check_fit
    from vlm.training.run.build import build_data
    from vlm.training.run.run import format_skipped

    folder = _create_empty_folder(Path(out))
    data = build_data(config)
    if "image" not in data.source.holds:
        raise UserError("vlm shard: the data set has no images; text files are memory-mapped and need no shards")
    if data.source.languages:
        raise UserError("vlm shard: caption languages are not supported in shards; train on the original files")
    check_fit(config, Shards)  # the shards must keep what the task reads
    print("".join(f"{line}\n" for line in format_skipped(data.source.skipped)), end="")
    lost: list[str] = []
    splits = {}
    try:
        write_manifest(folder, {}, None)  # marks the shards as unfinished if the process is killed
        for name in (name for name in NAMES if name in data.splits):
            samples = iter_sample_files(data.split(name), lost)
            splits[name] = write_split(
                progress(samples, len(data.split(name)), "images"),
                folder / name,
                shard_size=shard_size,
                shard_bytes=shard_mb * 10**6,
            )
        write_manifest(folder, splits, list(data.source.classes) or None)
    except OSError as fault:
        raise UserError(
            f"--out {out}: cannot be written ({fault.strerror}); remove it, and choose another folder", 1
        ) from fault
    for name, entries in splits.items():
        count, size = sum(entry["samples"] for entry in entries), sum(entry["bytes"] for entry in entries)
        print(f"{name:<12}{count:,} images in {len(entries):,} shards, {size / 10**6:,.1f} MB")
    for reason in lost:
        print_error(printable(reason))
    option = "webdataset_classes" if data.source.classes else "webdataset"
    command = train_command(f"task={config['task_name']}", f"data={option}", f"data.root={out}")
    print(f"try         {printable(command)}")
    return 1 if lost else 0


def _create_empty_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--out {folder}: is not empty; choose another folder, or empty it")
    except OSError as fault:
        raise UserError(f"--out {folder}: cannot be written ({fault.strerror}); choose another folder") from fault
    return folder
