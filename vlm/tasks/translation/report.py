"""The section of a report about translations."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.evaluation.report.sections import SHOWN, Note, Pictures, Section, Table, random_places
from vlm.inference.attention.alignment import Alignment, alignment_picture

TEXTS = ("text", "translation", "reference")


def translation_sections(
    samples: Sequence[Mapping[str, Any]], notes: Sequence[str], alignments: Sequence[Alignment] = ()
) -> list[Section]:
    """Returns sections with random translations, those with the highest loss, and notes on the metrics.

    Args:
        alignments: Attention between the words of a few translations and their texts.
        samples: Texts, translations, references and losses.
        notes: Lines about the metrics.
    """
    kinds = {
        "Random translations": [samples[at] for at in random_places(len(samples))],
        "Highest loss": sorted(samples, key=lambda sample: -sample["loss"])[:SHOWN],
    }
    tables = [Section(title, [_table(chosen)]) for title, chosen in kinds.items()]
    if alignments:
        note = "Dark is what the last layer attended to when it wrote the word on the left, on the mean of its heads."
        drawn = [(" ".join(one.written), alignment_picture(one)) for one in alignments]
        tables.append(Section("Where it looked", [Note(note), Pictures(drawn)]))
    return [*tables, Section("Metrics", [Note(note) for note in notes])]


def _table(samples: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[*(sample[name] for name in TEXTS), f"{sample['loss']:.2f}"] for sample in samples]
    return Table([*TEXTS, "loss"], rows)
