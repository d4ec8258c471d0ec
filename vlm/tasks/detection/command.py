"""The command `vlm detect`. torch is imported only when it runs."""

from vlm.inference.arguments import ImageArguments, check_readable
from vlm.inference.command_options import DetectionFiles, DetectionOptions
from vlm.inference.options import ModelOptions, OutputOptions


def detect(
    arguments: ImageArguments,
    model: ModelOptions,
    output: OutputOptions,
    options: DetectionOptions,
    files: DetectionFiles,
) -> int:
    """Detects the objects of images, and draws them if the options say so; returns the exit status."""
    check_readable(arguments.images)
    from vlm.inference.use import write_results
    from vlm.io.output import Output
    from vlm.tasks.detection.pictures import PictureFolder
    from vlm.tasks.detection.predict import ObjectDetector

    paths = arguments.read()
    out = Output(output.out, inputs=[*paths, model.checkpoint])
    records = ObjectDetector.records(output.form, out, options)
    detector = model.load(ObjectDetector)
    detector.check_options(options)
    observer = None if files.draw is None else PictureFolder(files.draw)
    with out, records:
        return write_results(detector, paths, options, records, observer=observer)
