"""`vlm check-data`: checks a data set before training on it."""

from collections.abc import Iterable
from typing import Annotated, Any

from vlm.config.compose import compose
from vlm.data.fields import CaptionField, Field, LabelField
from vlm.data.records import NAMES, collect_errors
from vlm.data.text.input_fields import EncodedField
from vlm.data.text.target_field import TargetField
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import printable
from vlm.evaluation.data_check.faults import (
    REMEDIES,
    Faults,
    caption_faults,
    caption_line,
    document_faults,
    image_faults,
    read_images,
    source_faults,
)
from vlm.evaluation.data_check.pairs import pair_faults
from vlm.evaluation.data_check.texts import answer_faults, tag_faults, text_faults, text_source_faults
from vlm.evaluation.report.data_page import data_page, write_page
from vlm.inference.options import Option, Overrides
from vlm.io.output import output_folder
from vlm.io.terminal import folded

NAMED = 8  # faults printed of each kind
FRESH = 1000  # samples read of a split if every epoch draws new ones


def check(
    overrides: Overrides = None,
    out: Annotated[str | None, Option("Folder for a page with faults and samples.", metavar="DIR")] = None,
    limit: Annotated[int | None, Option("Samples of each split that are read; all by default.", least=1)] = None,
    seed: Annotated[int, Option("Seed of the choice of samples on the page.")] = 0,
) -> int:
    """Prints what is wrong with a data set and returns the exit status: 1 if it would spoil a run.

    Raises:
        UserError: The config is at fault, or the data cannot be opened at all.
    """
    from vlm.training.config.check import check as check_config
    from vlm.training.run.run import build_data, check_fit

    config = compose(overrides or [], check_config)
    check_fit(config)
    folder = None if out is None else output_folder(out)
    with collect_errors():
        data: Any = build_data(config)
    faults = Faults()
    limit = FRESH if limit is None and data.source.drawn else limit
    splits: dict[str, Any] = {name: data.split(name) for name in NAMES if name in data.splits}
    about = [f"data        {type(data.source).__name__}"]
    if "document" in data.source.holds:
        about += [f"{name:<12}{size:,} characters" for name, size in document_faults(splits, faults).items()]
    elif any("image" in field.needs for field in data.fields.values()):
        about += image_lines(data, splits, faults, limit)
    else:
        about += text_lines(data, splits, faults, limit)
    print(folded("\n".join(map(printable, [*about, *fault_lines(faults)]))), flush=True)
    if folder is not None:
        write_page(folder, data_page(about, faults, splits, seed=seed))
        print(f"page        {folder / 'report.html'}")
    return 1 if faults.spoiling else 0


def image_lines(data: Any, splits: dict[str, Any], faults: Faults, limit: int | None) -> list[str]:
    """Checks images, and captions if there are any; returns a line for each fact."""
    drawn = data.source.drawn
    lines = sizes(splits, "images", limit)
    lines += [f"left out    {line}" for line in source_faults(data.source, sum(map(len, splits.values())), faults)]
    image_faults(
        read_images(splits, faults, limit=limit), faults, drawn=drawn, shorter=min(data.images[1].preprocess.image_size)
    )
    fields = data.fields.values()
    data.learn_tokenizers()
    for field in (field for field in fields if isinstance(field, CaptionField)):
        shares = caption_faults(splits, field, faults, limit=limit)
        lines.append(tokenizer_line(field.tokenizer, shares))
        if "captions" in field.needs:
            lines.append(caption_line(splits, faults, limit=limit))
    return [*lines, *class_lines(fields, "images")]


def sizes(splits: dict[str, Any], unit: str, limit: int | None) -> list[str]:
    """Returns lines on the size of each split, and on how much of it is read."""
    lines = [f"{name:<12}{len(split):,} {unit}" for name, split in splits.items()]
    return [*lines, *([f"looked at   the first {limit:,} of each"] if limit else [])]


def text_lines(data: Any, splits: dict[str, Any], faults: Faults, limit: int | None) -> list[str]:
    """Checks texts and their labels, tags or translations; returns a line for each fact."""
    drawn = data.source.drawn
    lines = sizes(splits, "samples", limit)
    lines += [f"left out    {line}" for line in text_source_faults(data.source, sum(map(len, splits.values())), faults)]
    fields = data.fields.values()
    data.learn_tokenizers()
    for target in (field for field in fields if isinstance(field, TargetField)):
        shares = pair_faults(splits, target.tokenizer, target.max_len, faults, limit=limit, drawn=drawn)
        return [*lines, tokenizer_line(target.tokenizer, shares)]
    unit = "sentence" if "tags" in data.source.holds else "text"
    for field in (field for field in fields if isinstance(field, EncodedField)):
        shares = text_faults(splits, field, faults, limit=limit, drawn=drawn, unit=unit)
        lines.append(tokenizer_line(field.tokenizer, shares))
    if "tags" in data.source.holds:
        lines += tag_faults(splits, faults, limit=limit)
    if "answers" in data.source.holds:
        lines += answer_faults(splits, faults, limit=limit, drawn=drawn)
    return [*lines, *class_lines(fields, "texts")]


def tokenizer_line(tokenizer: Tokenizer, shares: dict[str, float]) -> str:
    coverage = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    return f"tokenizer   {tokenizer.vocab_size:,} pieces; share of tokens that are such: {coverage}"


def class_lines(fields: Iterable[Field], unit: str) -> list[str]:
    """Returns a line on the classes of each field of labels."""
    lines = []
    for labels in (field for field in fields if isinstance(field, LabelField)):
        counts = dict(zip(labels.classes, labels.counts("train"), strict=True))
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        lines.append(f"classes     {len(counts)}; {counts[least]:,} {unit} of {least} to {counts[most]:,} of {most}")
    return lines


def fault_lines(faults: Faults) -> list[str]:
    """Returns lines on the faults by kind, those that spoil a run first, with the first few of each."""
    lines: list[str] = []
    for kind in sorted(faults.by_kind, key=lambda kind: kind not in faults.spoiling):
        named, mark = faults.by_kind[kind], "SPOILS" if kind in faults.spoiling else "note"
        lines += ["", f"{mark:<12}{kind}: {len(named):,} ({faults.share(kind):.1%} of {faults.looked_at[kind]:,})"]
        lines += [f"  {line}" for line in named[:NAMED]]
        lines += [f"  and {len(named) - NAMED:,} more"] if len(named) > NAMED else []
        lines += [f"  remedy: {REMEDIES[kind]}"] if kind in REMEDIES else []
    verdict = (
        "found nothing"
        if not lines
        else "something would spoil a run"
        if faults.spoiling
        else "nothing that spoils a run"
    )
    return [*lines, *([""] if lines else []), f"verdict     {verdict}"]
