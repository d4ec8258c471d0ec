"""Writing text with a trained language model: load, continue prompts, format."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.verify import refusing
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.sampling import Sampling
from vlm.errors import printable
from vlm.inference.loading import check_outputs, read_for
from vlm.inference.output import Records
from vlm.inference.words import rules_of_words
from vlm.models.decoder import Decoder
from vlm.nn.step.packed import lay_out_for_decoding


@dataclass
class Continuation:
    """What was written after a prompt, and its log-probability in nats."""

    prompt: str
    text: str
    logprob: float


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    seed: int,
    sampling: Sampling | None = None,
) -> list[Continuation]:
    """Continues prompts, all at once."""
    done = [Continuation(prompt, "", 0.0) for prompt in prompts]
    for place, text, logprob in stream(
        model, tokenizer, prompts, max_tokens=max_tokens, seed=seed, sampling=sampling or Sampling()
    ):
        done[place].text += text
        done[place].logprob += logprob
    return done


def stream(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], *, max_tokens: int, seed: int, sampling: Sampling
) -> Iterator[tuple[int, str, float]]:
    """Continues prompts, and yields each new piece of text as soon as it is whole characters.

    An empty prompt starts a document; any other is taken as it stands, in the middle of one.

    Yields:
        The prompt's place, the text and its log-probability.
    """
    ids = [tokenizer.encode(prompt) or [tokenizer.bos_id] for prompt in prompts]
    pending: list[list[int]] = [[] for _ in prompts]
    for drawn in continue_texts(
        model, ids, sampling=sampling, max_tokens=max_tokens, eos_id=tokenizer.eos_id, seed=seed
    ):
        for item in drawn:
            held = pending[item.prompt]
            held.append(item.token)
            text = tokenizer.decode(held)
            # The bytes of a character may be spread over tokens; four are the most that one has.
            if text.endswith("\ufffd") and len(held) < 4:
                text = ""
            else:
                held.clear()
            yield item.prompt, text, item.logprob
    for place, held in enumerate(pending):
        if held:
            yield place, tokenizer.decode(held), 0.0


class Generator:
    """A trained language model, ready to write.

    Args:
        path: The checkpoint.
        device: Where to run.
        dtype: Of weights and states.
        trust: A package of the user's own whose model classes may be built.
    Raises:
        UserError: The checkpoint holds no language model.
    """

    def __init__(
        self,
        path: str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust: str | None = None,
    ) -> None:
        loaded = read_for("language_modeling", path)
        about = loaded["vlm"]
        with refusing(path), torch.no_grad():
            self.tokenizer = tokenizer_from_state(about["tokenizer"])
            self.model: Decoder = ckpt.load_model(loaded, trust=trust).to(device, dtype)  # type: ignore[assignment]
            hidden = self.model(torch.tensor([[self.tokenizer.bos_id]], device=device))
            check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def rules(self, **options: Any) -> Rules:
        """Rules with words as people write them, as in `rules_of_words`."""
        return rules_of_words(self.tokenizer, **options)


def generate_texts(
    generator: Generator,
    prompts: Sequence[str],
    records: Records,
    *,
    batch_size: int,
    max_tokens: int,
    seed: int,
    sampling: Sampling,
) -> int:
    """Continues prompts and writes a record for each; text goes out token by token; returns the exit status."""
    model, tokenizer = generator.model, generator.tokenizer
    lay_out_for_decoding(model, rows=min(batch_size, len(prompts)))
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        done = [Continuation(prompt, "", 0.0) for prompt in batch]
        live = records.live
        typist = Typist(batch, first=start == 0) if live else None
        for place, text, logprob in stream(
            model, tokenizer, batch, max_tokens=max_tokens, seed=seed, sampling=sampling
        ):
            done[place].text += text
            done[place].logprob += logprob
            if typist is not None:
                typist.type(done)
        for item in done:
            if typist is None:
                records.write({"prompt": item.prompt, "text": item.text, "logprob": item.logprob})
        if typist is not None:
            typist.finish(done)
    return 0


class Typist:
    """Writes continuations to the terminal in the order of their prompts, the foremost one as it comes.

    Args:
        prompts: Written before what continues them.
        first: Whether nothing has been written before.
    """

    def __init__(self, prompts: Sequence[str], *, first: bool) -> None:
        self.prompts = prompts
        self.current, self.written = 0, 0
        self._put(prompts[0] if first else f"---\n{prompts[0]}")

    def type(self, done: Sequence[Continuation]) -> None:
        text = done[self.current].text
        self._put(text[self.written :])
        self.written = len(text)

    def finish(self, done: Sequence[Continuation]) -> None:
        for place in range(self.current, len(done)):
            self.current, self.written = place, self.written if place == self.current else 0
            if place:
                self._put(f"\n---\n{self.prompts[place]}")
            self.type(done)
        self._put("\n")

    def _put(self, text: str) -> None:
        sys.stdout.write("\n".join(printable(line) for line in text.split("\n")))
        sys.stdout.flush()
