"""Models of the Hugging Face hub, `hf:ORG/NAME[@REVISION]`: downloaded when they are asked for.

The library `huggingface_hub` stores the files in its own cache, from where they are read like any folder. Weights are
safetensors; pickles and code are not fetched.
"""

import os
import re
from pathlib import Path
from typing import Any

from vlm.errors import UserError

PREFIX = "hf:"
# Files of a model, its tokenizer and its preprocessing; weights are in one file or in numbered parts.
FILES = [
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", "config.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"),
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.model"),
    *("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
]
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


def fetched(place: str | os.PathLike[str], *, local: bool = False) -> Path:
    """Returns the path of a place; a model of the hub is downloaded, and its folder in the cache returned.

    Args:
        local: Whether it must be in the cache already, because a file asks for it and not the user.
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
        # The library reads the address of a mirror only when it is imported, which in a notebook is too early.
        options: Any = {"endpoint": os.environ.get("HF_ENDPOINT") or None, "allow_patterns": FILES}
        folder = huggingface_hub.snapshot_download(name, revision=revision or None, local_files_only=local, **options)
    except Exception as fault:  # the library, its client and the system raise many types
        reason = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        raise UserError(f"{text}: cannot be downloaded ({reason.strip()[:200]}); {_by_hand(name)}") from fault
    return Path(folder)


def _by_hand(name: str) -> str:
    files = "config.json, model.safetensors, tokenizer.json, preprocessor_config.json"
    return f"put {files} of huggingface.co/{name} into a folder, and give that folder"
