"""Begin and end tokens of a folder's model."""

from collections.abc import Mapping
from typing import Any

from vlm.errors import UserError
from vlm.models.pretrained.files import KEY, read_json

IDS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


def read_generation(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The folder's generation_config.json, or as older ones have it, what config.json says of it.

    Raises:
        UserError: It is damaged.
    """
    stated = read_json(folder, "generation_config.json") or {}
    older = {**(config.get("decoder") or {}), **config}
    known = {name: older[name] for name in IDS if older.get(name) is not None}
    return known | ({} if stated else older) | {name: value for name, value in stated.items() if value is not None}


def special_ids(generation: Mapping[str, Any], folder: str) -> dict[str, int | None]:
    """Ids of the tokens that fill a row, begin a text and end it.

    Raises:
        UserError: A text has not one end.
    """
    end = generation.get("eos_token_id")
    end = end[0] if isinstance(end, list) and len(end) == 1 else end
    if type(end) is not int:
        raise UserError(f"{KEY}: {folder} has eos_token_id={str(end)[:40]}, which is not one token; choose another")
    begins = (generation.get(name) for name in ("decoder_start_token_id", "bos_token_id"))
    pad = generation.get("pad_token_id")
    return {"pad": end if pad is None else pad, "bos": next((id for id in begins if id is not None), end), "eos": end}
