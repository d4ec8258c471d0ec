"""Writing text with a trained language model: load, continue prompts, format; the command `generate`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.loop import TEXTS, decode
from vlm.decoding.options import Decoding, Hypothesis, shortfall
from vlm.decoding.sampling import Sampling
from vlm.errors import Count, UserError
from vlm.inference.info import tokenizer_line
from vlm.inference.options import DecodingOptions, ModelOptions, Option, refuse_undecoded, stored_options
from vlm.inference.predictor import Predictor, check_outputs
from vlm.inference.text.terminal import Continuation, TerminalWriter
from vlm.inference.text.words import rules_of_words
from vlm.io.output import Output, Records
from vlm.models.decoder import Decoder
from vlm.nn.step.packed import prepack_for_decoding

MAX_TOKENS = 256  # of a text, by default


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


class Generator(Predictor):
    """A trained language model, ready to write; arguments as in Predictor."""

    task = "language_modeling"
    fields = ("prompt", "text")
    model: Decoder

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.decoding = stored_options(about)

    def check(self) -> None:
        hidden = self.model(torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        refuse_undecoded(inputs)
        options = DecodingOptions()
        return write_prompts(self, inputs, records, self.planned(options), options, batch_size=batch_size)

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])

    def rules(self, **options: Any) -> Rules:
        """Rules with words as people write them, as in `rules_of_words`."""
        return rules_of_words(self.tokenizer, **options)

    def use(self, inputs: Sequence[str], *, batch_size: Count = 32, **decoding: Any) -> list[Any]:
        """The text that goes on from each prompt, or the texts where `results` is more than 1, the best first.

        Args:
            inputs: Prompts; an empty one begins a document.
            batch_size: Prompts at a time.
            decoding: Options of decoding.
        """
        refuse_undecoded(inputs)
        options = DecodingOptions(**decoding)
        plan = self.planned(options)
        if isinstance(plan, Decoding):
            texts = list(search_prompts(self, inputs, plan, batch_size))
            return texts if plan.results > 1 else [best[0] if best else None for best in texts]
        starts = range(0, len(inputs), batch_size)
        drawing: Any = {"max_tokens": options.max_tokens, "seed": options.seed, "sampling": plan}
        batches = (inputs[start : start + batch_size] for start in starts)
        return [one for batch in batches for one in generate(self.model, self.tokenizer, batch, **drawing)]

    def planned(self, options: DecodingOptions) -> Sampling | Decoding:
        """The way of writing that some options ask for: token by token, or the best of a search."""
        options.resolve(self.decoding, draws=True)
        options.max_tokens = options.max_tokens or MAX_TOKENS
        rules = options.rules(self.tokenizer)
        sample = options.beam == 1 if options.sample is None else options.sample
        if options.beam == options.results == options.groups == 1 and not rules.read_texts and not rules.required:
            return options.sampling() if sample else replace(options.sampling(), temperature=0.0)
        return options.search(rules, sample=sample)

    def prepack(self, rows: int, *, more: bool = True) -> None:  # a text alone goes on for hundreds of steps
        prepack_for_decoding(self.model, rows=rows)


def write_prompts(
    generator: Generator,
    prompts: Sequence[str],
    records: Records,
    plan: Sampling | Decoding,
    options: DecodingOptions,
    *,
    batch_size: int,
) -> int:
    """Continues prompts as `Generator.planned` says, and writes a record for each text; returns the exit status."""
    if isinstance(plan, Decoding):
        return search_texts(generator, prompts, records, batch_size=batch_size, decoding=plan)
    drawing: Any = {"max_tokens": options.max_tokens, "seed": options.seed, "sampling": plan}
    return generate_texts(generator, prompts, records, batch_size=batch_size, **drawing)


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
    generator.prepack(min(batch_size, len(prompts)))
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        done = [Continuation(prompt, "", 0.0) for prompt in batch]
        typist = TerminalWriter(batch, first=start == 0) if records.live else None
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


def search_texts(
    generator: Generator, prompts: Sequence[str], records: Records, *, batch_size: int, decoding: Decoding
) -> int:
    """Continues prompts by a search and writes a record for each text; returns the exit status.

    Args:
        decoding: As in `search_prompts`.
    Raises:
        UserError: As `search_prompts`.
    """
    counts: list[int] = []
    generator.prepack(min(batch_size, len(prompts)) * decoding.columns)
    results = search_prompts(generator, prompts, decoding, batch_size)
    for place, (prompt, texts) in enumerate(zip(prompts, results, strict=True)):
        counts.append(len(texts))
        if records.live:
            TerminalWriter([prompt] * len(texts), first=place == 0).finish(texts)
            continue
        for rank, item in enumerate(texts, start=1):
            ranked = {"rank": rank} if decoding.results > 1 else {}
            records.write({"prompt": item.prompt, **ranked, "text": item.text, "logprob": item.logprob})
    if (line := shortfall(counts, decoding)) is not None:
        print(line, file=sys.stderr)
    return 0


def search_prompts(
    generator: Generator, prompts: Sequence[str], decoding: Decoding, batch_size: int
) -> Iterator[list[Continuation]]:
    """The texts that are found for each prompt, best first. They end where the model's window does, at the latest.

    Args:
        decoding: Its rules have no prefix, and its counts of tokens and required words are of what is written. Rules on
            what a text repeats look at the prompt too.
    Raises:
        UserError: A prompt leaves no room in the window, or not as much as the rules ask for.
    """
    batch_size = max(1, min(batch_size, TEXTS // decoding.columns))
    for start in range(0, len(prompts), batch_size):
        yield from _search(generator, prompts[start : start + batch_size], decoding)


def _search(generator: Generator, prompts: Sequence[str], decoding: Decoding) -> list[list[Continuation]]:
    tokenizer, model = generator.tokenizer, generator.model
    ids = [tokenizer.encode(prompt) or [tokenizer.bos_id] for prompt in prompts]
    alike: dict[int, list[int]] = {}  # places of prompts whose texts may be equally long
    for place, tokens in enumerate(ids):
        if (room := model.max_len - len(tokens) + 1) <= 0:
            raise UserError(
                f"--prompt: has {len(tokens)} tokens; with --beam or rules, prompt and text share the model's window "
                f"of {model.max_len}; give a shorter one, or leave these options out"
            )
        steps = room if decoding.max_tokens is None else min(decoding.max_tokens + 1, room)
        alike.setdefault(steps, []).append(place)
    texts: dict[int, list[Continuation]] = {}
    for places in alike.values():
        decoded = decode(
            model,
            [([prompts[place] for place in places], None)],
            decoding,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            rows=len(places),
            device=model.token_embed.weight.device,
            prompts=[ids[place] for place in places],
        )
        for number, best in decoded:
            prompt = prompts[places[number]]
            texts[places[number]] = [_continuation(generator, prompt, text) for text in best]
    return [texts[place] for place in range(len(prompts))]


def _continuation(generator: Generator, prompt: str, text: Hypothesis) -> Continuation:
    tokens = [token for token in text.tokens if token != generator.tokenizer.eos_id]
    return Continuation(prompt, generator.tokenizer.decode(tokens), sum(text.logprobs))


def command(
    model: ModelOptions,
    decoding: DecodingOptions,
    prompt: Annotated[
        list[str] | None, Option("Text to go on from; may be repeated. Without one, lines of stdin.")
    ] = None,
) -> int:
    """Continues prompts as the options say; returns the exit status."""
    prompts = list(prompt) if prompt else [line.rstrip("\r\n") for line in sys.stdin]
    if not prompts:
        raise UserError("there is no prompt; give --prompt TEXT, or a prompt a line on stdin")
    refuse_undecoded(prompts)
    output = Output(model.out, inputs=[model.checkpoint])
    records = Records(form=model.form, fields=Generator.fields, output=output)
    generator = model.load(Generator)
    plan = generator.planned(decoding)
    with output:
        return write_prompts(generator, prompts, records, plan, decoding, batch_size=model.batch_size)
