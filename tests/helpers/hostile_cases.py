"""The names under which `hostile_use.py` tells of what it used, and which of these are refused."""

from hostile_data import COCO, FOLDERS
from hostile_files import CHECKPOINTS, CONFIGS
from hostile_use import CONFIG_FILES, INFO, TOKENS

# Files whose images, and not their own content, are at fault: what can be read of them is used first.
FAILING = {"coco names a device", "coco names a pipe", "coco names files above"}

REFUSED = [f"{use} {name}" for name in CONFIGS for use in ("evaluate", "resume")]
REFUSED += [f"tensors {name}" for name in FOLDERS if name not in ("nested deeply", "of code")]
GROUPS = {"caption": CHECKPOINTS, "info": INFO, "coco": COCO, "folder": FOLDERS, "yaml": CONFIG_FILES, "tokens": TOKENS}
REFUSED += [f"{use} {name}" for use, names in GROUPS.items() for name in names]
REFUSED += ["run folder", "run folder that laughs", "tar huge"]
