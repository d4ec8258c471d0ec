"""An evaluation leaves a run as it was, and writes texts as the config says."""

import json
import re
import shutil
from pathlib import Path

import pytest
from journey import only_run
from PIL import Image
from small import command
from tiny_checkpoints import FILES

from vlm import load
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main as train


@pytest.mark.parametrize("cached", [False, True])
def test_an_evaluation_writes_into_a_cache_that_is_there_and_makes_none(cached, tmp_path: Path, capsys) -> None:
    """Of text, tokens are cached."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(FILES / "language_modeling.ckpt", run / "checkpoints" / "best.ckpt")
    if cached:
        (run / "cache").mkdir()
    before = set(tmp_path.rglob("*"))
    assert vlm(["evaluate", "-c", str(run), "--device", "cpu"]) == 0
    made = {path.parent.name for path in set(tmp_path.rglob("*")) - before}
    assert made == ({"cache"} if cached else set())
    assert re.search(r"^samples     \d+ used$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_a_test_searches_with_the_beams_of_the_config_and_so_do_the_commands(tmp_path: Path) -> None:
    searched = command("translation", "task.beam=4", "task.length_penalty=0.5", "trainer.max_epochs=2")
    assert train([*searched, f"runs={tmp_path / 'runs'}"]) == 0
    (checkpoint,) = only_run(tmp_path / "runs").glob("checkpoints/best.ckpt")
    out = tmp_path / "out"
    assert vlm(["evaluate", "-c", str(checkpoint), "--device", "cpu", "--out", str(out)]) == 0
    texts = json.loads((out / "details.json").read_text())["texts"]
    read, written = zip(*((one["text"], one["translation"]) for one in texts.values()), strict=True)
    model = load(checkpoint, device="cpu", precision="fp32")
    greedy, searched, usual = (
        tuple(one.text for one in model.translate(list(read), **options))
        for options in ({"beam": 1}, {"beam": 4, "length_penalty": 0.5}, {})
    )
    assert written == searched == usual != greedy


@pytest.mark.slow
def test_captions_of_a_test_are_searched_for_too(tmp_path: Path) -> None:
    written = []
    for beam in (1, 4):
        options = [f"+task.beam={beam}", "--device", "cpu", "--out", str(tmp_path / str(beam))]
        assert vlm(["evaluate", "-c", str(FILES / "captioning.ckpt"), *options]) == 0
        written.append((tmp_path / str(beam) / "predictions.json").read_text())
    assert written[0] != written[1]


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """The overrides for 200 photos with a caption each, all of the test split but a few."""
    rows = ["image,caption,split"]
    for number in range(204):
        name, split = f"{number}.png", "test" if number < 200 else "train" if number < 202 else "val"
        Image.new("RGB", (16, 16), (number, 0, 99)).save(tmp_path / name)
        rows.append(f"{name},a {('red', 'blue')[number % 2]} circle,{split}")
    (tmp_path / "captions.csv").write_text("\n".join(rows))

    return ["data=captions", f"data.root={tmp_path}", "data.path=captions.csv", "data.max_len=32", "data.num_workers=0"]


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(("count", "status", "words"), [(2, 0, "(1.0%; up to 1% may be)"), (3, 1, "more than the 1%")])
def test_unreadable_images_are_skipped_up_to_the_limit_of_training(
    count: int, status: int, words: str, photos: list[str], tmp_path: Path, capsys
) -> None:
    for number in range(count):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    checkpoint = str(FILES / "captioning.ckpt")
    assert vlm(["evaluate", "-c", checkpoint, "--device", "cpu", *photos]) == status
    said = capsys.readouterr()
    assert f"samples     {200 - count} used, {count} unreadable and skipped ({count / 2:.1f}%; " in said.out
    assert words in said.out
    assert said.err.count("error: " if status else "skipped: ") == count and str(tmp_path / "0.png") in said.err


@pytest.mark.slow
def test_another_evaluation_is_not_replaced(tmp_path: Path, capsys) -> None:
    out, checkpoint = tmp_path / "out", str(FILES / "captioning.ckpt")
    command = ["evaluate", "-c", checkpoint, "--device", "cpu", "--out", str(out)]
    assert vlm(command) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert vlm([*command, "--split", "val"]) == 2
    said = capsys.readouterr().err
    assert f"--out {out}: holds an evaluation of {checkpoint} on test (20" in said and "give another folder" in said
    assert {path: path.read_bytes() for path in out.iterdir()} == before
