"""vlm: train, resume, evaluate and use small vision-language models."""

__version__ = "0.1.0"

import os

if os.name == "nt":  # locks, signals and memory limits of a run are POSIX's
    raise SystemExit("error: vlm runs on Linux, on macOS and in WSL, but not on Windows itself")
