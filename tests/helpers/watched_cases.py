"""The names under which `watched.py` tells of what it used, and which of these are refused."""

from hostile_data import COCO, FOLDERS
from hostile_files import CHECKPOINTS, CONFIGS
from watched import CONFIG_FILES, INFO, TOKENS

# Files whose images, and not their own content, are at fault: what can be read of them is used first.
FAILING = {"coco names a device", "coco names a pipe", "coco names files above"}

REFUSED = [
    *(f"caption {name}" for name in CHECKPOINTS),
    *(f"info {name}" for name in INFO),
    *(f"{use} {name}" for name in CONFIGS for use in ("evaluate", "resume")),
    "run folder",
    "run folder that laughs",
    *(f"coco {name}" for name in COCO),
    "tar huge",
    *(f"folder {name}" for name in FOLDERS),
    *(f"tensors {name}" for name in FOLDERS if name not in ("nested deeply", "of code")),
    *(f"yaml {name}" for name in CONFIG_FILES),
    *(f"tokens {name}" for name in TOKENS),
]
