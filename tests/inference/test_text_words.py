"""Words of a text that a model wrote, with their probabilities."""

from math import log

import pytest
from tiny_checkpoints import FILES, IMAGES, ROOT

from vlm.data.images.image import load_image
from vlm.inference.options import DecodingOptions, ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.inference.text_words import word_probabilities


@pytest.mark.parametrize("task", ["captioning", "translation"])
def test_the_probabilities_of_words_are_those_of_the_search(task):
    """Their product is the text's own probability without its end, which the tree of the search knows."""
    path = ROOT / "data" / "sample" / "captioner.ckpt" if task == "captioning" else FILES / f"{task}.ckpt"
    writer = ModelOptions(checkpoint=str(path), device="cpu", precision="fp32").load(load_predictor)
    source = writer.pixels(load_image(IMAGES[0])) if task == "captioning" else "a small red circle"
    trees: dict = {}
    search = writer.searching(DecodingOptions(beam=3, results=3))
    (texts,) = writer.stream([[source]], search, rows=1, trees=trees)
    nodes = [node for step in trees[0] for node in step if node.kept]
    for text in texts:
        words = word_probabilities(writer, writer.encode([source]), text.tokens)
        assert " ".join(word for word, _ in words) == text.text and len({text.text for text in texts}) == 3
        (node,) = [node for node in nodes if node.tokens() == text.tokens]
        assert sum(log(chance) for _, chance in words) == pytest.approx(node.total, abs=1e-4)


def test_a_text_without_words_has_none():
    assert word_probabilities(None, None, []) == []
