"""One checkpoint, one answer: commands, Python, service, page and exported folder decode with its options."""

import base64
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import PATH, USER, saved_chat
from pages import answers, defaults_of, page_of
from services import CAPTIONER, client, tiny
from tiny_checkpoints import IMAGES, ROOT

import vlm
from vlm.checkpoint.export import export
from vlm.cli.main import run
from vlm.io.page import escape

PHOTO = IMAGES[2]  # greedy search has another caption of it
PAGE_PHOTO = "data:;base64," + base64.b64encode(Path(PHOTO).read_bytes()).decode()
OPTIONS = {"beam": 2, "length_penalty": 3.0}


def with_decoding(checkpoint: str, path: Path, options: dict[str, Any]) -> str:
    """A checkpoint whose training chose decoding options, as task.beam does."""
    loaded = torch.load(checkpoint, weights_only=True)
    loaded["vlm"]["decoding"] = options
    torch.save(loaded, path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_decoding(CAPTIONER, tmp_path_factory.mktemp("one") / "model.ckpt", OPTIONS)


@pytest.fixture(scope="module")
def truth(checkpoint: str) -> str:
    model = vlm.load(checkpoint, device="cpu", precision="fp32")
    text = model.caption(PHOTO, **OPTIONS).text
    assert text == model.caption(PHOTO).text != model.caption(PHOTO, beam=1).text
    return text


@pytest.mark.parametrize("command", ["caption", "predict"])
def test_commands(command: str, checkpoint: str, truth: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, PHOTO, "-c", checkpoint, "--precision", "fp32", "--format", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["caption"] == truth


def test_the_service(checkpoint: str, truth: str) -> None:
    pytest.importorskip("fastapi")
    answer = client(checkpoint).post("/predict", content=Path(PHOTO).read_bytes())
    assert answer.json()["results"][0]["text"] == truth


@pytest.mark.slow
def test_the_page(checkpoint: str, truth: str) -> None:
    pytest.importorskip("gradio")
    with page_of(checkpoint) as http:
        shown = answers(http, PAGE_PHOTO, *defaults_of(http)[1:])[-1]
    first = shown.split('<p class="v-text">')[1]
    assert " ".join(re.findall(r"<b>(\w+)</b>", first)) == truth


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sample": True, "temperature": 0.5, "top_k": 7}])
def test_the_page_of_a_language_model(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("gradio")
    path = with_decoding(tiny("language_modeling"), tmp_path / "model.ckpt", options)
    text = vlm.load(path, device="cpu", precision="fp32").generate("A large").text
    with page_of(path) as http:
        values = defaults_of(http)
        shown = answers(http, "A large", *values[1:])[-1]
    assert re.sub(r"\s+", " ", text) in re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", "", shown)))


@pytest.mark.slow
def test_conversations_of_the_page_have_the_temperature_of_the_command(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    torch.manual_seed(5)
    saved_chat(tmp_path, "chatml")
    stated = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**stated, "do_sample": True, "temperature": 0.6}))
    chat = vlm.load(str(tmp_path), device="cpu", precision="fp32").chat(max_tokens=256)
    text = chat.say("what is it?")
    with page_of(str(tmp_path)) as http:
        *_, temperature, _ = values = defaults_of(http, outputs=3)
        assert temperature == 0.6
        shown = answers(http, "what is it?", *values[1:], outputs=3)[-1]
    assert html.unescape(escape(text)) in html.unescape(shown)
    same = {"messages": [USER | {"content": "what is it?"}], "seed": 0}
    assert client(str(tmp_path)).post(PATH, json=same).json()["choices"][0]["message"]["content"] == text


@pytest.mark.slow
def test_the_exported_folder(checkpoint: str, truth: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    export(checkpoint, str(tmp_path / "out"), form="huggingface")
    assert run(["caption", PHOTO, "-c", str(tmp_path / "out"), "--precision", "fp32", "--format", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["caption"] == truth
    model = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "out").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pixels = processor(Image.open(PHOTO).convert("RGB"), return_tensors="pt").pixel_values
    (ids,) = model.generate(pixels)
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == truth


@pytest.mark.nightly  # checkpoint/test_graphs.py runs the example in a slow run
def test_the_example_without_torch_says_that_it_decodes_in_another_way(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for path, note in ((checkpoint, "vlm caption decodes with beam=2"), (CAPTIONER, "")):
        out = tmp_path / Path(path).stem
        export(path, str(out), form="onnx")
        command = [sys.executable, str(ROOT / "docs" / "onnx_caption.py"), str(out), PHOTO]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and note in done.stderr and bool(done.stderr) == bool(note), done.stderr
        greedy = vlm.load(path, device="cpu", precision="fp32").caption(PHOTO, beam=1)
        assert done.stdout == f"{PHOTO}\t{greedy.text}\n"
