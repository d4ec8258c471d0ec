"""`vlm doctor`: facts beside what libraries and the system say, and the lines that install what is missing."""

import json
import os
from importlib import metadata

import pytest
import torch

from vlm import machine
from vlm.cli import doctor
from vlm.cli.main import run as vlm


def read_facts(capsys, *options: str) -> list[tuple[str, str]]:
    assert vlm(["doctor", "--format", "jsonl", *options]) == 0
    return [(row["name"], row["fact"]) for row in map(json.loads, capsys.readouterr().out.splitlines())]


def test_facts(capsys) -> None:
    rows = read_facts(capsys)
    assert vlm(["doctor"]) == 0  # as text
    assert [line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines()] == [name for name, _ in rows]
    facts = dict(rows)
    for name in ("torch", "lightning", "numpy"):
        assert f"{name} {metadata.version(name)}" in facts["libraries"]
    assert torch.backends.cpu.get_cpu_capability() in facts["processor"]
    assert f"of {os.cpu_count()}:" in facts["cores"] and facts["threads"].startswith(f"{torch.get_num_threads()} ")
    assert facts["training"].startswith(("bf16-mixed on", "32-true on")) and ": " in facts["training"]
    assert facts["decoding"].startswith(("bf16 on", "fp32 on"))
    assert str(os.getcwd()) in facts["here"] and "writable" in facts["here"]


def test_a_container(monkeypatch, capsys) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda *root: 0.5)
    monkeypatch.setattr(machine, "memory_limit", lambda *root: 2 << 30)
    facts = dict(read_facts(capsys))
    assert facts["cores"].startswith("1 used of ") and "a quota of 0.5" in facts["cores"]
    assert "the container's limit 2.0 GiB" in facts["memory"] and facts["workers"].startswith("1 ")


def test_what_is_missing_has_the_line_that_installs_it(monkeypatch, capsys) -> None:
    lines = ["torch>=2", 'pillow>=1 ; extra == "serve"', 'nothing-such>=1; extra == "serve"', "numpy; extra == 'some'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    serve = 'serve: missing nothing-such: pip install "vlm-lightning[serve]"'
    assert [fact for name, fact in read_facts(capsys) if name == "extra"] == [serve, "some: installed"]


@pytest.mark.parametrize(
    ("known", "training"),
    [
        ({"cpu_name": "Intel", "amx_bf16": True, "avx512_bf16": True}, "bf16-mixed on cpu: the processor has AMX"),
        ({"cpu_name": "Intel", "avx512_bf16": True}, "32-true on cpu: Intel's AVX512-BF16"),
        ({"cpu_name": "AMD", "avx512_bf16": True}, "bf16-mixed on cpu: the processor's AVX512-BF16"),
        ({"cpu_name": "AMD", "avx2": True}, "32-true on cpu: the processor has neither"),
        ({"architecture": "aarch64"}, "32-true on cpu: the processor has neither"),
    ],
)
def test_the_precision_and_why(known, training, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dict(read_facts(capsys))["training"].startswith(training)


def test_wrong_use(capsys) -> None:
    assert vlm(["doctor", "--format", "xml"]) == 2
    assert capsys.readouterr().err == "error: --format: 'xml' is unknown; choose text or jsonl\n"
