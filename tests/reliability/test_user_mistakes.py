"""What a user may do wrong at a command: a line that names it and the remedy, the status, and no traceback.

Each was tried by hand first, with odd photos and tables; here stands one of each kind that went wrong then.
"""

import csv
import os
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from tiny_checkpoints import FILES, IMAGES

from vlm.cli.main import run
from vlm.training.run.fit import main

CAPTIONER, CONTRASTIVE, ANSWERER = (str(FILES / f"{n}.ckpt") for n in ("captioning", "contrastive", "span_answering"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of twenty odd photos."""
    rows = [["image", "caption"]]
    for n in range(20):
        name = f"#{n} = 100%, 狗@home.png"
        Image.effect_noise((40, 30), n + 1).convert("RGB").save(tmp_path / name)
        rows.append([name, f'a "quoted", long caption of photo {n} with many more words'])
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path / "t.csv"


def train_table(table: Path, *more: str) -> int:
    small = ["trainer=cpu", "model.size.dim=32", "model.size.num_heads=2", "data.num_workers=0", "data.image_size=32"]
    small += ["data.batch_size=4", "trainer.max_steps=2", "trainer.max_epochs=-1", "test=false"]
    return main(["data=captions", f"data.root={table.parent}", f"data.path={table}", *small, *more])


@pytest.mark.sample(slow=5)
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("trainer.val_check_interval=100000", "trainer.val_check_interval: 100000 exceeds the 5 batches of an epoch"),
        ("trainer.accelerator=gpu", "trainer.accelerator: torch finds no usable GPU (see vlm doctor); set"),
        ("trainer.devices=two", "trainer: "),
        ("task.freeze=[encodr]", "task.freeze: the model has no module encodr; it has encoder, decoder; did you me"),
        ("lr_factors={encodr: 0.1}", "lr_factors: the model has no module encodr; it has encoder, decoder; did you me"),
        ("lr_factors={encoder: 0}", "lr_factors: {'encoder': 0} is out of range, expected dict[str, float (above 0)]"),
        ("task.freeze=[encoder,decoder]", "task.freeze freezes all parameters"),
        ("data.preprocess.mean=[1,2]", "data.preprocess.mean=[1, 2]: is invalid; give three numbers"),
        ("trust=no_such_package", "trust=no_such_package: no such package; install it, or set PYTHONPATH to"),
        ("--trust=mymetrics", "--trust: training takes options as KEY=VALUE; use trust=mymetrics instead"),
    ],
)
def test_a_config_that_cannot_work_is_a_line(table, given, line, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert train_table(table, given) == 2
    lines = capsys.readouterr().err.splitlines()
    said = "\n".join(text for text in lines if not text.startswith("note: data: of 20 samples, "))
    assert said.startswith(f"error: {line}") and "Traceback" not in said


@pytest.mark.slow
def test_addresses_of_the_web_are_not_fetched(table, tmp_path, capsys) -> None:
    web = tmp_path / "web.csv"
    web.write_text(table.read_text().replace("#", "https://example.com/#"))
    assert train_table(web) == 2
    assert "web.csv: contains URLs instead of file names" in capsys.readouterr().err


@pytest.mark.slow
def test_captions_that_are_truncated_are_counted(table, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_table(table, "data.max_len=4") == 0
    said = capsys.readouterr().out
    assert "truncated   19 different captions exceed data.max_len=4 tokens; raise it" in said
    assert train_table(table) == 0
    assert "truncated" not in capsys.readouterr().out


@pytest.mark.slow
def test_names_with_any_sign_train_caption_and_go_on(table, tmp_path, capsys, monkeypatch) -> None:
    runs = tmp_path / "runs = 50% #1, 狗@x"
    monkeypatch.chdir(tmp_path)
    assert train_table(table, f"runs={runs}") == 0
    (run_folder,) = runs.glob("*/20*")
    assert main([f"resume={run_folder}", "trainer.max_steps=3"]) == 0
    capsys.readouterr()
    assert run(["caption", "-c", str(run_folder), str(table.parent), "--format", "csv"]) == 0
    rows = list(csv.reader(StringIO(capsys.readouterr().out)))
    assert {row[0] for row in rows[1:]} >= {str(path) for path in table.parent.glob("#*.png")}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["evaluate", "-c", CAPTIONER, "trainer.max_epochs=9"], "trainer.max_epochs: has no effect"),
        (["evaluate", "-c", CAPTIONER, "data=image_folder", f"data.root={FILES}"], "data: records of ClassFolders"),
        (["caption", "-c", CAPTIONER, ""], "an input is empty; give image files"),
        (["caption", "-c", CAPTIONER, IMAGES[0], "--ban", ""], "--ban, --require: a word is empty"),
        (["caption", "-c", CAPTIONER, IMAGES[0], "--require", " "], "--ban, --require: a word is empty"),
        (["classify", "-c", CONTRASTIVE, IMAGES[0], "--labels", os.devnull], f"{os.devnull}: is empty; write"),
        (["answer", "-c", ANSWERER, os.devnull, "--question", "who?"], f"{os.devnull}: is empty; give one"),
        (["retrieve", "-c", CONTRASTIVE, IMAGES[0], "--text", " "], "--text: is empty; give a text that images"),
        (
            ["score", "hyp.txt"],
            "Missing argument 'REFERENCES.json'; give results and references: vlm score results",
        ),
        (["caption", IMAGES[0]], "Missing option '-c' / '--checkpoint' (see vlm caption --help)"),
        (["caption", "-c", CAPTIONER, IMAGES[0], "--beam", "0"], "Invalid value for '--beam'"),
    ],
)
def test_a_command_that_cannot_work_is_a_line(command, line, capsys) -> None:
    assert run(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {line}") and not captured.out


@pytest.mark.parametrize("host", ["300.1.1.1", "no.such.host.invalid"])
def test_an_address_that_is_none_names_its_option(host, capsys) -> None:
    pytest.importorskip("uvicorn")
    assert run(["serve", "-c", CAPTIONER, "--host", host, "--port", "0"]) == 2
    assert "address not available; choose another --host" in capsys.readouterr().err


@pytest.mark.slow
def test_small_images_are_as_they_should_be_for_a_small_model(tmp_path, capsys) -> None:
    for n in range(12):
        folder = tmp_path / ("cat" if n % 2 else "dog")
        folder.mkdir(exist_ok=True)
        Image.effect_noise((28, 28), n + 1).convert("RGB").save(folder / f"{n}.png")
    data = ["task=classification", "data=image_folder", f"data.root={tmp_path}"]
    assert run(["check-data", *data, "data.image_size=32"]) == 0
    assert "tiny image" not in capsys.readouterr().out
    assert run(["check-data", *data, "data.image_size=224"]) == 0  # training reads them too
    assert "note        tiny image" in capsys.readouterr().out
