"""What a checkpoint holds, for a person."""

from typing import Any

from vlm import checkpoint as ckpt


def describe(path: str) -> str:
    """A few lines about a checkpoint: task, model, parameters, tokenizer, data, step, scores.

    Raises:
        UserError: There is no such checkpoint, or it cannot be read.
    """
    loaded = ckpt.read(path)
    about = loaded["vlm"]
    count = sum(tensor.numel() for tensor in ckpt.weights(loaded).values())
    data = about["config"]["data"]
    source = data["source"]["_target_"].rpartition(".")[2]
    tokenizer = about["tokenizer"]
    scores = {name: value for name, value in about["scores"].items() if "@" not in name}
    lines = [
        f"task        {about['task']}",
        f"model       {count:,} parameters",
        *_model(about["model"], "  "),
        f"tokenizer   {tokenizer['class']} {_plain(tokenizer['options'])}",
        f"preprocess  {_plain(about['preprocess'])}",
        f"data        {source} {data.get('root') or ''}".rstrip(),
        f"trained     {loaded['global_step']:,} steps, {loaded['epoch'] + 1} epochs begun",
        f"scores      {', '.join(f'{name} {value:.4g}' for name, value in scores.items()) or 'none yet'}",
    ]
    return "\n".join(lines)


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
