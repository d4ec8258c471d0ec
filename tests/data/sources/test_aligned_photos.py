"""Pairs of texts with the photo of each line."""

import pytest
from captioned import picture, refusal

from vlm.data.sources.aligned_photos import AlignedPhotos

NAMES = "10.jpg\n20.jpg\n30.jpg\n40.jpg\n"


@pytest.fixture
def write(tmp_path):
    def write(names=NAMES, photos=("10_ab.png", "20.jpg", "30_a.png", "30_b.png")):
        for ending in ("en", "de"):
            (tmp_path / f"train.{ending}").write_text("".join(f"{ending} {n}\n" for n in range(1, 5)))
        (tmp_path / "train.images.txt").write_text(names)
        (tmp_path / "photos").mkdir(exist_ok=True)
        for name in photos:
            picture(tmp_path / "photos" / name)
        return tmp_path

    return write


def opened(root, **options):
    known = {"root": str(root), "source": "en", "target": "de", "photos": str(root / "photos"), "val": None}
    return AlignedPhotos(**known | {"test": None} | options)


def test_a_line_has_the_photo_of_its_name_or_of_the_one_that_begins_so(write):
    """The third may be either of two photos, and there is none of the fourth: both are left out."""
    records = list(opened(write()).split("train").records())
    assert [record.id for record in records] == ["train-1", "train-2"]
    assert (records[1]["text"], records[1]["translation"]) == ("en 2", "de 2")
    assert records[0].image().mode == "RGB" and "10_ab.png" in records[0].read_stamp()
    assert records[1].read_file() == (write() / "photos" / "20.jpg").read_bytes()


def test_faults_are_named_with_their_remedy(write):
    root = write(names="10.jpg\n20.jpg\n")
    assert "train.images.txt: names 2 photos for 4 lines" in refusal(opened, root)
    assert "train.other: no such file; it names the photo of each line" in refusal(opened, root, names="other")
    assert "has no photo of train; give the folder" in refusal(opened, write(names="50.jpg\n" * 4))
    assert "nowhere: no such folder" in refusal(opened, root, photos=str(root / "nowhere"))
