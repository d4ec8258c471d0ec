"""Settings of a sentence-transformers folder for its vectors: pooling, normalisation, longest text."""

import json
from typing import Any

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields, flag, integer
from vlm.models.pretrained.folder import Folder

MODULES, OWN = "modules.json", "sentence_bert_config.json"
POOLINGS = {"mean": "mean", "cls": "first"}  # sentence-transformers' name -> vlm's
OLD_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # as in most published folders
ORDER = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def stated_embedding(folder: Folder) -> dict[str, Any]:
    """Returns pooling, normalisation and longest text of a folder, as in a checkpoint; empty for any other folder.

    Raises:
        UserError: The folder is damaged, or asks for something unsupported.
    """
    content = folder.text(MODULES)
    if content is None:
        return {}
    file = folder.path / MODULES
    try:
        modules = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in json.loads(content)}
    except (RecursionError, ValueError, KeyError, TypeError) as fault:
        raise UserError(f"{file} cannot be read ({fault}); restore the file") from fault
    if list(modules) not in ORDER or modules["Transformer"]:
        raise UserError(
            f"{file}: lists {', '.join(modules)[:100]}; what is read is a Transformer in the folder itself, "
            "Pooling and Normalize; choose another folder"
        )
    embedding = {"pooling": _pooling(folder, f"{modules['Pooling']}/config.json"), "normalize": "Normalize" in modules}
    _refuse_prompts(folder.json("config_sentence_transformers.json"))
    length = _longest(folder)
    return {"embedding": embedding} | ({} if length is None else {"max_len": length})


def _pooling(folder: Folder, name: str) -> str:
    config = folder.json(name)
    if config is None:
        raise UserError(f"{folder} has no {name}; fetch it again")
    mode = config.values.get("pooling_mode")
    if mode is None:
        chosen = [key for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True]
        mode = OLD_POOLINGS.get(chosen[0], chosen[0]) if len(chosen) == 1 else chosen
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise UserError(f"{config.file}: pools by {mode!r:.60}; what is read is mean or cls; choose another folder")
    return POOLINGS[mode]


def _refuse_prompts(config: Fields | None) -> None:
    """Refuses a default prompt before each text, which vlm does not add."""
    if config is not None and "default_prompt_name" in config:
        raise config.fault("default_prompt_name", "a prompt before each text, which is not added")


def _longest(folder: Folder) -> int | None:
    """Reads the longest text in tokens, from sentence_bert_config.json or, in newer folders, tokenizer_config.json."""
    own, tokenizer = folder.json(OWN), folder.json("tokenizer_config.json")
    if own is not None and own.read(flag("do_lower_case", False)):
        raise own.fault("do_lower_case", "which is not done beside the tokenizer")
    if own is not None and "max_seq_length" in own:
        return own.read(integer("max_seq_length", low=3))
    stated = None if tokenizer is None else tokenizer.values.get("model_max_length")
    return stated if type(stated) is int and 3 <= stated <= 2**20 else None
