"""Scores of tokens: those of a log-softmax over the logits, of prompts and of continuations."""

import pytest
import torch

from vlm.decoding.continuation import continue_texts
from vlm.decoding.sampling import Sampling
from vlm.decoding.token_scores import CHUNK, score_prompts, score_tokens
from vlm.models.decoder import Decoder
from vlm.nn.position import RotaryPositions

V, D, N = 23, 16, 2
PROMPTS = [[5], [7, 3, 9, 1, 1, 2], [1, 2, 3]]


@pytest.fixture
def decoder(scramble):
    positions = RotaryPositions(head_dim=D // N)
    return scramble(Decoder(vocab_size=V, max_len=2 * CHUNK + 9, dim=D, depth=2, num_heads=N, positions=positions))


@torch.no_grad()
def logprobs_of(decoder, tokens):
    return decoder.head(decoder(torch.tensor([tokens]))[0]).log_softmax(-1)


@pytest.mark.parametrize("top", [0, 1, 5, V, 99])
def test_the_token_is_among_the_best_with_the_same_number(top):
    logits, tokens = torch.randn(4, V), torch.tensor([3, 0, 22, 7])
    truth = logits.log_softmax(-1)
    for row, (score, token) in enumerate(zip(score_tokens(logits, tokens, top), tokens.tolist(), strict=True)):
        assert (score.token, score.logprob) == (token, truth[row, token].item())
        values, ids = truth[row].sort(descending=True)
        best = list(zip(ids[:top].tolist(), values[:top].tolist(), strict=True))
        others = [(token, score.logprob)] if top and token not in ids[:top].tolist() else []
        assert list(score.top) == best + others


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_prompts_longer_than_a_chunk_are_scored_as_a_whole(decoder, length):
    prompt = torch.randint(V, (length,)).tolist()
    hidden = decoder(torch.tensor([[0, 0, *prompt]]), torch.tensor([[0, 0, *[1] * length]]))
    (scores,) = score_prompts(decoder, hidden, [prompt], top=2)
    truth = logprobs_of(decoder, prompt)
    assert scores[0] is None and [score.token for score in scores[1:]] == prompt[1:]
    expected = [truth[place, token].item() for place, token in enumerate(prompt[1:])]
    assert [score.logprob for score in scores[1:]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_texts_that_share_a_prompt_read_it_once(decoder, monkeypatch, max_tokens):
    """And are continued as if each had been alone; the prompt's scores are there before the first token."""
    read, step = [], decoder.step
    monkeypatch.setattr(decoder, "step", lambda tokens, *rest: read.append(tuple(tokens.shape)) or step(tokens, *rest))
    sources, seeds = [0, 0, 1, 0, 2, 2], [0, 1, 0, 2, 0, 9]
    prompts, found = [PROMPTS[source] for source in sources], [[] for _ in PROMPTS]
    options = {"sampling": Sampling(temperature=1.5), "max_tokens": max_tokens, "eos_id": -1, "top": 2}
    texts = [[] for _ in prompts]
    for items in continue_texts(decoder, prompts, seed=seeds, sources=sources, prompt_scores=found, **options):
        assert all(found)
        for item in items:
            texts[item.prompt].append(item)
    assert read == [(3, 6), *[(6, 1)] * (max_tokens - 1)]
    for prompt, seed, text in zip(prompts, seeds, texts, strict=True):
        alone = [items[0] for items in continue_texts(decoder, [prompt], seed=seed, **options)]
        assert [item.token for item in text] == [item.token for item in alone]
        truth = logprobs_of(decoder, prompt + [item.token for item in text])[len(prompt) - 1 :]
        assert [item.logprob for item in text] == pytest.approx(
            [row[item.token].item() for row, item in zip(truth, text, strict=False)], abs=1e-4
        )
        assert all(dict(item.top)[item.token] == item.logprob for item in text)
    for prompt, scores in zip(PROMPTS, found, strict=True):
        truth = logprobs_of(decoder, prompt)
        expected = [truth[place, token].item() for place, token in enumerate(prompt[1:])]
        assert scores[0] is None and [one.logprob for one in scores[1:]] == pytest.approx(expected, abs=1e-4)
