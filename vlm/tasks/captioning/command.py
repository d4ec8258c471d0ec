"""The command `vlm caption` and its output files. torch is imported only when it runs.

A sidecar is the caption of photo.jpg in photo.txt next to it, a format for training image generators.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm.errors import UserError
from vlm.inference.arguments import ImageArguments, check_readable
from vlm.inference.command_options import CaptionFiles, CaptionOptions
from vlm.inference.options import ModelOptions, OutputOptions, refuse_combination
from vlm.io.files import read_arguments, write_text
from vlm.io.output import Output, Records, find_completed
from vlm.machine import paused_collection


def caption(
    arguments: ImageArguments, model: ModelOptions, output: OutputOptions, options: CaptionOptions, files: CaptionFiles
) -> int:
    """Captions images, or shards of images, as the options say; returns the exit status."""
    names = read_arguments(arguments.images)
    if files.overwrite and not files.sidecar:
        raise UserError("--overwrite replaces what --sidecar wrote; give --sidecar too")
    image_only = {"--continue": files.resume, "--sidecar": files.sidecar}
    if any(name.endswith(".tar") for name in names):
        refuse_combination("shards", {"--trace": options.trace, "--attention": files.attention, **image_only})
        from vlm.tasks.captioning.shard_captions import ShardPlan, caption_by_rank, caption_on_ray, caption_shards

        engines = {None: caption_by_rank, "ray": caption_on_ray}
        if files.engine not in engines:
            raise UserError(f"--engine {files.engine}: is unknown; give ray, or leave it out")
        plan = ShardPlan(model=model, output=output, options=options)
        return caption_shards(names, plan, engine=engines[files.engine])
    refuse_combination("images", {"--engine": files.engine})
    from vlm.inference.inputs import find_images

    paths, records = find_images(names), None
    if files.sidecar:
        conflicts = {"--out": output.out, "--format": output.form != "text", "--continue": files.resume}
        refuse_combination("--sidecar", conflicts | {"--results": options.results > 1})
        owners: dict[Path, str] = {}
        for path in paths:
            if (owner := owners.setdefault(sidecar(path), path)) != path:
                raise UserError(f"--sidecar: {owner} and {path} would share {sidecar(path)}; rename one of them")
        paths = [path for path in paths if files.overwrite or not sidecar(path).exists()]
        records = Sidecars()
    if not files.resume:  # which may have their captions already
        check_readable(paths)
    return _caption_images(paths, records, model, output, options, files)


def _caption_images(
    paths: Sequence[str],
    records: Records | None,
    model: ModelOptions,
    output: OutputOptions,
    options: CaptionOptions,
    files: CaptionFiles,
) -> int:
    """Captions image files into the records, by default those of --out: lines or a table as they come, or a page.

    Raises:
        UserError: --format, --continue or their file of --out does not fit, or an option does not suit the model.
    """
    with paused_collection():
        from vlm.inference.use import write_results
        from vlm.inference.writing import Trace
        from vlm.tasks.captioning.predict import Captioner, CaptionPage

    input_files = [*paths, model.checkpoint]
    out = Output(output.out, inputs=input_files, append=files.resume)
    if records is None and output.form == "html":
        if out.path is None:
            raise UserError("--format html needs --out FILE")
        records = CaptionPage(out)
    elif records is None:
        records = Records(form=output.form, fields=("image", "caption"), output=out)
    captioner = model.load(Captioner)
    captioner.check_options(options)
    trace = Trace(options.trace, captioner, options, inputs=input_files, out=output.out)
    observer = None
    if files.attention is not None:
        from vlm.inference.attention.pictures import AttentionFolder

        observer = AttentionFolder(captioner, files.attention)
    if files.resume:
        if records.output.path is None or records.form == "html":
            raise UserError("--continue needs --out FILE, in text, jsonl or csv, which it continues")
        columns = ["image", *(["rank"] if options.results > 1 else []), "caption", "logprob", "confidence"]
        columns += ["attention"] if observer is not None else []
        out_file, results = records.output.path, options.results
        is_captioned = find_completed(out_file, form=records.form, columns=columns, paths=paths, results=results)
        paths = [path for path in paths if not is_captioned(path)]
    with out, records, trace:
        return write_results(captioner, paths, options, records, trees=trace.trees, observer=observer)


def sidecar(image: str) -> Path:
    """Returns the file of an image's caption."""
    return Path(image).with_suffix(".txt")


class Sidecars(Records):
    """Records whose texts are written beside their images, each file completely or not at all."""

    def __init__(self) -> None:
        super().__init__(form="text", fields=("image", "caption"), output=Output(None))

    def write(self, record: Mapping[str, Any]) -> None:
        path = sidecar(record["image"])
        try:
            write_text(path, f"{record['caption']}\n")
        except OSError as fault:
            raise UserError(
                f"{path}: cannot be written ({fault.strerror}); free disk space, or change the folder's permissions", 1
            ) from fault
