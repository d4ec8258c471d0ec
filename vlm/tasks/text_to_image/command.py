"""The command `vlm draw`. torch is imported only when it runs."""

import re
from base64 import b64decode
from hashlib import blake2b

from vlm.errors import UserError
from vlm.inference.arguments import LineArguments, check_readable
from vlm.inference.command_options import DrawingOptions, DrawingOutput
from vlm.inference.options import ModelOptions
from vlm.inference.tasks import commands_by_task, import_object, wrong_task_error
from vlm.io.output import Output, Record, Records, output_folder


class PictureRecords(Records):
    """Writes the picture of each record to a folder, and a line with its path.

    Args:
        form: As in Records.
        folder: The folder of the pictures; created if missing.
    Raises:
        UserError: The form is unknown, or the folder cannot be created or written to.
    """

    def __init__(self, *, form: str, folder: str) -> None:
        super().__init__(form=form, fields=("text", "path"), output=Output(None))
        self.folder = output_folder(folder)

    @property
    def live(self) -> bool:
        return False

    def write(self, record: Record) -> None:
        text, rank = str(record["text"]), record.get("rank")
        path = self.folder / picture_name(text, 1 if rank is None else int(str(rank)))
        try:
            path.write_bytes(b64decode(str(record["image"])))
        except OSError as fault:
            reason = f"cannot be written ({fault.strerror})"
            raise UserError(f"--out {path}: {reason}; choose another folder", 1) from fault
        about = {name: value for name, value in record.items() if name != "image"}
        super().write({**about, "path": str(path)})


def picture_name(text: str, rank: int) -> str:
    """The file name of a text's picture: safe and unique for the text."""
    stem = re.sub(r"\W+", "-", text.lower()).strip("-")[:60].strip("-") or "picture"
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{stem}-{digest}{f'-{rank}' if rank > 1 else ''}.png"


def draw(arguments: LineArguments, model: ModelOptions, output: DrawingOutput, options: DrawingOptions) -> int:
    """Draws pictures of texts and writes them to a folder; returns the exit status."""
    check_readable(arguments.files or [], status=2)
    from vlm.checkpoint.load import read
    from vlm.inference.predictor import task_of
    from vlm.inference.use import write_results

    texts = arguments.read()
    records = PictureRecords(form=output.form, folder=output.out)
    loaded = model.load(lambda path, dtype, **options: read(path, dtype=dtype))
    task, commands = task_of(model.checkpoint, loaded), commands_by_task("draw")
    if task not in commands:
        raise wrong_task_error(model.checkpoint, task, *commands)
    drawer = model.load(import_object(commands[task].predictor), loaded=loaded)
    drawer.check_options(options)
    with records:
        return write_results(drawer, texts, options, records)
