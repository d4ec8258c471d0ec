"""The section of a report about captions."""

from collections.abc import Mapping
from typing import Any

from vlm.evaluation.report.sections import SHOWN, Card, Cards, Section, random_places


def caption_sections(images: Mapping[str, Mapping[str, Any]], language: str | None = None) -> list[Section]:
    """Returns sections with random captions, and the best and worst by CIDEr and ROUGE-L.

    Args:
        images: Caption, references and scores of each image, by its name.
        language: Language of the captions, for the titles; None if there is only one.
    """
    ranked = sorted(images, key=lambda name: (-images[name]["cider"], -images[name]["rouge_l"], name))
    count = min(SHOWN, -(-len(ranked) // 2))
    kinds = {"Random captions": [ranked[at] for at in random_places(len(ranked))]}
    kinds |= {"Best captions": ranked[:count], "Worst captions": ranked[::-1][:count]}
    kinds = kinds if language is None else {f"{title} ({language})": names for title, names in kinds.items()}
    return [Section(title, [Cards([_card(name, images[name]) for name in names])]) for title, names in kinds.items()]


def _card(name: str, row: Mapping[str, Any]) -> Card:
    scores = f"CIDEr {row['cider']:.2f}, ROUGE-L {row['rouge_l']:.2f}"
    scores += f", loss {row['loss']:.2f}" if "loss" in row else ""
    return Card(image=name, text=row["caption"], lines=[scores, name], references=row["references"])
