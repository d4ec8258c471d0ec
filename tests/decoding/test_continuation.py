"""Continuing texts: each as if it were alone, and as a model without a cache would."""

import numpy as np
import pytest
import torch

from vlm.decoding.continuation import continue_texts, find_window_start
from vlm.decoding.sampling import Sampling
from vlm.models.decoder import Decoder
from vlm.nn.position import LearnedPositionsEachLayer, RelativeBias, RotaryPositions, SinusoidalPositions
from vlm.randomness import numpy_rng

V, W, D, N = 23, 8, 16, 2
POSITIONS = {
    "learned": lambda: None,
    "rotary": lambda: RotaryPositions(head_dim=D // N),
    "relative": lambda: RelativeBias(num_heads=N, max_len=W),
    "sinusoidal": lambda: SinusoidalPositions(dim=D),
    "each layer": lambda: LearnedPositionsEachLayer(head_dim=D // N, max_len=W),
}
PROMPTS = [[5], [7, 3, 9, 1, 1, 2, 8, 4, 6, 11, 3], [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9]]


@pytest.fixture(params=POSITIONS)
def decoder(request, scramble):
    return scramble(Decoder(vocab_size=V, max_len=W, dim=D, depth=2, num_heads=N, positions=POSITIONS[request.param]()))


def run(decoder, prompts, *, eos_id=-1, max_tokens=20, seed=0, **sampling):
    texts, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    for step in continue_texts(
        decoder, prompts, sampling=Sampling(**sampling), max_tokens=max_tokens, eos_id=eos_id, seed=seed
    ):
        for item in step:
            texts[item.prompt].append(item.token)
            logprobs[item.prompt].append(item.logprob)
    return texts, logprobs


def without_cache(decoder, prompt, *, max_tokens, seed, sampling):
    """The definition: the whole context is read again for every token."""
    text, draws = list(prompt), numpy_rng(seed, "text", *prompt).random(max_tokens)
    logprobs = []
    for step in range(max_tokens):
        context = text[find_window_start(len(text), decoder.max_len) :]
        logits = decoder.head(decoder(torch.tensor([context]))[:, -1]).double()
        cumulative = np.cumsum(sampling.probabilities(logits)[0].detach().numpy())
        token = int(np.searchsorted(cumulative, draws[step] * cumulative[-1], side="right"))
        logprobs.append(logits.log_softmax(-1)[0, token].item())
        text.append(token)
    return text[len(prompt) :], logprobs


@pytest.mark.sample(plain=4, slow=6)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}])
def test_many_prompts_at_once_equal_the_definition_one_by_one(decoder, sampling):
    texts, logprobs = run(decoder, PROMPTS, seed=3, **sampling)
    for prompt, text, logs in zip(PROMPTS, texts, logprobs, strict=True):
        expected, scores = without_cache(decoder, prompt, max_tokens=20, seed=3, sampling=Sampling(**sampling))
        assert text == expected
        assert logs == pytest.approx(scores, abs=1e-4)


def test_a_text_ends_at_its_end_token_and_the_others_go_on(decoder):
    free = run(decoder, PROMPTS)[0]
    end = free[0][4]
    texts = run(decoder, PROMPTS, eos_id=end)[0]
    for text, whole in zip(texts, free, strict=True):
        assert text == (whole[: whole.index(end) + 1] if end in whole else whole)
    assert len({len(text) for text in texts}) > 1


def test_nothing_to_do():
    assert run(Decoder(vocab_size=V, max_len=W, dim=D, depth=1, num_heads=N), PROMPTS, max_tokens=0)[0] == [[]] * 4
    assert run(Decoder(vocab_size=V, max_len=W, dim=D, depth=1, num_heads=N), [])[0] == []


@pytest.mark.parametrize("window", [1, 2, 7, 8])
def test_the_context_fits_the_window_and_keeps_half_of_it(window):
    for length in range(1, 60):
        kept = length - find_window_start(length, window)
        assert kept <= window and kept >= min(length, max(1, window // 2))


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_prompts_beside_contexts_equal_the_definition(make_decoder, make_context, positions):
    """As questions about images: each prompt has a row of context, and texts end at different steps."""
    options = {"positions": None if positions == "learned" else RotaryPositions(head_dim=8)}
    decoder, context = make_decoder(V, 16, sharpness=0.5, **options), make_context(4)
    prompts = [[1, 7], [1, 3, 9, 2, 8], [1], [1, 9, 9]]

    def decode_alone(row, eos_id):
        text = list(prompts[row])
        for _ in range(6):
            one = context.rows(slice(row, row + 1))
            text.append(decoder.head(decoder(torch.tensor([text]), None, one))[0, -1].argmax().item())
            if text[-1] == eos_id:
                break
        return text[len(prompts[row]) :]

    end = decode_alone(0, -1)[2]
    texts = [[] for _ in prompts]
    greedy = {"sampling": Sampling(temperature=0.0), "max_tokens": 6, "eos_id": end, "seed": 0}
    for step in continue_texts(decoder, prompts, context=context, **greedy):
        for item in step:
            texts[item.prompt].append(item.token)
    assert texts == [decode_alone(row, end) for row in range(4)]
    assert len({tuple(text) for text in texts}) > 1


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
def test_the_cache_is_as_long_as_the_texts_and_not_as_the_window(scramble, monkeypatch, positions):
    """Of a window of 100,000 tokens it would take gigabytes."""
    made = {**POSITIONS, "relative": lambda: RelativeBias(num_heads=N, max_len=4096)}[positions]()
    long = scramble(Decoder(vocab_size=V, max_len=4096, dim=D, depth=2, num_heads=N, positions=made))
    rooms, start = [], long.start
    monkeypatch.setattr(long, "start", lambda *args, **more: rooms.append(more["max_len"]) or start(*args, **more))
    texts, logprobs = run(long, PROMPTS, seed=3)
    assert rooms == [64]
    for prompt, text, logs in zip(PROMPTS, texts, logprobs, strict=True):
        expected, scores = without_cache(long, prompt, max_tokens=20, seed=3, sampling=Sampling())
        assert text == expected and logs == pytest.approx(scores, abs=1e-4)
    run(long, PROMPTS, max_tokens=80)
    assert rooms[1:] == [128]
