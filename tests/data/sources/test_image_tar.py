"""A tar of class folders: the same as the folders, read in place, and nothing hostile in it followed."""

import io
import multiprocessing
import os
import tarfile
from pathlib import Path

import pytest
from captioned import refusal
from classed import content, lay_out, pack, png
from vlm.data.sources.image_folder import ImageFolder
from vlm.data.sources.image_tar import ImageTar

from vlm.data.images.image import ImageError, load_image

LAYOUTS = [
    [f"{name}/{n}.png" for name in ("cat", "dog") for n in range(6)],
    [f"{split}/{name}/{n}.png" for split in ("train", "val") for name in ("cat", "dog") for n in range(2)],
    [f"set/{split}/{name}/{n}.png" for split in ("train", "test") for name in ("cat", "dog") for n in range(2)],
]


def tar(path, **options):
    return ImageTar(path=str(path), **options)


def write(path, *members):
    """A tar of (name, content or type, link target)."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            else:
                member.type, member.linkname = data
                archive.addfile(member)
    return path


@pytest.mark.parametrize("names", LAYOUTS)
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_equals_the_folder(tmp_path, names, form):
    lay_out(tmp_path / "data", *names)
    with tarfile.open(tmp_path / "data.tar", "w", format=form) as archive:
        archive.add(tmp_path / "data", arcname=".")
    source, truth = tar(tmp_path / "data.tar", seed=4), ImageFolder(root=str(tmp_path / "data"), seed=4)
    assert source.classes == truth.classes
    assert content(source) == content(truth)
    for name in source.splits:
        ours, theirs = source.split(name), truth.split(name)
        assert all(ours.image(0, i) == theirs.image(0, i) for i in range(len(ours)))


def test_long_names_and_empty_folders(tmp_path):
    lay_out(tmp_path / "data", "cat/1.png", "dog/1.png", f"dog/{'long' * 40}.png")
    source = tar(pack(tmp_path / "data.tar", tmp_path / "data"), val_fraction=0)
    assert len(source.split("train")) == 3
    (tmp_path / "data" / "wolf").mkdir()
    message = refusal(tar, pack(tmp_path / "data.tar", tmp_path / "data"))
    assert "wolf: holds no image" in message


def _pixels(at):
    split, index = at
    return split.image(0, index).tobytes()


def test_processes_share_no_place_in_the_file(tmp_path):
    lay_out(tmp_path / "data", *(f"{name}/{n}.png" for name in "ab" for n in range(20)))
    split = tar(pack(tmp_path / "data.tar", tmp_path / "data"), val_fraction=0).split("train")
    keys = [(split, index) for index in range(len(split))] * 5
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_pixels, keys, chunksize=3) == [_pixels(key) for key in keys]


def test_hostile_members_are_passed_over(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    good = [(f"{name}/1.png", png()) for name in ("cat", "dog")]
    path = write(
        tmp_path / "data.tar",
        ("/etc/cat/1.png", png()),
        ("../cat/2.png", png()),
        ("cat/../../3.png", png()),
        ("cat/4.png", (tarfile.SYMTYPE, str(secret))),
        ("cat/5.png", (tarfile.LNKTYPE, "cat/1.png")),
        ("cat/6.png", (tarfile.CHRTYPE, "")),
        ("cat/7.png", (tarfile.FIFOTYPE, "")),
        ("cat\\8.png", png()),
        *good,
    )
    before = sorted(os.listdir(tmp_path))
    source = tar(path, val_fraction=0)
    assert content(source) == {"train": {"cat/1.png": "cat", "dog/1.png": "dog"}}
    source.split("train").image(0, 0)
    assert sorted(os.listdir(tmp_path)) == before


def test_of_members_of_one_name_the_last_counts(tmp_path):
    path = write(tmp_path / "data.tar", ("a/1.png", png(1)), ("b/1.png", png(2)), ("a/1.png", png(3)))
    split = tar(path, val_fraction=0).split("train")
    assert len(split) == 2
    assert split.image(0, 0) == load_image(png(3))


def test_unreadable_images_are_named(tmp_path):
    path = write(tmp_path / "data.tar", ("a/1.png", b"no image"), ("b/1.png", png()))
    split = tar(path, val_fraction=0).split("train")
    with pytest.raises(ImageError, match=rf"^{path}/a/1\.png: damaged"):
        split.image(0, 0)
    with open(path, "r+b") as file:
        file.truncate(1560)
    with pytest.raises(ImageError, match=r"b/1\.png: the tar ends within it"):
        split.image(0, 1)
    path.unlink()
    with pytest.raises(ImageError, match=r"a/1\.png: No such file"):
        split.image(0, 0)


def test_refusals_name_the_file_and_the_remedy(tmp_path):
    assert "set data.path" in refusal(tar, tmp_path / "absent.tar")
    (tmp_path / "text.tar").write_text("no tar" * 1000)
    assert "cannot be read as a tar" in refusal(tar, tmp_path / "text.tar")
    lay_out(tmp_path / "data", *LAYOUTS[0])
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "data", arcname=".")
    assert "not compressed" in refusal(tar, tmp_path / "data.tar.gz")
    assert "set data.path" in refusal(tar, write(tmp_path / "none.tar", ("a/1.txt", b"x")))


def test_a_tar_that_is_not_whole_is_refused_wherever_it_breaks(tmp_path):
    lay_out(tmp_path / "data", *LAYOUTS[0])
    whole = pack(tmp_path / "data.tar", tmp_path / "data").read_bytes()
    assert len(tar(tmp_path / "data.tar", val_fraction=0).split("train")) == 12
    with tarfile.open(tmp_path / "data.tar") as archive:
        members = [member for member in archive if member.isreg()][8:]
    for member in members:
        for end in (member.offset, member.offset + 100, member.offset_data, member.offset_data + 5):
            (tmp_path / "cut.tar").write_bytes(whole[:end])
            assert "cut.tar: cannot be read as a tar" in refusal(tar, tmp_path / "cut.tar")
    spoilt = bytearray(whole)
    spoilt[members[0].offset : members[0].offset + 512] = b"x" * 512
    (tmp_path / "spoilt.tar").write_bytes(spoilt)
    assert "damaged at byte" in refusal(tar, tmp_path / "spoilt.tar")


def test_the_path_may_be_within_the_root(tmp_path):
    lay_out(tmp_path / "data", *LAYOUTS[1])
    pack(tmp_path / "data.tar", tmp_path / "data")
    assert tar("data.tar", root=str(tmp_path)).splits == ("train", "val")


@pytest.mark.slow
def test_cifar10_as_a_tar():
    shared = Path(os.environ.get("VLM_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
    if not (shared / "cifar10.tar").is_file():
        pytest.skip(f"CIFAR-10 is not there: {shared / 'cifar10.tar'} (set VLM_SHARED_DATA)")
    source = tar(shared / "cifar10.tar")
    assert {name: len(source.split(name)) for name in source.splits} == {"train": 50_000, "test": 10_000}
    assert source.classes == ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    split = source.split("test")
    assert all(split.image(0, index).size == (32, 32) for index in range(0, len(split), 97))
