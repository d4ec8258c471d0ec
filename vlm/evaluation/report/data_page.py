"""The page that `vlm check-data --out` writes: problems, and random samples of each split."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vlm.data.images.image import ImageError
from vlm.data.records import Record, Split
from vlm.errors import UserError
from vlm.evaluation.data_check.faults import Faults
from vlm.io import page
from vlm.io.atomic import write_text
from vlm.randomness import numpy_rng

SAMPLES = 12  # per split
MAX_MESSAGES = 50  # messages per kind


def data_page(about: Sequence[str], faults: Faults, splits: Mapping[str, Split], *, seed: int) -> str:
    """Returns the whole page as HTML.

    Args:
        about: Lines of facts.
        faults: Problems of the data.
        splits: Splits to show samples of.
        seed: Seed of the choice of samples.
    """
    body = [page.preformatted("\n".join(about)), _faults(faults)]
    for name, split in splits.items():
        if "image" in split.record(0):
            order = numpy_rng("data page", seed, name).permutation(len(split))[:SAMPLES].tolist()
            cards = page.cards(_sample(split.record(index)) for index in order)
            body.append(page.section(f"Random samples of {name}", cards))
    return page.page("Data", about[0].split(maxsplit=1)[-1], body)


def _faults(faults: Faults) -> str:
    if not faults.by_kind and not faults.errors:
        return page.section("Faults", page.paragraph("None were found.", "good"))
    parts = [page.paragraph(f"Training stops: {error}", "bad") for error in faults.errors]
    for kind, lines in faults.by_kind.items():
        spoils = kind in faults.spoiling
        head = f"{kind}: {len(lines):,} ({faults.share(kind):.1%}){', which would spoil a run' if spoils else ''}"
        more = [f"and {len(lines) - MAX_MESSAGES:,} more"] if len(lines) > MAX_MESSAGES else []
        parts += [
            page.paragraph(head, "bad" if spoils else ""),
            page.preformatted("\n".join([*lines[:MAX_MESSAGES], *more])),
        ]
    return page.section("Faults", *parts)


def _sample(record: Record) -> str:
    texts = record.texts
    try:
        image = page.thumbnail(record.image())
    except ImageError as fault:
        return page.card(None, str(fault), [record.id], texts)
    return page.card(image, texts[0] if texts else "", [record.id], texts[1:])


def write_page(folder: Path, text: str) -> None:
    """Writes report.html to a folder.

    Raises:
        UserError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "report.html", text)
    except OSError as fault:
        raise UserError(f"--out {folder}: cannot be written ({fault.strerror}); choose another folder", 1) from fault
