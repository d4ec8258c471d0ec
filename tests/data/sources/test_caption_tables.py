"""Tables of captions, beside what tests of their sources show."""

from vlm.data.sources.caption_tables import read_table


def test_a_caption_may_be_longer_than_pythons_own_limit(tmp_path):
    caption = "a long one, " * 20_000  # 240,000 characters
    (tmp_path / "captions.csv").write_text(f'image,caption\na.png,"{caption}"\n')
    (row,) = read_table(tmp_path / "captions.csv", "image", "caption", "split")
    assert row.caption == caption
