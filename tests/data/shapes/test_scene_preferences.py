"""Pairs of captions of scenes, of which one is right."""

from collections import Counter

from vlm.data.shapes.scene_preferences import OPPOSITES, ScenePreferences
from vlm.data.shapes.scenes import valid_captions

SHAPES, COLORS, SIZES = ["circle", "triangle", "cross"], ["red", "green", "blue", "yellow"], ["small", "large"]


def test_a_rejected_caption_is_wrong_in_one_word_of_each_kind() -> None:
    lengths = {f"{name}_scenes": 150 for name in ("train", "val", "test")}
    source = ScenePreferences(seed=0, shapes=SHAPES, colors=COLORS, sizes=SIZES, pairs_per_image=3, **lengths)
    kinds: Counter[str] = Counter()
    for name in source.splits:
        split = source.split(name)
        for at in range(len(split)):
            record = split.record(at)
            pairs, valid = record["pairs"], valid_captions(source.scene(split.keys(at)))
            assert 1 <= len(pairs) == len(set(pairs)) <= (3 if name == "train" else 1)
            for pair in pairs:
                assert pair.prompt == () and pair.chosen in valid and pair.rejected not in valid
                words = zip(pair.chosen.split(), pair.rejected.split(), strict=True)
                ((right, wrong),) = [both for both in words if both[0] != both[1]]
                groups = {"shape": SHAPES, "color": COLORS, "size": SIZES, "relation": ["left", "right"]}
                groups |= {"vertical relation": ["above", "below"]}
                (kind,) = [kind for kind, words in groups.items() if right in words and wrong in words]
                kinds[kind] += 1
            assert [pair for pair in split.record(at)["pairs"]] == pairs
    assert min(kinds.values()) > 30 and len(kinds) == 5
    assert {OPPOSITES[OPPOSITES[name]] == name for name in OPPOSITES} == {True}
