"""The loss of language modelling."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vlm.data.batch import Batch, Targets, TextRows
from vlm.models.recurrent import RecurrentDecoder
from vlm.tasks.language_modeling.train import LanguageModeling


def test_z_loss_is_palms():
    """1e-2 times the square of log Z of each prediction is added, in training alone."""
    torch.manual_seed(0)
    model = RecurrentDecoder(vocab_size=9, max_len=8, dim=6)
    tokens = torch.randint(9, (2, 6))
    batch = Batch([], {"text": TextRows(tokens, None, Targets.from_labels(tokens[:, 1:]))}, [])
    task, plain = (LanguageModeling(model=model, fields={}, seed=0, z_loss=z) for z in (0.01, 0.0))
    logits = model.head(model(tokens[:, :-1])).double()
    added = 0.01 * logits.exp().sum(-1).log().square().sum()
    (term,), (without,) = task.loss(batch).values(), plain.loss(batch).values()
    assert term.total.item() == pytest.approx((without.total + added).item(), rel=1e-6) and term.count == 10
    assert task.token_loss(batch["text"])[0].item() == without.total.item()


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("nd he went.\nA large dog ran", "A large"),  # a split that begins inside a word
        ("nd he went home", "he went"),
        ("word", "word"),
    ],
)
def test_the_prompt_to_try_begins_with_a_word(text: str, prompt: str) -> None:
    tokens = SimpleNamespace(tokens=torch.tensor([*text.encode()]))
    ours = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda ids: bytes(ids).decode()),
        text=SimpleNamespace(tokens=lambda split: tokens),
    )
    example = LanguageModeling.example(ours, SimpleNamespace(final_split="test"), Path())  # type: ignore[arg-type]
    assert shlex.split(example) == ["vlm", "generate", "--prompt", prompt]
