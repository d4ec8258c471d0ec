"""What a checkpoint holds, for a person."""

from collections.abc import Iterator
from typing import Any

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.verify import refusing
from vlm.errors import printable


def describe(path: str) -> str:
    """A few lines about a checkpoint: task, model, tokenizer, classes, data, step, scores.

    Raises:
        UserError: There is no such checkpoint, or it cannot be read.
    """
    loaded = ckpt.read(path)
    with refusing(path):
        return "\n".join(_lines(loaded))


def _lines(loaded: dict[str, Any]) -> list[str]:
    about = loaded["vlm"]
    count = sum(tensor.numel() for tensor in ckpt.weights(loaded).values())
    data = about["config"]["data"]
    source = str(data["source"]["_class_"])
    scores = {name: value for name, value in about["scores"].items() if "@" not in name}
    lines = [
        f"task        {about['task']}",
        f"model       {count:,} parameters",
        *_model(about["model"], "  "),
        *_parts(about),
        f"data        {source} {data.get('root') or data.get('path') or ''}".rstrip(),
        f"trained     {loaded['global_step']:,} steps, {loaded['epoch'] + 1} epochs begun",
        f"scores      {', '.join(f'{name} {value:.4g}' for name, value in scores.items()) or 'none yet'}",
    ]
    return [printable(line) for line in lines]


def _parts(about: dict[str, Any]) -> Iterator[str]:
    """What stands between the model and its user, by task."""
    if "tokenizer" in about:
        tokenizer = about["tokenizer"]
        yield f"tokenizer   {tokenizer['class']} {_plain(tokenizer['options'])}"
    if "preprocess" in about:
        yield f"preprocess  {_plain(about['preprocess'])}"
    if "classes" in about:
        yield f"classes     {', '.join(about['classes'])}"


def _model(spec: dict[str, Any], indent: str) -> list[str]:
    parts = {name: value for name, value in spec["args"].items() if isinstance(value, dict) and "name" in value}
    plain = {name: value for name, value in spec["args"].items() if name not in parts}
    lines = [f"{indent}{spec['name'].rpartition('.')[2]} {_plain(plain)}".rstrip()]
    for name, part in parts.items():
        nested = _model(part, f"{indent}  ")
        lines += [f"{indent}  {name}: {nested[0].strip()}", *nested[1:]]
    return lines


def _plain(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
