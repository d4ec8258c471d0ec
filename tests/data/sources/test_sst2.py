"""SST-2: sentences and phrases, of which none that is held out trains."""

import os
from pathlib import Path

import pytest
from captioned import refusal

from vlm.data.sources.text_tables import SST2

SHARED = Path(os.environ.get("VLM_SHARED_DATA", Path(__file__).parents[3] / ".." / "shared" / "data")) / "sst2"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "stsa.binary.train").write_text("1 a stirring\u00a0film\n0 dull , dull , dull\n", encoding="utf-8")
    (tmp_path / "stsa.binary.dev").write_text("0 a bore\n1 fine\n")
    (tmp_path / "stsa.binary.test").write_text('1 " great "\n0 flat\n')
    (tmp_path / "train_phrases.tsv").write_text('sentence\tlabel\nstirring \t1\nfine . \t1\n" great "\t1\ndull , \t0\n')
    return tmp_path


def known(source, split):
    return [(record.id, record["text"], record["class"], record["label"]) for record in source.split(split).records()]


def test_sentences(folder):
    source = SST2(root=str(folder))
    assert source.splits == ("train", "val", "test") and not source.skipped
    assert known(source, "train") == [
        ("train:line 1", "a stirring\u00a0film", "positive", 1),
        ("train:line 2", "dull , dull , dull", "negative", 0),
    ]
    assert [row[1:] for row in known(source, "test")] == [('" great "', "positive", 1), ("flat", "negative", 0)]


def test_phrases_train_too_but_for_held_out_sentences(folder):
    source = SST2(root=str(folder), phrases=True)
    assert [row[:3] for row in known(source, "train")[2:]] == [
        ("train:phrase line 2", "stirring", "positive"),
        ("train:phrase line 5", "dull ,", "negative"),
    ]
    assert [line.split(":")[1] for line in source.skipped] == ["phrase line 3", "phrase line 4"]
    assert "'fine .' has the words of a sentence of val" in source.skipped[0] and "of test" in source.skipped[1]


def test_faults_are_named(folder):
    (folder / "stsa.binary.dev").write_text("0 a bore\n2 fine\n")
    assert "line 2: the label '2' is neither" in refusal(SST2, root=str(folder))
    (folder / "stsa.binary.dev").unlink()
    assert "stsa.binary.dev: no such file; set data.root" in refusal(SST2, root=str(folder))
    assert "no such folder" in refusal(SST2, root=str(folder / "none"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data set is not here")
def test_the_real_files():
    source = SST2(root=str(SHARED), phrases=True)
    train, val, test = (list(source.split(name).records()) for name in source.splits)
    assert (len(val), len(test)) == (872, 1821)
    assert not {record["text"] for record in (*val, *test)} & {record["text"] for record in train}
    left_out = [line for line in source.skipped if "phrase line" in line]
    assert sum(record.id.startswith("train:phrase") for record in train) + len(left_out) == 67_349
    assert sum("of test" in line for line in left_out) >= 6
    plain = SST2(root=str(SHARED))
    assert len(plain.split("train")) + len(plain.skipped) == 6_920
