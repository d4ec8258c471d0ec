"""What the commands that use a model make of their options. torch is imported only inside a function."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlm.errors import UserError

if TYPE_CHECKING:
    import torch

    from vlm.decoding.constraints import Rules
    from vlm.decoding.options import Decoding
    from vlm.inference.captioning import Captioner, Observer


def choose_device(name: str) -> str:
    """The device of --device.

    Raises:
        UserError: It is unknown, or this machine has none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: {name!r} is unknown; choose auto, cpu or cuda")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; choose cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def choose_precision(name: str, device: str) -> "torch.dtype":
    """The type of numbers of --precision; auto takes bfloat16 where the device has instructions for it.

    Raises:
        UserError: It is unknown.
    """
    if name not in ("auto", "fp32", "bf16"):
        raise UserError(f"--precision: {name!r} is unknown; choose auto, fp32 or bf16")
    import torch

    from vlm.nn.precision import has_bfloat16

    low = name == "bf16" or (name == "auto" and has_bfloat16(device))
    return torch.bfloat16 if low else torch.float32


def machine(device: str, precision: str) -> dict[str, Any]:
    """Where a model runs and in what numbers, of --device and --precision."""
    chosen = choose_device(device)
    return {"device": chosen, "dtype": choose_precision(precision, chosen)}


def choose_workers(given: int | None) -> int:
    """Threads that read images, of --workers."""
    from vlm.inference.inputs import default_workers

    return default_workers() if given is None else given


def decoding_of(
    rules: "Rules",
    *,
    sample: bool,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    **options: Any,
) -> "Decoding":
    """How texts are searched for or drawn; other options as in Decoding."""
    from vlm.decoding.options import Decoding
    from vlm.decoding.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return Decoding(rules=rules, sampling=sampling if sample else None, **options)


def caption_writer(form: str, out: str | None, *, append: bool) -> Any:
    """Where captions go: lines or a table as they come, or a page at the end."""
    from vlm.inference.files import Writer

    if form != "html":
        return Writer(form=form, fields=("image", "caption"), out=out, append=append)
    if out is None:
        raise UserError("--format html needs --out FILE")
    from vlm.evaluation.report.caption_page import CaptionPage

    return CaptionPage(out)


def attention_of(captioner: "Captioner", folder: str | None) -> "Observer | None":
    """What draws the pictures of --attention."""
    if folder is None:
        return None
    from vlm.evaluation.report.attention_folder import AttentionFolder

    return AttentionFolder(captioner, folder)


def left_over(paths: Sequence[str], out: str | None, *, form: str, results: int) -> list[str]:
    """The images that --continue has still to caption.

    Raises:
        UserError: There is nothing that can be gone on with.
    """
    if out is None or form == "html":
        raise UserError("--continue needs --out FILE, in text, jsonl or csv: there it goes on")
    from vlm.inference.resume_output import begun

    has = begun(out, form=form, results=results)
    return [path for path in paths if not has(path)]


def write_json(content: object, path: str) -> None:
    """Writes the trees of --trace.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
    except OSError as fault:
        raise UserError(f"--trace {path}: cannot be written ({fault.strerror}); choose another file", 1) from fault
