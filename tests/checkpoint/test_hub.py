"""Models of the hub, from a server on this machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import hub_server
import hugging
import huggingface_hub
import pytest
import torch

import vlm
from vlm.checkpoint.load import find_base, load_model, read
from vlm.checkpoint.locate import download
from vlm.checkpoint.start import start_from
from vlm.cli.main import run as command
from vlm.errors import printable
from vlm.training.config.pretrained import PretrainedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioner as the hub has it, with a pickle and code that nobody is to fetch."""
    folder = tmp_path_factory.mktemp("model")
    hugging.saved_captioner(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A hub on this machine, and an empty cache."""
    with hub_server.serve_models({"org/tiny": folder}) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home"))
        yield address, asked


def caption(place: str, photo: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = command(["caption", photo, "-c", place, "--device", "cpu", "--precision", "fp32"])
    return status, *capsys.readouterr()


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_once_and_is_the_folder(
    folder: Path, hub: tuple[str, list[str]], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo, (_, asked) = hugging.photos(tmp_path / "photos", 1)[0], hub
    expected = printable(vlm.load(folder, device="cpu", precision="fp32").caption(photo).text)
    assert caption("hf:org/tiny@main", photo, capsys)[:2] == (0, f"{photo}\t{expected}\n")
    names = {line.rpartition("/")[2] for line in asked if line.startswith("GET") and "/resolve/" in line}
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= names
    assert not names & {"pytorch_model.bin", "modeling.py"}
    status, _, said = caption("hf:org/other", photo, capsys)
    assert status == 2 and "error: hf:org/other: cannot be downloaded (" in said
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    assert caption("hf:org/tiny", photo, capsys)[:2] == (0, f"{photo}\t{expected}\n")  # the cache is
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    status, _, said = caption("hf:org/tiny", photo, capsys)
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert status == 2
    assert "put config.json, model.safetensors, tokenizer.json, preprocessor_config.json of" in line
    assert line.endswith("huggingface.co/org/tiny into a folder, and give that folder")


@pytest.mark.slow
def test_training_starts_from_a_model_of_the_hub(hub: tuple[str, list[str]], folder: Path) -> None:
    found, local = (PretrainedModel.overrides({"path": str(place)}, {}) for place in ("hf:org/tiny", folder))
    cached = str(download("hf:org/tiny"))
    assert "model.init_from=hf:org/tiny" in found  # which other machines know too
    same = [text.replace(cached, "X").replace("hf:org/tiny", "X") for text in found]
    assert same == [text.replace(str(folder), "X") for text in local]
    model = load_model(read(folder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in before.items()})
    start_from(model, {"": "hf:org/tiny"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_the_base_of_adapters_is_not_downloaded(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    with pytest.raises(vlm.Error, match="hf:org/tiny: cannot be downloaded"):
        find_base("hf:org/tiny", tmp_path / "best.ckpt")
    assert not hub[1]
    cached = download("hf:org/tiny")
    assert find_base("hf:org/tiny", tmp_path / "best.ckpt") == cached


def test_without_the_library_a_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(vlm.Error, match=r'hf:a/b: huggingface_hub is not installed; pip install "vlm-lightning\[hf\]"'):
        download("hf:a/b")


@pytest.mark.parametrize("place", ["hf:", "hf:name", "hf:a/b/c", "hf:../../etc/passwd", "hf:a/b@", "hf:a b/c"])
def test_what_is_no_name_of_a_model_is_refused(place: str) -> None:
    with pytest.raises(vlm.Error, match="is not a model of the hub; write hf:ORG/NAME"):
        download(place)
    assert download("runs/x/best.ckpt") == Path("runs/x/best.ckpt")  # other places stay as they are


@pytest.mark.slow
def test_import_makes_one_file_of_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, photos = tmp_path / "model.ckpt", hugging.photos(tmp_path / "photos", 3)
    assert command(["import", str(folder), "--out", str(out)]) == 0
    assert "a VisionEncoderDecoderModel of Hugging Face" in capsys.readouterr().out
    exact = {"device": "cpu", "precision": "fp32"}
    expected = vlm.load(folder, **exact).caption(photos, beam=2)
    assert vlm.load(out, **exact).caption(photos, beam=2) == expected
    assert command(["import", str(tmp_path), "--out", str(out)]) == 2
    assert "is not a Hugging Face folder, because it has no config.json" in capsys.readouterr().err
    assert command(["import", str(folder), "--out", str(tmp_path)]) == 2
    assert "cannot be written (Is a directory)" in capsys.readouterr().err
