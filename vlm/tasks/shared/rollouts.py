"""Texts that a model samples in training: its prompts, the sampling, and the rows that it reads them in again."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlm.data.batch import IGNORE, Batch, PromptRows, Targets, TextRows, next_token_labels, pack
from vlm.data.text.prompt_field import PromptField, PromptRow
from vlm.data.text.prompt_form import RenderedPrompt
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.loop import TEXTS, decode, decode_batch
from vlm.decoding.options import Decoding
from vlm.models.context import Context, Features
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.tasks.shared.rewards import Target, list_targets
from vlm.tasks.shared.text_tasks import MAX_PROMPTS, prompt_contexts

Sampled = list[list[list[int]]]  # tokens of K texts of each of P prompts, with the end token if one ended


class Prompts(NamedTuple):
    """The P prompts of a batch, in the order of its rows.

    Args:
        names: Name of each prompt, which determines what is sampled.
        ids: Id of its sample.
        targets: What it asks for.
        rows: Index of its row in the batch.
        tokens: Its token ids, with PLACE for a state of an image inside it; only the begin token for captions.
    """

    names: list[str]
    ids: list[str]
    targets: list[Target]
    rows: list[int]
    tokens: list[list[int]]


def read_prompts(batch: Batch, rows: TextRows, tokens_of: Callable[[Any], list[int]]) -> Prompts:
    """Returns the prompts of a training batch whose fields read references; those without references are left out.

    Args:
        rows: The batch's rows of texts.
        tokens_of: Returns the token ids of the prompt that asks for a reference, for rows without prompts of their own.
    """
    prompts = Prompts([], [], [], [], [])
    for row, (id, references) in enumerate(zip(batch.ids, rows.references, strict=True)):
        for number, target in enumerate(list_targets(references)):
            if not target.references:
                continue
            tokens = rows.prompts[row][number] if isinstance(rows, PromptRows) else tokens_of(references[number])
            prompts.names.append(f"{id}#{number}" if number else id)
            prompts.ids.append(id)
            prompts.targets.append(target)
            prompts.rows.append(row)
            prompts.tokens.append(list(tokens))
    return prompts


@torch.no_grad()
def sample_texts(
    model: VisionLanguageModel,
    images: Tensor | Features,
    rows: TextRows,
    prompts: Prompts,
    tokenizer: Tokenizer,
    options: Decoding,
) -> Sampled:
    """Writes texts with a model in evaluation mode; each depends only on the seed, its prompt's name and its number.

    Args:
        images: Those of the batch, as the model reads them.
        rows: The batch's rows of texts.
        options: Their `results` is K.
    """
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):  # it would cast the weights again for every token
        chunks = _continue(model, model.encode(images), rows, prompts, tokenizer, options)
        return [[text.tokens for text in texts] for chunk in chunks for texts in chunk]


def _continue(
    model: VisionLanguageModel,
    context: Context,
    rows: TextRows,
    prompts: Prompts,
    tokenizer: Tokenizer,
    options: Decoding,
) -> Iterator[list[Any]]:
    """Yields the texts of a few prompts at a time, in order."""
    ids: dict[str, Any] = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    if isinstance(rows, PromptRows):
        start = 0
        for part in prompt_contexts(rows, context.states):
            names = prompts.names[start : start + len(part.states)]
            yield decode_batch(model.decoder, part, options, ids=names, **ids)
            start += len(names)
        return
    has_own_rows = prompts.rows == list(range(len(context.states)))
    if has_own_rows and all(len(tokens) == 1 for tokens in prompts.tokens):  # captions
        yield decode_batch(model.decoder, context, options, ids=prompts.names, **ids)
        return
    count = max(1, min(MAX_PROMPTS, TEXTS // options.columns))
    for start in range(0, len(prompts.names), count):
        some = slice(start, start + count)
        index = torch.tensor(prompts.rows[some], device=context.states.device)
        chunk = [(prompts.names[some], context.rows(index))]
        tokens, device = prompts.tokens[some], context.states.device
        texts = dict(decode(model.decoder, chunk, options, rows=len(tokens), prompts=tokens, device=device, **ids))
        yield [texts[place] for place in range(len(tokens))]


def build_rows(field: Any, rows: TextRows, prompts: Prompts, sampled: Sampled, pad_id: int) -> TextRows:
    """Returns rows of the prompts followed by their texts, packed as the batch's rows are; only texts are predicted.

    Args:
        field: The field of the batch's texts.
        rows: The batch's rows.
    """
    texts: list[list[RenderedPrompt]] = [[] for _ in rows.references]
    for row, prompt, answers in zip(prompts.rows, prompts.tokens, sampled, strict=True):
        for answer in answers:
            flags = [False] * len(prompt) + [True] * len(answer)
            texts[row].append(RenderedPrompt([*prompt, *answer], flags))
    if isinstance(rows, PromptRows):
        assert isinstance(field, PromptField)
        pairs = zip(texts, rows.num_states, strict=True)
        return field.collate([PromptRow(row_texts, states) for row_texts, states in pairs])
    tokens, segments = pack([[text.tokens for text in row] for row in texts], pad_id)
    scored = pack([[text.generated for text in row] for row in texts], 0)[0] == 1
    targets = Targets.from_labels(next_token_labels(tokens.masked_fill(~scored, IGNORE), segments))
    return TextRows(tokens, segments, targets, scored)


def number_texts(rows: TextRows, prompts: Prompts, count: int) -> Tensor:
    """Returns the index of the text of each labelled position, among the texts of all prompts: (T,).

    Args:
        count: Number of texts of each prompt.
    """
    assert rows.segments is not None
    texts = torch.zeros(len(rows.tokens), dtype=torch.long)
    for row in prompts.rows:
        texts[row] += count
    first = (texts.cumsum(0) - texts).to(rows.segments.device)  # number of the texts in earlier rows
    numbers = rows.segments + first[:, None] - 1
    places = slice(None) if rows.targets.places is None else rows.targets.places
    return numbers.flatten()[places]
