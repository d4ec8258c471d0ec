"""The likeliest classes of an input, as objects and as the records of the commands."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from vlm.io.output import Record, Value


@dataclass(frozen=True)
class Classes:
    """The likeliest classes of an input.

    Args:
        name: The likeliest class.
        probability: Its probability.
        top: Names and probabilities, the likeliest first; two classes may share a name.
    """

    name: str
    probability: float
    top: tuple[tuple[str, float], ...]


def rank_classes(classes: Sequence[str], probabilities: Tensor, *, top: int) -> Iterator[Classes]:
    """Yields the most probable classes of each input of a batch.

    Shapes:
        probabilities (B, C)
    """
    values, places = probabilities.topk(min(top, len(classes)))
    for row, at in zip(values.tolist(), places.tolist(), strict=True):
        pairs = tuple((classes[place], value) for place, value in zip(at, row, strict=True))
        yield Classes(*pairs[0], pairs)


def classes_record(form: str, head: Record, best: Classes) -> Record:
    """Returns the record of an input and its classes; JSON sums the probabilities of classes with the same name."""
    if form == "text":
        return {**head, "classes": "  ".join(f"{name} {value:.4f}" for name, value in best.top)}
    record: dict[str, Value] = {**head, "class": best.name, "probability": best.probability}
    if form == "jsonl":
        top: dict[str, float] = {}
        for name, value in best.top:
            top[name] = top.get(name, 0.0) + value
        return {**record, "top": top}
    for rank, (name, value) in enumerate(best.top[1:], start=2):
        record |= {f"class_{rank}": name, f"probability_{rank}": value}
    return record
