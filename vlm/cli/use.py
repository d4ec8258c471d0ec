"""What the commands that use a model make of their options. torch is imported only inside a function."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlm.errors import UserError
from vlm.inference.output import Output, Records

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


def caption_records(form: str, output: Output) -> Any:
    """Where captions go: lines or a table as they come, or a page at the end."""
    if form != "html":
        return Records(form=form, fields=("image", "caption"), output=output)
    if output.path is None:
        raise UserError("--format html needs --out FILE")
    from vlm.evaluation.report.caption_page import CaptionPage

    return CaptionPage(output)


def attention_of(captioner: "Captioner", folder: str | None) -> "Observer | None":
    """What draws the pictures of --attention."""
    if folder is None:
        return None
    from vlm.evaluation.report.attention_folder import AttentionFolder

    return AttentionFolder(captioner, folder)


def left_over(
    paths: Sequence[str], out: str | None, records: Any, *, columns: Sequence[str], results: int
) -> list[str]:
    """The images that --continue has still to caption.

    Raises:
        UserError: There is nothing that can be gone on with.
    """
    if out is None or not isinstance(records, Records):
        raise UserError("--continue needs --out FILE, in text, jsonl or csv: there it goes on")
    from vlm.inference.resume_output import begun

    has = begun(out, form=records.form, columns=columns, paths=paths, results=results)
    return [path for path in paths if not has(path)]


def refuse_undecoded(prompts: Sequence[str]) -> None:
    """Refuses prompts that are no UTF-8, which no tokenizer can read.

    Raises:
        UserError: One is none.
    """
    for prompt in prompts:
        if any("\udc80" <= char <= "\udcff" for char in prompt):
            raise UserError(f"prompt {prompt}: is not UTF-8; give text in UTF-8")
