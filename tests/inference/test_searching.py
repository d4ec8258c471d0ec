"""Continuing prompts by search and under rules, with a small model that was never trained."""

from itertools import product

import pytest
import torch

from vlm.data.tokenizer import CharTokenizer
from vlm.errors import UserError
from vlm.generation.logits import Sampling
from vlm.generation.options import Decoding
from vlm.inference.generating import Generator, generate
from vlm.inference.searching import search_text
from vlm.models.decoder import Decoder


@pytest.fixture
def generator(scramble):
    it = Generator.__new__(Generator)
    it.tokenizer = CharTokenizer().fit(["abc d"])
    it.model = scramble(Decoder(vocab_size=it.tokenizer.vocab_size, max_len=16, dim=12, depth=2, num_heads=3))
    return it


def logprob(generator, prompt, text, ended):
    """What the model gives a text after a prompt, all at once and without a cache."""
    tokenizer = generator.tokenizer
    ids, new = tokenizer.encode(prompt) or [tokenizer.bos_id], tokenizer.encode(text)
    new += [tokenizer.eos_id] if ended else []
    logits = generator.model.head(generator.model(torch.tensor([[*ids, *new]])))[0].log_softmax(-1)
    return sum(logits[len(ids) - 1 + n, token].item() for n, token in enumerate(new))


@pytest.mark.parametrize("prompt", ["", "a", "cab d"])
def test_greedy_search_is_greedy_continuation(generator, prompt):
    (found,) = search_text(generator, prompt, Decoding(max_tokens=8))
    options = {"max_tokens": 8, "seed": 0, "sampling": Sampling(temperature=0.0)}
    (written,) = generate(generator.model, generator.tokenizer, [prompt], **options)
    assert found.text == written.text


def test_beams_find_the_most_probable_text_of_all(generator):
    tokenizer, prompt = generator.tokenizer, "ab"
    decoding = Decoding(beam=tokenizer.vocab_size**2, results=3, length_penalty=0.0, max_tokens=2)
    found = search_text(generator, prompt, decoding)
    texts = ["".join(chars) for n in (1, 2) for chars in product("abc d", repeat=n)]
    scores = sorted((logprob(generator, prompt, text, True) for text in texts), reverse=True)
    writable = [item for item in found if item.text and all(char in "abc d" for char in item.text)]
    assert writable
    for item in writable:
        ended, cut = (logprob(generator, prompt, item.text, flag) for flag in (True, False))
        assert item.logprob == pytest.approx(ended, abs=1e-4) or item.logprob == pytest.approx(cut, abs=1e-4)
        assert ended <= scores[0] + 1e-4


def test_rules_hold_for_what_is_written_and_see_the_prompt(generator):
    def written(prompt="ab", **rules):
        (found,) = search_text(generator, prompt, Decoding(max_tokens=9, rules=generator.rules(**rules)))
        return found.text

    assert "d" not in written(ban=["d"]) and " d" in written(require=["d"])
    for prompt in ("ab", "", "cabd"):  # as many tokens of its own, however long the prompt is
        assert len(generator.tokenizer.encode(written(prompt, min_tokens=6))) >= 6
    text = "abcab" + written("abcab", no_repeat_ngram=2)
    pairs = [text[n : n + 2] for n in range(len(text) - 1)]
    assert len(set(pairs[3:])) == len(pairs[3:]) and not {"ab", "bc", "ca"} & set(pairs[4:])


def test_draws_repeat_with_the_seed_alone(generator):
    def drawn(seed):
        decoding = Decoding(sampling=Sampling(), results=3, max_tokens=8, seed=seed)
        return [item.text for item in search_text(generator, "ab", decoding)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_text_ends_with_the_window_and_a_prompt_that_fills_it_is_refused(generator):
    (found,) = search_text(generator, "abcab", Decoding(beam=2, rules=generator.rules(min_tokens=99)))
    assert len(generator.tokenizer.encode(found.text)) <= 12
    with pytest.raises(UserError, match="window of 16"):
        search_text(generator, "abcd" * 5, Decoding(beam=2))
