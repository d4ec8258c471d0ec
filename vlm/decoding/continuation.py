"""Continues many prompts of different lengths in one batch, and keeps the KV cache of a conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlm.decoding.constraints import Rules
from vlm.decoding.grammar import Grammar
from vlm.decoding.sampling import Sampling, TokenHistory, create_history, draw_next
from vlm.decoding.token_scores import TokenScore, score_prompts, score_tokens
from vlm.models.context import PLACE, Context
from vlm.models.decoder import Decoder, TextDecoder
from vlm.nn.attention import changing_lengths
from vlm.nn.step import replay
from vlm.nn.step.replay import Stepper
from vlm.nn.step.state import DecodeState
from vlm.randomness import numpy_rng

CACHE_STEP = 256  # number of tokens by which the cache grows


class PromptCache:
    """A KV cache of the last text: of the next text, only the part after the common prefix is computed.

    Args:
        decoder: A decoder without context, or with a causal prefix whose states have positions.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._read: list[int] = []
        self._state: DecodeState | None = None

    @torch.inference_mode()
    def logits(self, text: Sequence[int], states: Tensor | None = None) -> Tensor:
        """Logits of the token after a text: float32 (1, V).

        Args:
            text: Token ids, at least one, with a negative number in place of each state. Each image has its own number,
                which must be the same in later texts.
            states: All states of the text, in order; may be None if the part after the common prefix has none.
        Shapes:
            states (number of states, context_dim)
        """
        common = self._common_prefix_length(text)
        state = self._state
        if state is None:
            state = self._state = self.decoder.start(None, rows=1, max_len=min(self.decoder.max_len, CACHE_STEP))
        state.rewind(common, min(self.decoder.max_len, len(text) + -len(text) % CACHE_STEP))
        self._read = self._read[:common]  # valid even if the step fails
        device = self.decoder.token_embed.weight.device
        new = torch.tensor([text[common:]], device=device)
        laid_states = None
        if (places := new < 0).any():
            assert states is not None
            before = sum(token < 0 for token in text[:common])
            laid_states = states.new_zeros(*new.shape, states.shape[-1])
            laid_states[places] = states[before:]
        with changing_lengths(device):
            hidden = self.decoder.step(new.masked_fill(places, PLACE), state, laid_states)
            self._read = list(text)
            return self.decoder.head(hidden[:, -1]).float()

    def _common_prefix_length(self, text: Sequence[int]) -> int:
        """Number of leading tokens that the cache holds; at most all but the last."""
        most = min(len(self._read), len(text) - 1)
        if [*text[:most]] == self._read[:most]:  # the usual case
            return most
        return next(place for place in range(most) if text[place] != self._read[place])


LENGTH_STEP = 64  # lengths of a cache are multiples of this, so that a GPU records few different steps


@dataclass(frozen=True)
class SampledToken:
    """A token sampled for a prompt, with its log-probability according to the model.

    Args:
        top: As in `TokenScore`.
    """

    prompt: int
    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@torch.inference_mode()
def continue_texts(
    decoder: TextDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_tokens: int,
    eos_id: int,
    seed: int | Sequence[int],
    ends: Sequence[int] = (),
    context: Context | None = None,
    keys: Sequence[Sequence[int]] | None = None,
    ended: set[int] | None = None,
    rules: Rules = Rules(),  # noqa: B008  # frozen
    sources: Sequence[int] | None = None,
    top: int = 0,
    prompt_scores: Sequence[list[TokenScore | None]] | None = None,
    grammars: Sequence[Grammar | None] = (),
) -> Iterator[list[SampledToken]]:
    """Continues texts token by token until the end token or max_tokens.

    The continuation of a prompt depends only on the prompt, its context and its seed, not on other prompts or their
    order. When a text exceeds the decoder's max_len, only its last half is read again, whenever the window is full.

    Args:
        prompts: Token ids, at least one each.
        seed: Seed of all prompts, or one seed per prompt.
        ends: Tokens that end a text besides the end token.
        context: One row per prompt or, with `sources`, per source; None for a decoder without context.
        keys: Keys of each prompt's random draws, in addition to the seed; default the prompt.
        ended: Indices of texts that have ended. They are added here; the caller may add others to end them.
        rules: Constraints on the texts, without a prefix or required words; they read the keys as prompts.
        sources: A number for each text, from 0 on. Texts with the same number have the same prompt and context, which
            are read once. By default, all differ.
        top: Number of most probable tokens to report at each place.
        prompt_scores: A list per source, filled with the scores of the prompt's tokens before the first step, even if
            max_tokens is 0. The prompts must fit into the decoder's window.
        grammars: What the continuation of each prompt matches, if anything; default that of the rules.
    Yields:
        The tokens of each step, for every unfinished text.
    """
    ended, end_ids = set() if ended is None else ended, (eos_id, *ends)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
    sources = range(len(prompts)) if sources is None else sources
    run = _Continuation(decoder, prompts, keys or prompts, seeds, context, sampling, rules, max_tokens, sources, top)
    run.prompt_scores, run.grammars = prompt_scores, grammars
    if prompt_scores is not None and prompts and not max_tokens:
        run.read_prompts()
    for step in range(max_tokens):
        if len(ended) == len(prompts):
            return
        sampled = [item for item in run.step(step, end_ids, ended) if item.prompt not in ended]
        for item in sampled:
            run.texts[item.prompt].append(item.token)
        yield sampled
        ended |= {item.prompt for item in sampled if item.token in end_ids}
        run.drop(ended)


class _Continuation:
    """The texts of `continue_texts` that have not ended, one per row.

    Args:
        keys: Keys of each prompt's random draws, which constraints read as prompts.
        others: See `continue_texts`.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[int]],
        seeds: Sequence[int],
        context: Context | None,
        sampling: Sampling,
        rules: Rules,
        max_tokens: int,
        sources: Sequence[int],
        top: int,
    ) -> None:
        self.decoder, self.prompts, self.keys, self.context = decoder, prompts, keys, context
        self.sampling, self.rules, self.max_tokens, self.sources, self.top = sampling, rules, max_tokens, sources, top
        self.prompt_scores: Sequence[list[TokenScore | None]] | None = None
        self.grammars: Sequence[Grammar | None] = ()
        self.device = decoder.token_embed.weight.device
        self.texts = [list(prompt) for prompt in prompts]
        # Random numbers are copied to the device once: a copy in each step would wait for the device.
        numbers = [numpy_rng(seed, "text", *key).random(max_tokens) for seed, key in zip(seeds, keys, strict=True)]
        self.draws = torch.from_numpy(np.array(numbers)).to(self.device)  # (all texts, max_tokens)
        # A cache for the whole window would take gigabytes of a decoder that reads 100,000 tokens.
        longest = max(map(len, prompts), default=0) + max_tokens
        self.cache_len = min(decoder.max_len, longest + -longest % LENGTH_STEP)
        self.rows = list(range(len(prompts)))
        self.begins = [-1] * len(prompts)  # index of the first token of each row's text in the cache
        self.steps: Stepper | None = None
        self.history: TokenHistory | None = None
        self.tokens, self.row_draws = torch.empty(0), self.draws

    def step(self, step: int, ends: Sequence[int], ended: set[int]) -> list[SampledToken]:
        """Samples the next token of each row."""
        max_len = self.decoder.max_len
        wanted = [find_window_start(len(self.texts[row]), max_len) for row in self.rows]
        full = self.steps is not None and self.steps.state.length == max_len  # filled by a longer text that has ended
        if self.steps is None:
            logits = self.read_prompts()
        elif full or wanted != self.begins:
            logits = self._read([row for row in self.rows if row not in ended])
        else:
            logits = self.steps.logits(self.tokens[:, None])  # (R, V)
        self.tokens = tokens = draw_next(self.sampling, logits, self.row_draws[:, step], self.history, ends)
        scores = score_tokens(logits, tokens, self.top)  # the only synchronisation of a step
        return [SampledToken(row, *score) for row, score in zip(self.rows, scores, strict=True)]

    def read_prompts(self) -> Tensor:
        """Reads each source once, and copies its cache for the texts that share it; returns the next logits (R, V)."""
        firsts: dict[int, int] = {}  # the first text of each source
        for text, source in enumerate(self.sources):
            firsts.setdefault(source, text)
        logits = self._read([*firsts.values()])
        if len(firsts) == len(self.sources):
            return logits
        places = {source: place for place, source in enumerate(firsts)}
        index = torch.tensor([places[source] for source in self.sources], device=self.device)
        assert self.steps is not None
        self.steps.state.select(index)
        if self.history is not None:
            self.history.select(index)
        self.rows, self.row_draws = list(range(len(self.sources))), self.draws
        self.begins = [self.begins[place] for place in index.tolist()]
        return logits[index]

    def _read(self, rows: list[int]) -> Tensor:
        """Reads the windows of these texts, right-aligned, into a new cache; returns the next logits (R, V)."""
        decoder, index = self.decoder, torch.tensor(rows, device=self.device)
        scored = self.steps is None and self.prompt_scores is not None
        self.rows, self.row_draws = rows, self.draws[index]
        self.begins = [find_window_start(len(self.texts[row]), decoder.max_len) for row in rows]
        windows = [self.texts[row][at:] for row, at in zip(rows, self.begins, strict=True)]
        tokens, starts = right_align(windows, self.device)
        sources = torch.tensor([self.sources[row] for row in rows], device=self.device)
        context = None if self.context is None else self.context.rows(sources)
        state = decoder.start(context, rows=len(rows), max_len=self.cache_len, starts=starts, beams=1)
        self.steps = Stepper(decoder, state)
        keys = [self.keys[row] for row in rows]
        answers = [self.texts[row][len(self.prompts[row]) :] for row in rows]
        self.history = create_history(
            self.rules,
            keys,
            answers,
            max_tokens=self.max_tokens,
            device=self.device,
            grammars=[self.grammars[row] for row in rows] if self.grammars else (),
        )
        if not scored:
            return self.steps.logits(tokens)
        assert self.prompt_scores is not None
        hidden = self.steps.hidden(tokens)  # (R, L, D)
        for row, scores in zip(rows, score_prompts(decoder, hidden, windows, self.top), strict=True):
            self.prompt_scores[self.sources[row]].extend(scores)
        return decoder.head(hidden[:, -1]).float()

    def drop(self, ended: set[int]) -> None:
        """Drops the rows of texts that have ended, except on a GPU: a recorded step has a fixed number of rows."""
        running = [place for place, row in enumerate(self.rows) if row not in ended]
        if self.steps is None or len(running) == len(self.rows) or replay.uses_cuda_graph(self.device):
            return
        self.rows, self.begins = [self.rows[place] for place in running], [self.begins[place] for place in running]
        index = torch.tensor(running, device=self.device, dtype=torch.long)
        self.tokens, self.row_draws = self.tokens[index], self.row_draws[index]
        self.steps.state.select(index)
        if self.history is not None:
            self.history.select(index)


def find_window_start(length: int, window: int) -> int:
    """Index of the first token of a text inside the model's window; it depends on the text's length only.

    It moves in strides of half a window, because each move requires reading the whole context again.
    """
    stride = window - window // 2
    return 0 if length <= window else -(-(length - window) // stride) * stride


def right_align(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Right-aligns texts of different lengths; returns rows and where each text begins, None if all begin at 0.

    Shapes:
        -> tokens (R, L), starts (R,)
    """
    longest = max(map(len, texts))
    starts = [longest - len(text) for text in texts]
    tokens = torch.tensor([[*[0] * start, *text] for start, text in zip(starts, texts, strict=True)], device=device)
    return tokens, torch.tensor(starts, device=device) if any(starts) else None
