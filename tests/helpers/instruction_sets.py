"""Runs about thirty tests of layers, decoding and loading under fewer instruction sets than this processor has.

`python tests/helpers/instruction_sets.py` runs them once for each setting that torch and oneDNN read from the
environment. `aarch64.py` beside it runs them as on a processor of ARM.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
]
TESTS = [
    "tests/nn/test_attention.py",
    "tests/nn/test_device.py",
    "tests/nn/test_vocabulary_loss.py",
    "tests/nn/step/test_packed.py",
    "tests/models/test_vit.py",
    "tests/models/test_decoder.py",
    "tests/decoding/test_stepwise.py",
    "tests/decoding/test_beam.py",
    "tests/checkpoint/test_files.py",
    "tests/journeys/test_sample.py",
]


def run(environment: dict[str, str]) -> int:
    """Runs the tests; returns pytest's status."""
    print(*(f"{name}={value}" for name, value in environment.items()), flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    sys.exit(max([run(environment) for environment in SETTINGS]))
