"""The scripts for a GPU, as far as a machine without one goes: their plan, their table, and how they end."""

import forks
import pytest
import scripts
import torch
from scripts import load

FOLDER = scripts.FOLDER / "gpu"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "device.py")
FIGURES = {
    "attention": {use: {"chosen": "flash", "times": {}} for use in ("GPT-2 row", "GPT-2 row with documents", "ViT-S")},
    "gpt2": {"tokens_per_s": 512345.6, "mfu": 0.389},
    "vits --memory": {"images_per_s": 9501.0, "mfu": 0.3},
    "captioner --memory": "took longer than 110 s",
    "decoding": {f"S {case}": {"ratio": 2.5} for case in ("1x1", "64x1", "256x1", "1x4", "64x4", "256x4")},
}


@pytest.fixture
def module(monkeypatch):
    return load("gpu/all", monkeypatch)


def test_each_figure_stands_beside_its_bar(module):
    lines = dict(module.table(module.plan("text.txt", "photos"), FIGURES))
    by_name = {line[:46].strip(): (line[46:].split(), well) for line, well in lines.items()}
    assert by_name["GPT-2 124M, tokens/s"] == (["512,346"], True)
    assert by_name["GPT-2 124M, MFU %"] == (["39", "bar", "40", "BELOW"], False)
    assert by_name["ViT-S/16 from memory, images/s"] == (["9,501", "bar", "9,500"], True)
    assert by_name["captioner --memory"] == (["took", "longer", "than", "110", "s"], False)
    assert by_name["kernel: ViT-S"] == (["flash"], True) and not by_name["kernel: packed captions"][1]
    assert by_name["decoding, 64 images, greedy, times HF"] == (["2.50", "bar", "5", "BELOW"], False)
    assert by_name["decoding, 64 images, beam 4, times HF"] == (["2.50", "bar", "2"], True)
    assert by_name["decoding, 256 images, beam 4, times HF"] == (["2.50"], True)
    assert by_name["jpeg"][0][0] == "not"


def test_the_parts_take_less_than_the_time_and_know_their_scripts(module):
    parts = module.plan("text.txt", "photos")
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert (FOLDER / part.command[0]).is_file() and part.figures
    assert sum(part.seconds for part in parts[:-1]) < 570  # the last one takes what the others leave


@pytest.mark.parametrize("code, said", [("print('x'); raise SystemExit('no memory')", "status 1: no memory"), ("", "")])
def test_a_part_that_fails_is_a_line(module, tmp_path, monkeypatch, code, said):
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "part.py").write_text(code or "import sys; open(sys.argv[-1], 'w').write('{\"a\": 1}')")
    found = module.run(module.Part("part", ["part.py"], 10, []), 10)
    assert said in found if said else found == {"a": 1}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("names", [SCRIPTS[::4], pytest.param(SCRIPTS, marks=pytest.mark.nightly)])
def test_without_a_gpu_each_script_ends_in_a_line(names, tmp_path):
    options = {name: ["--text", "none"] for name in ("all.py", "same_losses.py", "waits.py")}
    options["training_speed.py"] = ["vits"]
    with (tmp_path / "out").open("w") as out:
        found = forks.run([[str(FOLDER / name), *options.get(name, [])] for name in names], stdout=out)
    for name, (status, said) in zip(names, found, strict=True):
        assert status == 2 and "needs a CUDA device" in said and len(said.splitlines()) == 1, (name, said)
    assert not (tmp_path / "out").read_text()
