"""Files whose lines belong together: two of texts, and one of photos."""

import pytest
from caption_data import picture, refusal

from vlm.data.records import collect_errors
from vlm.data.sources.aligned_files import AlignedFiles, AlignedPhotos


@pytest.fixture
def write(tmp_path):
    def write(**files):
        """Files by name, `train_en` for train.en."""
        for name, content in files.items():
            path = tmp_path / name.replace("_", ".")
            path.write_bytes(content.encode())
        return tmp_path

    return write


def open_files(root, **options):
    return AlignedFiles(**{"root": str(root), "source": "en", "target": "de", "val": None, "test": None} | options)


def pairs(source, split="train"):
    return {record.id: (record["text"], record["translation"]) for record in source.split(split).records()}


def test_line_k_belongs_to_line_k(write):
    root = write(train_en="one\ntwo\n", train_de="eins\nzwei\n", test_en="three", test_de="drei")
    source = open_files(root, test="test")
    assert source.splits == ("train", "test")
    assert pairs(source) == {"train-1": ("one", "eins"), "train-2": ("two", "zwei")}
    assert pairs(source, "test") == {"test-1": ("three", "drei")}
    assert pairs(open_files(root, source="de", target="en"))["train-2"] == ("zwei", "two")


def test_only_a_line_feed_ends_a_line(write):
    odd = "no\u00a0break\u2028still one\x0b\x0cline\x85 end"
    source = open_files(write(train_en=f"\ufeff{odd}\r\nb\n", train_de="eins\r\nzwei\r\n"))
    assert pairs(source) == {"train-1": (odd, "eins"), "train-2": ("b", "zwei")}


def test_an_empty_side_is_named_and_left_out(write):
    root = write(train_en="one\n\nthree\nfour\n", train_de="eins\nzwei\n \t\nvier\n")
    source = open_files(root)
    assert list(pairs(source)) == ["train-1", "train-4"]
    assert source.skipped == [
        f"{root / 'train.en'}, line 2: is empty; the pair is skipped",
        f"{root / 'train.de'}, line 3: is empty; the pair is skipped",
    ]


@pytest.mark.parametrize("english, german, longer, line", [("a\nb\nc\n", "a\n", "en", 2), ("a\n", "a\nb", "de", 2)])
def test_unequal_lengths_are_named(write, english, german, longer, line):
    root = write(train_en=english, train_de=german)
    message = refusal(open_files, root)
    assert message.startswith(f"{root / f'train.{longer}'}, line {line}: ") and "lines" in message
    with collect_errors():
        source = open_files(root)
    assert len(pairs(source)) == 1 and source.skipped == [message]


@pytest.mark.parametrize(
    "files, options, named",
    [
        ({}, {}, "train.en: no such file"),
        ({"train_en": "a"}, {}, "train.de: no such file"),
        ({"train_en": "a", "train_de": "b"}, {"val": "dev"}, "data.source.val=null"),
        ({"train_en": "a", "train_de": "b"}, {"target": "en"}, "both are 'en'"),
        ({"train_en": "\n", "train_de": "b\n"}, {}, "has no text"),
    ],
)
def test_faults_are_named(write, files, options, named):
    root = write(**files)
    assert named in refusal(open_files, root, **options)
    assert "no such folder" in refusal(open_files, root / "none")


NAMES = "10.jpg\n20.jpg\n30.jpg\n40.jpg\n"


@pytest.fixture
def photographed(tmp_path):
    def photographed(names=NAMES, photos=("10_ab.png", "20.jpg", "30_a.png", "30_b.png")):
        for ending in ("en", "de"):
            (tmp_path / f"train.{ending}").write_text("".join(f"{ending} {n}\n" for n in range(1, 5)))
        (tmp_path / "train.images.txt").write_text(names)
        for name in photos:
            picture(tmp_path / "photos" / name)
        return tmp_path

    return photographed


def with_photos(root, **options):
    known = {"root": str(root), "source": "en", "target": "de", "photos": str(root / "photos"), "val": None}
    return AlignedPhotos(**known | {"test": None} | options)


def test_a_line_has_the_photo_of_its_name_or_of_the_one_that_begins_so(photographed):
    """The third may be either of two photos, and there is none of the fourth: both are left out."""
    root = photographed()
    records = list(with_photos(root).split("train").records())
    assert [record.id for record in records] == ["train-1", "train-2"]
    assert (records[1]["text"], records[1]["translation"]) == ("en 2", "de 2")
    assert records[0].image().mode == "RGB" and "10_ab.png" in records[0].read_stamp()
    assert records[1].read_file() == (root / "photos" / "20.jpg").read_bytes()


def test_faults_of_photos_are_named_with_their_remedy(photographed):
    root = photographed(names="10.jpg\n20.jpg\n")
    assert "train.images.txt: names 2 photos for 4 lines" in refusal(with_photos, root)
    assert "train.other: no such file; it names the photo of each line" in refusal(with_photos, root, names="other")
    assert "nowhere: no such folder" in refusal(with_photos, root, photos=str(root / "nowhere"))
    assert "has no photo of train; give the folder" in refusal(with_photos, photographed(names="50.jpg\n" * 4))
