"""Runs the tests of `instruction_sets.py` by qemu-user as on a processor of ARM.

`python tests/helpers/aarch64.py FOLDER` makes in FOLDER, where they are not yet, a Python of Debian for aarch64, the
packages of this project for it, and what stands for libraries of NVIDIA (about 3 GB). It needs `apt-get install
qemu-user-static debootstrap`, root for debootstrap, Python 3.11 as Debian 12 has it, and ten minutes of a core.

torch's wheel for aarch64 is made for GPUs: it loads libraries of CUDA, of which nothing is called without a GPU.
Objects that have their names and answer each call with the error "no device" take their place.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from instruction_sets import ROOT, TESTS

TAGS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014"]
# Those that need torch, whose own needs cannot be had, and those that need a package without a wheel.
ALONE = ["torch", "torchvision", "timm", "lightning", "torchmetrics", "hydra-core"]
NEEDED_BY_THOSE = ["sympy", "networkx", "jinja2", "setuptools", "tqdm", "packaging", "fsspec[http]"]
ANSWERS = dict.fromkeys(["cudaGetErrorName", "cudaGetErrorString"], 'const char *%s(int e) { return "no device"; }')
NO_DEVICE = "long %s(void) { return 100; }"  # cudaErrorNoDevice
# What torch reads of the processor, in place of this machine's.
PROCESSOR = {
    "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n",
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
    "sys/devices/system/cpu/online": "0\n",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
}


def run(*command: str | Path, **options: str) -> None:
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, **options})


def make_system(root: Path) -> None:
    """A Debian's files; none of its programs is run, so that binfmt_misc is not needed."""
    run("debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", "--include=python3", "bookworm", root)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        run("dpkg", "-x", package, root)
    for name, content in PROCESSOR.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def install(site: Path) -> None:
    """The packages of this project and its tests, built for aarch64."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    alone = [one for one in wanted if re.split(r"[<>=!~\[]", one)[0] in ALONE]
    alone += ["pytorch-lightning", "lightning-utilities", "omegaconf>=2.3"]
    others = [one for one in wanted if one not in alone]
    platforms = [part for tag in TAGS for part in ("--platform", f"{tag}_aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site]
    wheels = [*platforms, "--platform", "any", "--python-version", "3.11", "--only-binary=:all:"]
    run(*pip, *wheels, "--no-deps", *alone)
    run(*pip, *wheels, *others, *NEEDED_BY_THOSE)
    run(*pip, "--no-deps", "antlr4-python3-runtime==4.9.3")  # of Hydra's configs; it has no wheel, and no compiled part


def lines(file: Path, *options: str) -> list[str]:
    """What readelf tells of a shared object."""
    return subprocess.run(["readelf", "-W", *options, file], capture_output=True, text=True).stdout.splitlines()


def symbols(file: Path, *, wanted: bool) -> Iterator[tuple[str, str]]:
    """Names and versions of the symbols that a shared object wants, or has."""
    for line in lines(file, "--dyn-syms"):
        parts = line.split()
        if len(parts) > 7 and parts[0].rstrip(":").isdigit() and (parts[6] == "UND") == wanted:
            name, _, version = parts[7].partition("@")
            yield name, version


def make_stubs(root: Path, site: Path, folder: Path) -> None:
    """Shared objects by the names of those that torch wants and that are nowhere, compiled by zig."""
    tools = folder.parent / "zig"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "ziglang")
    objects = [file for file in (site / "torch/lib").iterdir() if ".so" in file.name]
    there = {file.name for file in objects} | {file.name for file in root.rglob("*.so*")}
    named = {line.split("[")[1].rstrip("]") for file in objects for line in lines(file, "-d") if "(NEEDED)" in line}
    has = {name for file in objects for name, _ in symbols(file, wanted=False)}
    of: dict[str, str] = {}  # the file that a version is of
    for file in objects:
        current = ""
        for line in lines(file, "-V"):
            if found := re.search(r"File: (\S+)", line):
                current = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and current in named - there:
                of[found[1]] = current
    runtime = next(name for name in named - there if name.startswith("libcudart"))
    wants: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in objects:
        for name, version in symbols(file, wanted=True):
            if version in of:
                wants[of[version]][version].add(name)
            elif not version and name not in has and re.match(r"cu[A-Z]|cu(da|sparse|pti|blas|dnn)|nccl|nvshmem", name):
                wants[runtime][""].add(name)
    folder.mkdir()
    for name in sorted(named - there):
        functions = sorted({one for some in wants[name].values() for one in some})
        (folder / "stub.c").write_text("\n".join(ANSWERS.get(one, NO_DEVICE) % one for one in functions))
        versions = [f"{v} {{ global: {'; '.join(sorted(some))}; }};" for v, some in wants[name].items() if v]
        (folder / "stub.map").write_text("\n".join(versions))
        options = ["-shared", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{name}", "-o", folder / name]
        options += [f"-Wl,--version-script={folder / 'stub.map'}"] if versions else []
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28"]
        run(*zig, *options, folder / "stub.c", PYTHONPATH=str(tools))


def main(folder: Path, *arguments: str) -> int:
    """Runs the tests, or pytest with other arguments, by qemu; returns pytest's status."""
    root, site, stubs = (folder / name for name in ("debian", "site", "stubs"))
    folder.mkdir(parents=True, exist_ok=True)
    for place, make in ((root, make_system), (site, install)):
        if not place.exists():
            make(place)
    if not stubs.exists():
        make_stubs(root, site, stubs)
    inside = {"LD_LIBRARY_PATH": stubs, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": 1}
    emulator = ["qemu-aarch64-static", "-cpu", "neoverse-n1", "-L", root]
    emulator += [part for name, value in inside.items() for part in ("-E", f"{name}={value}")]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run([*map(str, emulator), root / "usr/bin/python3.11", *pytest], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
