"""Models of the Hugging Face hub, `hf:ORG/NAME[@REVISION]`: downloaded where they are asked for, and only there.

The files go through the library `huggingface_hub` into its own cache, and are then read as any folder is. Weights are
safetensors; pickles and code are not even fetched.
"""

import os
import re
from pathlib import Path
from typing import Any

from vlm.errors import UserError

PREFIX = "hf:"
# What a model, its tokenizer and its preprocessing are read from; weights are whole or in numbered parts.
FILES = [
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", "config.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"),
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.model"),
    *("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
]
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


def fetched(place: str | os.PathLike[str], *, local: bool = False) -> Path:
    """The path of a place: of a model of the hub, the folder in the cache that it was downloaded into.

    Args:
        local: Whether it has to be in the cache already, where a file and no user asks for it.
    Raises:
        UserError: It cannot be downloaded, and is not in the cache.
    """
    text = os.fspath(place)
    if not text.startswith(PREFIX):
        return Path(text)
    named = text.removeprefix(PREFIX)
    if not _NAME.fullmatch(named):
        raise UserError(f"{text}: is not a model of the hub; write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    name, _, revision = named.partition("@")
    try:
        import huggingface_hub
    except ImportError as fault:
        raise UserError(
            f"{text}: huggingface_hub is not installed; pip install vlm-lightning[hf], or {_by_hand(name)}"
        ) from fault
    try:
        # The library itself reads the address of a mirror once, where it is imported: in a notebook, too early.
        options: Any = {"endpoint": os.environ.get("HF_ENDPOINT") or None, "allow_patterns": FILES}
        folder = huggingface_hub.snapshot_download(name, revision=revision or None, local_files_only=local, **options)
    except Exception as fault:  # of the library, of its client and of the system there are many
        reason = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        raise UserError(f"{text}: cannot be downloaded ({reason.strip()[:200]}); {_by_hand(name)}") from fault
    return Path(folder)


def _by_hand(name: str) -> str:
    files = "config.json, model.safetensors, tokenizer.json, preprocessor_config.json"
    return f"put {files} of huggingface.co/{name} into a folder, and give that folder"
