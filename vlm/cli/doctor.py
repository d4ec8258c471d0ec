"""`vlm doctor`: prints hardware, versions and chosen defaults. torch is imported only inside a function."""

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

from vlm import __version__, machine
from vlm.errors import printable
from vlm.inference.options import Option

NAME = "vlm-lightning"
LIBRARIES = ["torch", "lightning", "torchvision", "timm", "transformers", "tokenizers", "sentencepiece", "hydra-core"]
LIBRARIES += ["torchmetrics", "numpy", "pillow"]
GIB = 1 << 30
_REQUIREMENT = re.compile(r"^([\w.-]+).*extra == ['\"]([\w-]+)['\"]")


def doctor(form: Annotated[str, Option("text or jsonl.", ("--format",), choices=("text", "jsonl"))] = "text") -> int:
    """Prints hardware, versions, chosen defaults and missing packages; returns the exit status."""
    for name, fact in iter_facts():
        if form == "jsonl":
            print(json.dumps({"name": name, "fact": fact}, ensure_ascii=False))
        else:
            print(printable(f"{name:<12}{fact}"))
    return 0


def iter_facts() -> Iterator[tuple[str, str]]:
    """Yields pairs of a name and a fact."""
    import torch

    yield "vlm", f"{__version__}, {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", f"{platform.platform()}, {platform.machine()}"
    yield "libraries", ", ".join(f"{name} {_version(name) or 'missing'}" for name in LIBRARIES)
    yield "processor", describe_processor()
    quota = machine.cpu_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    usable = f"this process may run on {machine.usable_cpus()}, {limit}"
    yield "cores", f"{machine.cores()} used of {os.cpu_count()}: {usable}"
    yield "threads", f"{torch.get_num_threads()} compute; set OMP_NUM_THREADS to choose"
    container, memory = machine.memory_limit(), []
    with suppress(AttributeError, ValueError, OSError):  # not every system reports it
        memory.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.1f} GiB")
    memory.append(f"the container's limit {container / GIB:.1f} GiB" if container else "no limit of a container")
    yield "memory", ", ".join(memory)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{g.name}, {g.total_memory / GIB:.0f} GiB, compute capability {g.major}.{g.minor}" for g in gpus]
    names += ["Apple's, through Metal"] if torch.backends.mps.is_available() else []
    yield "gpu", "; ".join(names) or "none usable by torch"
    yield from iter_defaults()
    for name, place in (("here", Path.cwd()), ("temporary", Path(tempfile.gettempdir()))):
        writable = "writable" if os.access(place, os.W_OK) else "not writable: set runs=DIR to another folder"
        yield name, f"{place}: {writable}, {shutil.disk_usage(place).free / GIB:.1f} GiB free"
    yield from iter_extras()


def describe_processor() -> str:
    """Returns the processor's name and the instruction sets that determine its speed, as torch sees them."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    wanted = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "sve", "bf16", "neon")
    available = [name for name in wanted if capabilities.get(name)]
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    onednn = "yes" if torch.backends.mkldnn.is_available() else "no"
    uses = f"{torch.backends.cpu.get_cpu_capability()}, oneDNN {onednn}"
    return f"{name}: {', '.join(available) or 'no wide instruction sets'}; torch uses {uses}"


def iter_defaults() -> Iterator[tuple[str, str]]:
    """Yields the values that `auto` selects, with reasons."""
    import torch

    from vlm.data.workers import default_workers
    from vlm.nn.device import choose_device, explain_bfloat16, explain_int8
    from vlm.nn.step.native import load_library
    from vlm.nn.step.packed import packs

    device = choose_device("auto")
    trains_on = "cuda" if torch.cuda.is_available() else "cpu"
    for name, place, yes, no in (
        ("training", trains_on, "bf16-mixed", "32-true"),
        ("decoding", device, "bf16", "fp32"),
    ):
        low, why = explain_bfloat16(place)
        yield name, f"{yes if low else no} on {place}: {why}"
    has_int8, why = explain_int8(device)
    yield "int8", f"{'with --precision int8' if has_int8 else 'no'}: {why}"
    kinds = [str(dtype).removeprefix("torch.") for dtype in (torch.float32, torch.bfloat16) if packs(dtype)]
    yield "packing", f"weights of {' and '.join(kinds)}" if kinds else "none; linear layers are not packed"
    missing = "no g++ with OpenMP: decode steps are those of torch's operators, which are slower"
    yield "compiler", "decode steps are compiled for this processor" if load_library() is not None else missing
    yield "workers", f"{default_workers()} read images"


def iter_extras() -> Iterator[tuple[str, str]]:
    """Yields each extra, with the command that installs it if packages are missing."""
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        yield "extras", "unknown: the package is not installed; run pip install -e . in its folder"
        return
    packages: dict[str, list[str]] = {}
    for name, extra in (match.groups() for line in lines if (match := _REQUIREMENT.match(line))):
        packages.setdefault(extra, []).append(name)
    for extra, names in packages.items():
        missing = [name for name in names if name != NAME and _version(name) is None]
        fact = f'missing {", ".join(missing)}: pip install "{NAME}[{extra}]"' if missing else "installed"
        yield "extra", f"{extra}: {fact}"
    if "coco" in packages and shutil.which("java") is None:
        yield "java", "missing; METEOR and SPICE need it"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
