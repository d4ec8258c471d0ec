"""Flickr8k in several languages: a small one made here, and the real one where it is."""

import pytest
from caption_data import content, refusal
from flickr import draw_flickr8k, translate_flickr8k
from shared_data import SHARED, needs_shared

from vlm.cli.main import run as vlm
from vlm.data.sources.captions import Flickr8k, Flickr8kLanguages

ALL = ("en", "de", "zh")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = draw_flickr8k(tmp_path_factory.mktemp("flickr8k"))
    return translate_flickr8k(folder, folder, without=("test3.jpg",))


def open_source(root, *languages):
    return Flickr8kLanguages(root=str(root), languages_root=str(root), languages=languages)


def lines(path, name, separator):
    """The captions of a photo as its file has them."""
    rows = (line.split(separator, 1) for line in path.read_text().splitlines())
    return [caption for key, caption in rows if key.startswith(f"{name}#")]


def test_a_photo_has_its_captions_of_all_languages(root):
    source = open_source(root, "zh", "en", "de")
    record = source.split("test").record(0)
    assert source.languages == ["zh", "en", "de"] and record.id == "test0.jpg"
    files = [("zh", "flickr8kzhc.caption.txt", " "), ("en", "Flickr8k.token.txt", "\t")]
    files += [("de", "Flickr8k.german.token.txt", "\t")]
    expected = [(text, own) for own, file, mark in files for text in lines(root / file, "test0.jpg", mark)]
    assert list(zip(record["captions"], record["languages"], strict=True)) == expected
    assert record["references"] == record["captions"] and record.image().size == (128, 128)
    assert content(open_source(root, "en")) == content(Flickr8k(root=str(root)))


@pytest.mark.slow
def test_a_photo_may_lack_a_language_which_is_no_fault_of_the_data(root, capsys):
    (record,) = (record for record in open_source(root, *ALL).split("test").records() if record.id == "test3.jpg")
    assert set(record["languages"]) == {"en", "zh"}
    german = open_source(root, "de")
    assert "test3.jpg" not in content(german)["test"]
    assert german.skipped == [f"{root / 'Flickr_8k.testImages.txt'}: no caption in de: test3.jpg"]
    assert not german.find_uncaptioned_images()
    options = [f"data.root={root}", f"data.languages_root={root}", "data.languages=[de]"]
    assert vlm(["check-data", "data=flickr8k_languages", *options]) == 0
    assert "no caption in de: test3.jpg" in capsys.readouterr().out


def test_faults_are_named(root, tmp_path):
    assert "choose from en, de, zh" in refusal(open_source, root, "en", "fr")
    assert "data.languages: is empty" in refusal(open_source, root)
    options = {"root": str(root), "languages_root": str(tmp_path)}
    message = refusal(Flickr8kLanguages, **options, languages=ALL)
    assert str(tmp_path / "Flickr8k.german.token.txt") in message and "data.languages_root" in message
    Flickr8kLanguages(**options, languages=["en"])
    (tmp_path / "flickr8kzhc.caption.txt").write_text("test0.jpg#zhc#0 好\ntest0.jpg#zhc#1\n")
    assert "line 2: is not NAME#K, a space and a caption" in refusal(Flickr8kLanguages, **options, languages=["zh"])


@pytest.mark.slow
@needs_shared("flickr8k_languages")
def test_the_real_captions():
    options = {"root": str(SHARED / "flickr8k"), "languages_root": str(SHARED / "flickr8k_languages")}
    for languages in (["de"], ALL):
        source = Flickr8kLanguages(**options, languages=languages)
        sizes = [5528, 934, 929] if languages == ["de"] else [6000, 1000, 1000]
        assert [len(source.split(name)) for name in source.splits] == sizes
