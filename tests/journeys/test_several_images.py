"""Two scenes a record: trained, evaluated and asked about."""

import csv

import pytest
from journey import best, only_run
from small import command

from vlm import load
from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow
TWO = ["data=shapes_differences", "model/encoder=vit_several", "model/fusion=cross", "task.max_tokens=20"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = [*TWO, "data.source.train_scenes=240", "data.image_size=32", "trainer.max_epochs=2", "optim.lr=5e-3"]
    options += ["callbacks.checkpoints.every_n_steps=500", "model.encoder.encoder.patch_size=8", "callbacks.ema=null"]
    assert main([*command("image_questions", *options), f"runs={folder}"]) == 0
    return only_run(folder)


def test_it_learns(trained):
    with (trained / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_the_files_that_follow_each_other_belong_together(trained, tmp_path, capsys):
    images = [str(path) for path in sorted((trained / "samples").glob("example*.png"))]
    assert len(images) == 2
    asked = ["-c", best(trained), "--device", "cpu", "--question", "what differs?"]
    capsys.readouterr()
    assert vlm(["answer", *images, *asked]) == 0
    assert capsys.readouterr().out.startswith(f"{images[0]} {images[1]}\twhat differs?\t")
    assert vlm(["answer", images[0], *asked]) == 2
    assert "1 images; this model reads 2 at once" in capsys.readouterr().err
    pairs = [*images, images[0], images[0]]  # a file may be in several records
    assert vlm(["answer", *pairs, *asked]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in told] == [" ".join(images), f"{images[0]} {images[0]}"]
    model = load(trained, device="cpu")
    answers = model.answer(pairs, question="what differs?")
    assert [answer.text for answer in answers] == [line.split("\t")[2] for line in told]
    with pytest.raises(UserError, match="1 images; this model reads 2 at once"):
        model.answer(images[0], question="what differs?")
    (tmp_path / "bad.png").write_text("no image")
    assert vlm(["answer", str(tmp_path / "bad.png"), *images, images[0].replace("example", "none"), *asked]) == 1
    assert not capsys.readouterr().out
    assert vlm(["check-data", *command("image_questions", *TWO)]) == 0
