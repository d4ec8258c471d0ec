"""The command `vlm detect`. torch is imported only when it runs."""

from vlm.inference.arguments import ImageArguments, check_readable
from vlm.inference.command_options import DetectionFiles, DetectionOptions
from vlm.inference.options import ModelOptions, OutputOptions
from vlm.inference.tasks import commands_by_task, import_object, wrong_task_error


def detect(
    arguments: ImageArguments,
    model: ModelOptions,
    output: OutputOptions,
    options: DetectionOptions,
    files: DetectionFiles,
) -> int:
    """Detects the objects of images, and draws them if the options say so; returns the exit status."""
    check_readable(arguments.images)
    from vlm.checkpoint.load import read
    from vlm.inference.predictor import task_of
    from vlm.inference.use import write_results
    from vlm.io.output import Output
    from vlm.tasks.detection.pictures import PictureFolder

    paths = arguments.read()
    out = Output(output.out, inputs=[*paths, model.checkpoint])
    loaded = model.load(lambda path, dtype, **options: read(path, dtype=dtype))
    task, commands = task_of(model.checkpoint, loaded), commands_by_task("detect")
    if task not in commands:
        raise wrong_task_error(model.checkpoint, task, *commands)
    kind = import_object(commands[task].predictor)
    records = kind.records(output.form, out, options)
    detector = model.load(kind, loaded=loaded)
    detector.check_options(options)
    observer = None if files.draw is None else PictureFolder(files.draw)
    with out, records:
        return write_results(detector, paths, options, records, observer=observer)
