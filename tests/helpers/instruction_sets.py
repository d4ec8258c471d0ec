"""Runs about thirty tests of layers, decoding and loading under fewer instruction sets than this processor has.

`python tests/helpers/instruction_sets.py` runs them once for each setting that torch and oneDNN read from the
environment. `... aarch64 FOLDER` runs them by qemu-user in FOLDER, a Debian of that architecture, which it makes there
first (about 3 GB): `apt-get install qemu-user-static debootstrap`, as root. qemu's entry must be in binfmt_misc (`mount
-t binfmt_misc none /proc/sys/fs/binfmt_misc`). All is emulated: allow for hours.
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
    "tests/nn/test_precision.py",
    "tests/nn/test_vocabulary_loss.py",
    "tests/nn/step/test_packed.py",
    "tests/models/test_vit.py",
    "tests/models/test_decoder.py",
    "tests/decoding/test_search.py",
    "tests/decoding/test_beam.py",
    "tests/checkpoint/test_files.py",
    "tests/journeys/test_sample.py",
]


def run(environment: dict[str, str]) -> int:
    """Runs the tests; returns pytest's status."""
    print(*(f"{name}={value}" for name, value in environment.items()), flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


def emulated(folder: Path) -> int:
    """Makes a Debian for aarch64 where there is none, installs this project in it, and runs the tests there."""
    inside = ["chroot", str(folder), "sh", "-ec"]
    if not (folder / "etc/debian_version").exists():
        packages = "python3,python3-venv,ca-certificates"
        base = ["debootstrap", "--arch=arm64", "--foreign", f"--include={packages}", "stable", str(folder)]
        subprocess.run(base, check=True)
        subprocess.run(["cp", "/usr/bin/qemu-aarch64-static", f"{folder}/usr/bin/"], check=True)
        subprocess.run([*inside, "/debootstrap/debootstrap --second-stage"], check=True)
    subprocess.run(["cp", "-r", str(ROOT), f"{folder}/vlm"], check=True)
    install = "cd /vlm && python3 -m venv /env && /env/bin/pip install -e '.[test]'"
    subprocess.run([*inside, install], check=True)
    return subprocess.run([*inside, f"cd /vlm && /env/bin/python -m pytest -q {' '.join(TESTS)}"]).returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["aarch64"]:
        sys.exit(emulated(Path(sys.argv[2]).resolve()))
    sys.exit(max([run(environment) for environment in SETTINGS]))
