"""Units of captions in scripts with and without spaces."""

import pytest

from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.tokens import CHARACTERS, WORDS, characters, units_of

CHINESE = {
    "1.jpg": ["两只狗在草地上奔跑。", "两只棕色的狗在草地上玩耍"],
    "2.jpg": ["一个男孩在海边跳跃。", "海边的男孩跳了起来"],
    "3.jpg": ["一个穿红衣服的女人在骑自行车", "女人骑着自行车，穿着红衣服"],
}
GUESSED = {"1.jpg": "两只狗在海边奔跑", "2.jpg": "一个男孩在海边跳跃", "3.jpg": "一个男孩在骑自行车"}


@pytest.mark.parametrize(
    "captions",
    [
        ["Two dogs run on grass.", "A man in red."],
        ["Zwei Hunde laufen über das Gras."],
        ["كلبان يركضان على العشب"],
        ["두 마리의 개가 풀밭을 달린다"],  # Korean has spaces
        ["A sign that says 北京 stands beside a road."],
        ["Собаки бегут по траве"],
        ["", "..."],
        [],
    ],
)
def test_scripts_with_spaces_are_scored_by_words(captions):
    assert units_of(captions) is WORDS and not WORDS.note


@pytest.mark.parametrize(
    "captions",
    [
        CHINESE["1.jpg"],
        ["草の上を走る二匹の犬", "イヌが走っている"],
        ["ﾆﾋｷﾉｲﾇ"],
        ["สุนัขสองตัวกำลังวิ่งบนสนามหญ้า"],
        ["ໝາສອງໂຕແລ່ນ"],
        ["ខ្មែរ"],
        ["မြန်မာ"],
        ["一个穿Nike的人"],
    ],
)
def test_scripts_without_spaces_are_scored_by_characters(captions):
    assert units_of(captions) is CHARACTERS and "no spaces" in CHARACTERS.note


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("两只狗。", ["两", "只", "狗"]),
        ("两只 狗，跑！", ["两", "只", "狗", "跑"]),
        ("一个穿 Nike的人, a dog.", ["一", "个", "穿", "nike", "的", "人", "a", "dog"]),
        ("กำลังวิ่ง", ["ก", "ำ", "ลั", "ง", "วิ่", "ง"]),  # marks above and below belong to their letter
        ("が\u304b\u3099", ["が", "か\u3099"]),
        ("\U00020000狗", ["\U00020000", "狗"]),
        ("有3只狗", ["有", "3", "只", "狗"]),
        ("", []),
    ],
)
def test_captions_cut_into_characters(caption, expected):
    assert characters(caption) == expected


def spelled(caption):
    """Each character as a word of Latin letters."""
    kept = (char for char in caption if char.isalpha())
    return " ".join("w" + "".join(chr(97 + int(digit, 16)) for digit in f"{ord(char):x}") for char in kept)


def test_scores_by_characters_are_those_of_words_that_stand_for_them():
    words = References({image: list(map(spelled, texts)) for image, texts in CHINESE.items()})
    expected = words.score({image: spelled(text) for image, text in GUESSED.items()})
    found = References(CHINESE).score(GUESSED)
    assert words.units is WORDS
    assert found.summary() == expected.summary()
    assert found.per_image == expected.per_image
    assert found.summary()["cider"] > 0.5


def test_a_metric_counts_characters_and_says_so():
    metric = CaptionMetric()
    metric.update(list(CHINESE), list(GUESSED.values()), list(CHINESE.values()))
    found = metric.compute()
    assert metric.units is CHARACTERS
    assert found["mean_length"] == pytest.approx((8 + 9 + 9) / 3)
    assert 0.5 < found["length_ratio"] < 1.5 and found["vocabulary"] == len(set("".join(GUESSED.values())))
