"""Words of texts that models write, with their probabilities, in scripts with and without spaces."""

from math import log

import pytest
from tiny_checkpoints import FILES, IMAGES, ROOT

from vlm.data.images.image import load_image
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from vlm.data.text.words import words
from vlm.inference.options import ModelOptions, build_word_rules
from vlm.inference.predictor import load_predictor
from vlm.inference.writing import split_words, word_probabilities

TEXTS = ["两只狗在草地上奔跑。", "海边的男孩跳了起来，", "a dog runs on grass.", "สุนัขวิ่ง"] * 5


def fit_tokenizer(kind, **options):
    tokenizer = kind(**options)
    tokenizer.fit(TEXTS, cache=None)
    return tokenizer


@pytest.fixture(params=[(CharTokenizer, {}), (ByteTokenizer, {}), (SentencePieceTokenizer, {"vocab_size": 330})])
def tokenizer(request):
    kind, options = request.param
    return fit_tokenizer(kind, **options)


@pytest.mark.parametrize("text", ["a dog runs on grass.", "两只狗在草地上奔跑。", "两只 dog 跑。", "สุนัขวิ่ง"])
def test_each_token_is_of_one_word_and_words_are_the_text(tokenizer, text):
    tokens = tokenizer.encode(text)
    found = list(split_words(tokens, tokenizer))
    assert [place for _, places in found for place in places] == list(range(len(tokens)))
    assert "".join(word for word, _ in found) == text.replace(" ", "")


def test_a_script_without_spaces_has_a_word_a_token_and_marks_stay_with_it():
    tokenizer = fit_tokenizer(CharTokenizer)
    assert [word for word, _ in split_words(tokenizer.encode("a dog runs."), tokenizer)] == ["a", "dog", "runs."]
    assert [word for word, _ in split_words(tokenizer.encode("两只 dog跑。"), tokenizer)] == ["两", "只", "dog", "跑。"]
    assert [word for word, _ in split_words(tokenizer.encode("วิ่ง"), tokenizer)] == ["วิ่", "ง"]


def test_a_required_word_stands_as_its_script_has_it():
    tokenizer = fit_tokenizer(CharTokenizer)
    required = build_word_rules(tokenizer, require=["狗", "dog"]).required
    assert [tokenizer.decode(list(run)) for runs in required for run in runs] == ["狗", " dog"]


def test_words_of_a_text_are_without_punctuation():
    assert list(words("The left-hand dog, runs.")) == ["The", "left", "hand", "dog", "runs"]
    assert list(words("左边的狗 runs。")) == ["左", "边", "的", "狗", "runs"]


@pytest.mark.parametrize("task", ["captioning", "translation"])
def test_the_probabilities_of_words_are_those_of_the_search(task):
    """Their product is the text's own probability without its end, which the tree of the search knows."""
    path = ROOT / "data" / "sample" / "captioner.ckpt" if task == "captioning" else FILES / f"{task}.ckpt"
    writer = ModelOptions(checkpoint=str(path), device="cpu", precision="fp32").load(load_predictor)
    source = writer.pixels(load_image(IMAGES[0])) if task == "captioning" else "a small red circle"
    trees: dict = {}
    ((_, texts),) = writer.results([[source]], writer.options(beam=3, results=3), trees=trees)
    nodes = [node for step in trees[0] for node in step if node.selected]
    for text in texts:
        shares = word_probabilities(writer, writer.encode([source]), text.tokens)
        assert " ".join(word for word, _ in shares) == text.text and len({text.text for text in texts}) == 3
        (node,) = [node for node in nodes if node.tokens() == text.tokens]
        assert sum(log(chance) for _, chance in shares) == pytest.approx(node.total, abs=1e-4)


def test_a_text_without_words_has_none():
    assert word_probabilities(None, None, []) == []
