"""Continuing prompts by search and under rules, with a small model that was never trained."""

import json
from itertools import product

import pytest
import torch
from tiny_checkpoints import FILES

from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.options import build_word_rules
from vlm.inference.use import write_results
from vlm.io.output import Output, Records
from vlm.models.decoder import Decoder
from vlm.tasks.language_modeling.predict import TextGenerator, generate, search_prompts


class Letters:
    """A tokenizer of so few tokens that all texts can be tried."""

    bos_id, eos_id, vocab_size, starts = 0, 1, 7, ()

    def encode(self, text):
        return [2 + "abc d".index(char) for char in text.lower() if char != "^"]

    encode_written = encode

    def decode(self, tokens):
        return "".join("^$abc d"[token] for token in tokens)


@pytest.fixture
def generator(scramble):
    it = TextGenerator.__new__(TextGenerator)
    it.decoding, it.device = {}, "cpu"
    it.tokenizer = Letters()
    it.model = scramble(Decoder(vocab_size=it.tokenizer.vocab_size, max_len=16, dim=12, depth=2, num_heads=3))
    return it


def search(generator, prompt, decoding):
    (texts,) = search_prompts(generator, [prompt], decoding, 1)
    return texts


def logprob(generator, prompt, new):
    """What the model gives tokens after a prompt, all at once and without a cache."""
    ids = generator.tokenizer.encode(prompt) or [generator.tokenizer.bos_id]
    logits = generator.model.head(generator.model(torch.tensor([[*ids, *new]])))[0].log_softmax(-1)
    return sum(logits[len(ids) - 1 + n, token].item() for n, token in enumerate(new))


@pytest.mark.parametrize("prompt", ["", "a", "cab d"])
def test_greedy_search_is_greedy_continuation(generator, prompt):
    (found,) = search(generator, prompt, Decoding(max_tokens=8))
    options = {"max_tokens": 8, "seed": 0, "sampling": Sampling(temperature=0.0)}
    (written,) = generate(generator.model, generator.tokenizer, [prompt], **options)
    assert found.text == written.text


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", "ab", "d cab"])
def test_beams_find_the_most_probable_text_of_all(generator, prompt):
    tokenizer, scores = generator.tokenizer, {}
    end, vocab = tokenizer.eos_id, range(tokenizer.vocab_size)
    scores |= {(*new, end): logprob(generator, prompt, (*new, end)) for new in [(), *((token,) for token in vocab)]}
    for new in product(vocab, repeat=2):  # which end where that is likeliest, and are cut else
        after = [logprob(generator, prompt, (*new, token)) for token in vocab]
        ends = after.index(max(after)) == end
        scores[(*new, end) if ends else new] = after[end] if ends else logprob(generator, prompt, new)
    scores = {text: score for text, score in scores.items() if end not in text[:-1]}
    decoding = Decoding(beam=tokenizer.vocab_size**2, results=3, length_penalty=0.0, max_tokens=2)
    found = [item.text for item in search(generator, prompt, decoding)]
    best = sorted(scores, key=lambda text: -scores[text])[:3]
    assert found == [tokenizer.decode([token for token in text if token != tokenizer.eos_id]) for text in best]


def test_rules_hold_for_what_is_written_and_see_the_prompt(generator):
    def write_text(prompt="ab", **rules):
        (found,) = search(
            generator, prompt, Decoding(max_tokens=9, rules=build_word_rules(generator.tokenizer, **rules))
        )
        return found.text

    assert "d" not in write_text(ban=["d"]) and " d" in write_text(require=["d"])
    for prompt in ("ab", "", "cabd"):  # as many tokens of its own, however long the prompt is
        assert len(write_text(prompt, min_tokens=6)) >= 6
    text = "abcab" + write_text("abcab", no_repeat_ngram=2)
    pairs = [text[n : n + 2] for n in range(len(text) - 1)]
    assert len(set(pairs[3:])) == len(pairs[3:]) and not {"ab", "bc", "ca"} & set(pairs[4:])


@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize(
    "decoding",
    [
        {"beam": 3, "results": 3},
        {"beam": 4, "groups": 2, "max_tokens": 20},  # more than the window leaves
        {"sampling": Sampling(), "results": 2},
        {"beam": 4, "results": 4, "length_penalty": 0.6},
        {"beam": 3, "results": 2, "length_penalty": 2.0},
        {"beam": 3, "require": ["d"]},
        {"min_tokens": 4, "no_repeat_ngram": 2, "repetition_penalty": 1.5, "ban": ["da"]},
    ],
)
def test_texts_of_prompts_that_are_searched_at_once_are_those_of_each_alone(generator, decoding, batch_size):
    options = {"max_tokens": 6} | {name: value for name, value in decoding.items() if hasattr(Decoding(), name)}
    words = {name: value for name, value in decoding.items() if name not in options}
    plan = Decoding(**options, rules=build_word_rules(generator.tokenizer, **words))
    generator.model.double()
    prompts = ["a", "", "cab d", "abcdabcdabcd", "dd", "a"]
    together = search_prompts(generator, prompts, plan, batch_size)
    alone = [search(generator, prompt, plan) for prompt in prompts]
    assert [[item.text for item in texts] for texts in together] == [[item.text for item in texts] for texts in alone]


def test_a_text_ends_with_the_window_and_a_prompt_that_fills_it_is_refused(generator):
    (found,) = search(generator, "abcab", Decoding(beam=2, rules=build_word_rules(generator.tokenizer, min_tokens=12)))
    assert len(found.text) == 16 - len("bcab") == 12
    with pytest.raises(UserError, match="--min-tokens: 13 tokens"):
        search(generator, "abcab", Decoding(beam=2, rules=build_word_rules(generator.tokenizer, min_tokens=13)))
    with pytest.raises(UserError, match="window of 16"):
        search(generator, "abcd" * 5, Decoding(beam=2))


def test_predict_goes_on_as_the_command_does(tmp_path, capsys):
    loaded, path = read(str(FILES / "language_modeling.ckpt")), str(tmp_path / "greedy.ckpt")
    loaded["vlm"]["decoding"] = {"temperature": 0.0, "max_tokens": 9}
    write(path, loaded)
    printed = []
    for arguments in (["predict", "a red"], ["generate", "--prompt", "a red"]):
        assert run([*arguments, "-c", path, "--device", "cpu", "--precision", "fp32", "--format", "jsonl"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 20


def test_fewer_results_than_asked_for_are_named(generator, capsys):
    options = generator.options(beam=9, results=9, max_tokens=1)  # there are fewer texts of a letter than 9
    records = Records(form="jsonl", fields=(), output=Output(None))
    assert write_results(generator, ["a", "d"], options, records) == 0
    printed = capsys.readouterr()
    assert {json.loads(line)["prompt"] for line in printed.out.splitlines()} == {"a", "d"}
    assert printed.err.startswith("note: fewer texts than --results 9 for 2 of 2 inputs;")
