"""Advantages, losses and gradients of fixed texts by small random models, to compare with another trainer's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from preference_steps import make_batch
from prompted_steps import picture, summarise

from vlm.checkpoint.load import load_model, read
from vlm.data.fields import Field, ImageViewsField
from vlm.data.images.image import Preprocess
from vlm.data.records import Question, Record
from vlm.data.text.prompt_field import QuestionPromptField
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.tasks.image_questions.train import ImageQuestions

SAMPLES = 3  # texts per prompt
# Cases by name: the baseline, and the factor of the divergence.
CASES: dict[str, tuple[str, float]] = {
    "group": ("group", 0.0),
    "group kl": ("group", 0.3),
    "leave_one_out": ("leave_one_out", 0.0),
    "leave_one_out kl": ("leave_one_out", 0.3),
}
QUESTIONS = ("what is 0?", "is the circle above the cross?", "and what else is there?", "why?")


def make_records() -> list[Record]:
    """Records of one question each about an image."""
    records = []
    for number, text in enumerate(QUESTIONS):
        record = Record(str(number), {"questions": [Question(text, f"a right answer {number}")]})
        record.open_image = lambda number=number: picture(number)
        records.append(record)
    return records


def draw_texts(end: int) -> list[list[list[int]]]:
    """Token ids of the texts of each prompt, of different lengths; the last of each prompt does not end."""
    rng = np.random.default_rng(5)
    texts = [[rng.integers(5, 40, rng.integers(2, 9)).tolist() for _ in range(SAMPLES)] for _ in QUESTIONS]
    return [[*([*text, end] for text in row[:-1]), row[-1]] for row in texts]


def draw_rewards() -> np.ndarray:
    """The reward of each text: (P, K)."""
    return np.random.default_rng(6).normal(size=(len(QUESTIONS), SAMPLES)).round(2)


def build_task(start: Path, reference: Path, case: str) -> ImageQuestions:
    """Our task of a case, with the model of a folder, whose samples and rewards are those that are fixed."""
    loaded = read(str(start))
    about, (baseline, kl) = loaded["vlm"], CASES[case]
    preprocess = Preprocess.from_state(about["preprocess"])
    tokenizer, states = tokenizer_from_state(about["tokenizer"]), about["form"]["states"]
    field = QuestionPromptField(tokenizer=tokenizer, max_len=512, path=str(start), states=states, preprocess=preprocess)
    field.restore(about)
    fields: dict[str, Field] = {"questions": field, "images": ImageViewsField(preprocess=preprocess)}
    options: dict[str, Any] = {"reference": str(reference)} if kl else {}
    task = ImageQuestions(
        model=load_model(loaded).train(),
        fields=fields,
        seed=0,
        max_tokens=8,
        reward="exact_match",
        reward_samples=SAMPLES,
        reward_baseline=baseline,  # type: ignore[arg-type]
        reward_kl=kl,
        **options,
    )
    critic: Any = task.critic
    texts = draw_texts(tokenizer.eos_id)
    critic._sample = lambda images, rows, prompts: (texts, [])
    critic.reward = lambda samples: draw_rewards()
    task._trainer = SimpleNamespace(global_step=0)  # type: ignore[assignment]
    task.log = lambda *args, **others: None  # type: ignore[method-assign, assignment]
    return task


def compute(task: ImageQuestions) -> dict[str, Any]:
    """Advantages, loss and gradients of a batch by our task; per token for GRPO and per text for RLOO, as by TRL."""
    critic: Any = task.critic
    found: list[list[float]] = []
    baseline = critic.baseline

    def keep(rewards: torch.Tensor, greedy: torch.Tensor | None) -> torch.Tensor:
        advantages = baseline.compute_advantages(rewards, greedy)
        found.append(advantages.flatten().tolist())
        return advantages

    critic.baseline = SimpleNamespace(
        compute_advantages=keep, reads_greedy=baseline.reads_greedy, penalizes=baseline.penalizes
    )
    (term,) = task.loss(make_batch(task, make_records())).values()  # type: ignore[arg-type]
    count = len(QUESTIONS) * SAMPLES if baseline.penalizes else term.count
    loss = term.total / count
    loss.backward()
    gradients = {
        f"model.{name}": torch.zeros(1) if parameter.grad is None else parameter.grad
        for name, parameter in task.model.named_parameters()
    }
    return {"advantages": found[0], "loss": loss.item(), "gradients": summarise(gradients)}
