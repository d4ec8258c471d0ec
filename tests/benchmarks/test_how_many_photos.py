"""The benchmark of how many photos a captioner needs, on drawn scenes in Flickr8k's layout."""

import json
import shutil
import sys
from fcntl import LOCK_EX, flock

import pytest
from flickr import draw_flickr8k
from scripts import TINY, load

from vlm.data.sources.captions import Flickr8k

SMALL = [*TINY, "data.batch_size=2", "task.beam=1", "tokenizer.vocab_size=300"]


@pytest.mark.nightly  # test_time_to_quality.py trains on the same photos by a script in a slow run
def test_each_point_learns_from_its_part_and_is_scored_on_all_of_test(tmp_path, monkeypatch, capsys):
    module = load("how_many_photos", monkeypatch)
    draw_flickr8k(tmp_path)
    out = tmp_path / "out"
    options = ["--root", str(tmp_path), "--out", str(out), "--steps", "5", "--photos", "3"]
    options += ["--captions", "1", "--overrides", *SMALL]
    monkeypatch.setattr(sys, "argv", ["how_many_photos.py", *options])
    module.main()
    printed = capsys.readouterr().out
    known = module.points(out)
    assert list(known) == [(3, 1)]
    assert module.series([out]) == {"captioning_flickr8k, 1 caption": {3: known[3, 1]}}
    source = Flickr8k(root=str(tmp_path))
    for (photos, captions), scores in known.items():
        rows = [json.loads(line) for line in (out / f"{photos}x{captions}.jsonl").read_text().splitlines()]
        trained = [row for row in rows if row["split"] == "train"]
        records = list(source.split("train").records(photos))
        assert [row["image"] for row in trained] == [record.id for record in records]
        assert [row["caption"] for row in trained] == [record["references"][:captions] for record in records]
        tested = [row["caption"] for row in rows if row["split"] == "test"]
        assert tested == [record["references"] for record in source.split("test").records()]
        (run,) = out.glob(f"{photos}x{captions}/*")
        assert len((run / "evaluation/test/predictions.json").read_text()) > 2
        assert f"{scores['test/cider']:.3f} ({scores['test/cider@low']:.3f}" in printed
    before = sorted(out.glob("*/*"))
    shutil.rmtree(next(out.glob("3x1/*/evaluation")))  # as though it had been cut off before its test
    with (out / "3x1.log").open("a") as log:  # as though another call were at it
        flock(log, LOCK_EX)
        module.main()
    assert "3x1: another call is at it" in capsys.readouterr().out and not list(out.glob("3x1/*/evaluation"))
    module.main()
    assert sorted(out.glob("*/*")) == before and capsys.readouterr().out == printed
    assert (out / "how_many_photos.png").stat().st_size > 5000
    monkeypatch.setattr(sys, "argv", ["how_many_photos.py", *options, "trainer.gradient_clip_val=2"])
    with pytest.raises(SystemExit, match=r"holds points of .*give another --out"):
        module.main()
