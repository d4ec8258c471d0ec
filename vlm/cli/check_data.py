"""`vlm check-data`: validates a data set before training, and writes a report."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from PIL import Image

from vlm.config.tree import Config, select
from vlm.data.fields import CaptionField, Field, ImageField, LabelField
from vlm.data.images.image import ImageError
from vlm.data.records import NAMES, Record, Split
from vlm.data.text.box_field import BoxField
from vlm.data.text.inputs import EncodedField, TargetField
from vlm.data.text.preference_field import PreferenceField
from vlm.data.text.prompt_field import PromptField
from vlm.data.text.tokenizer import Tokenizer
from vlm.evaluation.data_check.faults import (
    REMEDIES,
    Faults,
    caption_line,
    find_caption_faults,
    find_document_faults,
    find_image_faults,
    find_source_faults,
    read_images,
)
from vlm.evaluation.data_check.texts import find_answer_faults, find_pair_faults, find_tag_faults, find_text_faults
from vlm.io import page
from vlm.randomness import numpy_rng

if TYPE_CHECKING:
    from vlm.training.data_module import Data

SAMPLES = 12  # per split
MAX_MESSAGES = 50  # messages per kind


def render_page(about: Sequence[str], faults: Faults, splits: Mapping[str, Split], *, seed: int) -> str:
    """Returns the report as HTML.

    Args:
        about: Lines about the data.
        faults: Problems of the data.
        splits: Splits whose samples are shown.
        seed: Random seed for the choice of samples.
    """
    body = [page.code_block("\n".join(about)), _render_faults(faults)]
    for name, split in splits.items():
        if "image" in split.record(0):
            order = numpy_rng("data page", seed, name).permutation(len(split))[:SAMPLES].tolist()
            cards = []
            for record in map(split.record, order):
                texts = record.texts
                try:
                    thumbnail = page.thumbnail(_draw(record)) if "image" in record else None
                    cards.append(page.card(thumbnail, texts[0] if texts else "", [record.id], texts[1:]))
                except ImageError as fault:
                    cards.append(page.card(None, str(fault), [record.id], texts))
            body.append(page.section(f"Random samples of {name}", page.cards(cards)))
    return page.page("Data", about[0].split(maxsplit=1)[-1], body)


def _draw(record: Record) -> Image.Image:
    """The image of a record, with its boxes if it has some."""
    if "boxes" not in record:
        return record.image()
    from vlm.tasks.detection.pictures import draw_objects
    from vlm.tasks.detection.predict import DetectedObject

    objects = [DetectedObject(item.label, 1.0, item.box) for item in record["boxes"].boxes]
    return draw_objects(record.image(), objects, with_scores=False, longest=page.THUMBNAIL)


def _render_faults(faults: Faults) -> str:
    if not faults.by_kind and not faults.errors:
        return page.section("Faults", page.paragraph("No problems found.", "good"))
    parts = [page.paragraph(f"Training stops: {error}", "bad") for error in faults.errors]
    for kind, lines in faults.by_kind.items():
        spoils = kind in faults.spoiling
        head = f"{kind}: {len(lines):,} ({faults.share(kind):.1%}){', which would invalidate a run' if spoils else ''}"
        more = [f"and {len(lines) - MAX_MESSAGES:,} more"] if len(lines) > MAX_MESSAGES else []
        parts += [
            page.paragraph(head, "bad" if spoils else ""),
            page.code_block("\n".join([*lines[:MAX_MESSAGES], *more])),
        ]
    return page.section("Faults", *parts)


MAX_PRINTED = 3  # examples printed of each kind of problem
MAX_SYNTHETIC = 1000  # samples read per split if each epoch generates new ones


def inspect_data(config: Config, faults: Faults, about: list[str], splits: dict[str, Split], limit: int | None) -> str:
    """Opens and reads a data set as training does; returns a line on what training does with it.

    Args:
        config: The checked config of a training.
        faults: The problems are added to it.
        about: Lines about the data are added to it.
        splits: The splits are added to it.
        limit: Maximum number of samples of each split; None for all.
    Raises:
        UserError: An error with which training stops; inside `collect_errors`, others are listed there.
    """
    from vlm.training.callbacks.bad_samples import check_unreadable
    from vlm.training.run.build import build_data, print_split_notes
    from vlm.training.run.run import check_batches

    data = build_data(config)
    print_split_notes(config, data)
    limit = MAX_SYNTHETIC if limit is None and data.source.is_synthetic else limit
    splits |= {name: data.split(name) for name in NAMES if name in data.splits}
    about.append(f"data        {type(data.source).__name__}")
    find_source_faults(data.source, sum(map(len, splits.values())), faults)
    if "document" in data.source.holds:
        about += [f"{name:<12}{size:,} characters" for name, size in find_document_faults(splits, faults).items()]
        data.learn_tokenizers()
    elif any(isinstance(field, ImageField) for field in data.fields.values()):
        about += image_lines(data, splits, faults, limit)
        reasons = [line for line in faults.by_kind.get("unreadable image", []) if line.startswith("train: ")]
        counted = config["callbacks"].get("bad_samples")
        if counted:
            check_unreadable(reasons, min(len(splits["train"]), limit or len(splits["train"])), counted["limit"])
    else:
        about += text_lines(data, splits, faults, limit)
    if teacher := select(config, "task.teacher.path"):
        from vlm.tasks.shared.teacher_fit import check_teacher

        about.append(f"teacher     {teacher}")
        for field in data.fields.values():
            field.prepare()
        check_teacher(str(teacher), data.fields, config)
    if reward := config["task"].get("reward"):
        from vlm.tasks.shared.rewards import try_functions

        for field in (field for field in data.fields.values() if hasattr(field, "compares")):
            try_functions(reward if isinstance(reward, dict) else {reward: 1.0}, field, splits["train"])
    devices = config["trainer"]["devices"]
    check_batches(config, data, devices if type(devices) is int and devices > 0 else 1)
    return describe_training(data, config, faults)


def describe_training(data: "Data", config: Config, faults: Faults) -> str:
    """Returns a line on what training does with a data set: the splits, and what is skipped."""
    sizes = {name: len(data.samples(name)) for name in data.splits}
    plan = f"trains on {sizes['train']:,} samples, validates on {sizes['val']:,}"
    if config.get("test", True):
        tested = "" if "test" in sizes else " of val, because there is no test split"
        plan += f", tests on {sizes[data.final_split]:,}{tested}"
    skipped = {kind: len(lines) for kind, lines in faults.by_kind.items() if kind in faults.skipped and lines}
    if skipped:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in skipped.items())
        plan += f"; skips {sum(skipped.values()):,}: {kinds}"
    return plan


def image_lines(data: "Data", splits: dict[str, Split], faults: Faults, limit: int | None) -> list[str]:
    """Checks images, and captions if there are any; returns lines about them."""
    lines = size_lines(splits, "images", limit)
    find_image_faults(
        read_images(splits, faults, limit=limit),
        faults,
        is_generated=data.source.is_synthetic,
        shorter=min(data.images[1].preprocess.image_size),
    )
    fields = data.fields.values()
    data.learn_tokenizers()
    lines += prompt_lines(fields, splits, limit)
    for field in (field for field in fields if isinstance(field, CaptionField)):
        shares = find_caption_faults(splits, field, faults, limit=limit)
        lines.append(tokenizer_line(field.tokenizer, shares))
        if "captions" in field.needs:
            lines.append(caption_line(splits, faults, limit=limit))
    for boxes in (field for field in fields if isinstance(field, BoxField)):
        boxes.prepare()
        lines += box_lines(splits, limit)
    return [*lines, *class_lines(fields, "images")]


def box_lines(splits: dict[str, Split], limit: int | None) -> list[str]:
    """Returns a line on the boxes of all splits: their number, their classes, crowds, and images without boxes."""
    objects = [record["boxes"].boxes for split in splits.values() for record in split.records(limit)]
    counts = Counter(item.label for boxes in objects for item in boxes)
    crowds = sum(item.crowd for boxes in objects for item in boxes)
    line = f"boxes       {counts.total():,} of {len(counts):,} classes"
    if counts:
        (most, high), (least, low) = counts.most_common()[0], counts.most_common()[-1]
        line += f", {low:,} of {least} to {high:,} of {most}"
    line += f"; {crowds:,} crowds" if crowds else ""
    empty = sum(not boxes for boxes in objects)
    return [line + (f"; {empty:,} images without a box" if empty else "")]


def prompt_lines(fields: Iterable[Field], splits: dict[str, Split], limit: int | None) -> list[str]:
    """Renders the conversations of fields that render all of them before training; returns a line on each."""
    lines = []
    for prompts in (field for field in fields if isinstance(field, PromptField | PreferenceField)):
        prompts.prepare()
        records = [record for split in splits.values() for record in split.records(limit)]
        lengths = [length for record in records for _, length in prompts.lengths(record)]
        if lengths:
            lines.append(f"texts       {len(lengths):,} conversations of up to {max(lengths):,} tokens with images")
    return lines


def size_lines(splits: dict[str, Split], unit: str, limit: int | None) -> list[str]:
    """Returns lines on the size of each split, and on the number of samples that are read."""
    lines = [f"{name:<12}{len(split):,} {unit}" for name, split in splits.items()]
    return [*lines, *([f"read        the first {limit:,} of each"] if limit else [])]


def text_lines(data: "Data", splits: dict[str, Split], faults: Faults, limit: int | None) -> list[str]:
    """Checks texts and their labels, tags or translations; returns lines about them."""
    lines = size_lines(splits, "samples", limit)
    fields = data.fields.values()
    data.learn_tokenizers()
    lines += prompt_lines(fields, splits, limit)
    for target in (field for field in fields if isinstance(field, TargetField)):
        shares = find_pair_faults(
            splits, target.tokenizer, target.max_len, faults, limit=limit, is_generated=data.source.is_synthetic
        )
        return [*lines, tokenizer_line(target.tokenizer, shares)]
    unit = "sentence" if "tags" in data.source.holds else "text"
    for field in (field for field in fields if isinstance(field, EncodedField)):
        shares = find_text_faults(splits, field, faults, limit=limit, is_generated=data.source.is_synthetic, unit=unit)
        lines.append(tokenizer_line(field.tokenizer, shares))
    if "tags" in data.source.holds:
        lines += find_tag_faults(splits, faults, limit=limit)
    if "answers" in data.source.holds:
        lines += find_answer_faults(splits, faults, limit=limit, is_generated=data.source.is_synthetic)
    return [*lines, *class_lines(fields, "texts")]


def tokenizer_line(tokenizer: Tokenizer, shares: dict[str, float]) -> str:
    coverage = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    return f"tokenizer   {tokenizer.vocab_size:,} pieces; coverage of the texts' tokens: {coverage}"


def class_lines(fields: Iterable[Field], unit: str) -> list[str]:
    """Returns a line on the classes of each field of labels."""
    lines = []
    for labels in (field for field in fields if isinstance(field, LabelField)):
        counts = dict(zip(labels.classes, labels.counts("train"), strict=True))
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        shares = f"{counts[least]:,} {unit} of {least} to {counts[most]:,} of {most}"
        lines.append(f"classes     {len(counts)}; {shares if least != most else f'{counts[most]:,} {unit} of each'}")
    return lines


def group_errors(errors: Iterable[str]) -> list[list[str]]:
    """Returns the errors in groups with the same remedy, which is the end of a line after a semicolon."""
    groups: dict[str, list[str]] = {}
    for error in errors:
        groups.setdefault(error if "\n" in error else error.rpartition("; ")[2], []).append(error)
    return list(groups.values())


def fault_lines(faults: Faults) -> list[str]:
    """Returns lines on the problems, with the first few messages of each kind."""
    lines: list[str] = []
    for errors in group_errors(faults.errors):
        count = f"{len(errors):,} times: " if len(errors) > 1 else ""
        message, *further = "\n".join(errors[:MAX_PRINTED]).split("\n")
        lines += ["", f"{'STOPS':<12}{count}{message}", *(f"  {line}" for line in further)]
        lines += [f"  and {len(errors) - MAX_PRINTED:,} more"] if len(errors) > MAX_PRINTED else []
    kinds = [kind for kind, named in faults.by_kind.items() if named]
    for kind in sorted(kinds, key=lambda kind: (kind not in faults.spoiling, kind not in faults.skipped)):
        named = faults.by_kind[kind]
        mark = "SPOILS" if kind in faults.spoiling else "skipped" if kind in faults.skipped else "note"
        lines += ["", f"{mark:<12}{kind}: {len(named):,} ({faults.share(kind):.1%} of {faults.looked_at[kind]:,})"]
        lines += [f"  {line}" for line in named[:MAX_PRINTED]]
        lines += [f"  and {len(named) - MAX_PRINTED:,} more"] if len(named) > MAX_PRINTED else []
        lines += [f"  remedy: {REMEDIES[kind]}"] if kind in REMEDIES else []
    if not lines:
        return ["verdict     no problems found"]
    spoils = "training runs, but problems marked SPOILS invalidate its scores" if faults.spoiling else ""
    stops = "training stops because of problems marked STOPS" if faults.errors else ""
    return [*lines, "", f"verdict     {stops or spoils or 'no problems that invalidate a run'}"]
