"""Continuing prompts by beam search, and under rules of what a text may and must say."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from vlm.decoding.loop import decode
from vlm.decoding.options import Decoding, Hypothesis, shortfall
from vlm.errors import UserError
from vlm.inference.generating import Continuation, Generator, Typist
from vlm.inference.output import Records


def search_texts(generator: Generator, prompts: Sequence[str], records: Records, *, decoding: Decoding) -> int:
    """Continues prompts one by one and writes a record for each text; returns the exit status.

    Args:
        decoding: Its rules have no prefix, its counts of tokens are of what is written. Where a rule looks at the text,
            the prompt is part of it.
    Raises:
        UserError: As `search_text`.
    """
    counts: list[int] = []
    live = records.live
    for place, prompt in enumerate(prompts):
        found = search_text(generator, prompt, decoding)
        counts.append(len(found))
        if live:
            Typist([prompt] * len(found), first=place == 0).finish(found)
            continue
        for rank, item in enumerate(found, start=1):
            ranked = {"rank": rank} if decoding.results > 1 else {}
            records.write({"prompt": item.prompt, **ranked, "text": item.text, "logprob": item.logprob})
    if (line := shortfall(counts, decoding)) is not None:
        print(line, file=sys.stderr)
    return 0


def search_text(generator: Generator, prompt: str, decoding: Decoding) -> list[Continuation]:
    """The texts that are found for a prompt, best first. They end where the model's window does, at the latest.

    Raises:
        UserError: The prompt leaves no room in the window, or not as much as the rules ask for.
    """
    tokenizer, model = generator.tokenizer, generator.model
    # The first token stands where a caption has its begin; the others are a prefix that is not chosen.
    first, *prefix = tokenizer.encode(prompt) or [tokenizer.bos_id]
    if len(prefix) >= model.max_len:
        raise UserError(
            f"--prompt: has {len(prefix) + 1} tokens; with --beam or rules, prompt and text share the model's window "
            f"of {model.max_len}; give a shorter one, or leave these options out"
        )
    shortest = decoding.rules.min_tokens + len(prefix) if decoding.rules.min_tokens else 0
    longest = None if decoding.max_tokens is None else decoding.max_tokens + len(prefix)
    rules = replace(decoding.rules, prefix=tuple(prefix), min_tokens=shortest)
    found = decode(
        model,
        [([prompt], None)],
        replace(decoding, rules=rules, max_tokens=longest),
        bos_id=first,
        eos_id=tokenizer.eos_id,
        rows=1,
        device=model.token_embed.weight.device,
    )
    return [_continuation(generator, prompt, text) for _, texts in found for text in texts]


def _continuation(generator: Generator, prompt: str, text: Hypothesis) -> Continuation:
    tokens = [token for token in text.tokens if token != generator.tokenizer.eos_id]
    return Continuation(prompt, generator.tokenizer.decode(tokens), sum(text.logprobs))
