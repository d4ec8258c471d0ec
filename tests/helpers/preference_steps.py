"""Losses, rewards and gradients of pairs of answers by small random models, to compare with another trainer's."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from chats import tokenizer_of
from hugging import save_parts, wide
from image_text import saved_image_text
from prompted_steps import picture, summarise
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, SmolVLMForConditionalGeneration

from vlm.checkpoint.load import load_model, read
from vlm.data.batch import Batch
from vlm.data.fields import Field, ImageViewsField
from vlm.data.images.image import Preprocess
from vlm.data.records import Preference, Record
from vlm.data.text.preference_field import PreferencePromptField
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.tasks.preferences.train import Preferences

NOISE = 0.02  # of the reference's weights, relative to those of the model
# What follows an answer is its end token alone, since TRL scores everything after the prompt.
TEXT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
IMAGE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] | capitalize }}:{% if m['role'] == 'assistant' %}"
    "{% generation %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<end_of_utterance>{% endgeneration %}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>Assistant:{% endif %}"
)
CASES: dict[str, dict[str, Any]] = {
    "text dpo": {"loss": "dpo", "beta": 0.3},
    "text ipo": {"loss": "ipo", "beta": 0.2},
    "text simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.5},
    "text simpo smoothed": {"loss": "simpo", "beta": 2.0, "gamma": 0.5, "label_smoothing": 0.1},
    "text dpo cross-entropy": {"loss": "dpo", "beta": 0.3, "cross_entropy": 0.5},
    "text simpo cross-entropy": {"loss": "simpo", "beta": 2.0, "gamma": 0.5, "cross_entropy": 0.3},
    "images dpo": {"loss": "dpo", "beta": 0.3},
    "images ipo": {"loss": "ipo", "beta": 0.2},
    "images ipo cross-entropy": {"loss": "ipo", "beta": 0.2, "cross_entropy": 2.0},
}


def has_images(case: str) -> bool:
    return case.startswith("images")


def save_models(folder: Path, case: str) -> tuple[Path, Path]:
    """Writes a model and a reference, which is the model with noise added to its weights; returns their folders."""
    torch.manual_seed(55)
    start, reference = folder / "start", folder / "reference"
    kind: Any = SmolVLMForConditionalGeneration if has_images(case) else AutoModelForCausalLM
    if has_images(case):
        saved_image_text(start, "smolvlm")
        (start / "chat_template.jinja").write_text(IMAGE_TEMPLATE)
    else:
        tokenizer = tokenizer_of("chatml")
        tokenizer.chat_template = TEXT_TEMPLATE
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 40, "max_position_embeddings": 512, "vocab_size": len(tokenizer)}
        config = LlamaConfig(**sizes, **ids)  # without padding, whose embedding would get no gradient
        save_parts(start, (tokenizer, wide(LlamaForCausalLM(config), std=0.1, norms="RMSNorm")))
    model = kind.from_pretrained(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += NOISE * parameter.abs().mean() * torch.randn_like(parameter)
    model.save_pretrained(reference)
    for path in start.iterdir():
        if not (reference / path.name).exists():
            (reference / path.name).write_bytes(path.read_bytes())
    return start, reference


def make_records(case: str) -> list[Record]:
    """Records of one pair or two, whose answers and prompts have different lengths."""
    records = []
    for number in range(4):
        turns = [("user", f"what is {number}?"), ("assistant", "a cat"), ("user", "are you sure that it is?")]
        first = Preference(tuple(turns[: 1 if number % 2 else 3]), f"a red circle {number}", "a dog")
        second = Preference((("user", "and what else?"),), "it is a cross", f"maybe a blue square of {number} sides")
        record = Record(str(number), {"pairs": [first, second][: 1 + (number < 2)]})
        if has_images(case):
            record.open_image = partial(picture, number)
        records.append(record)
    return records


def build_task(start: Path, reference: Path, case: str) -> Preferences:
    """Our task of a case, with the model of a folder."""
    loaded = read(str(start))
    about, options = loaded["vlm"], dict(CASES[case])
    preprocess = Preprocess.from_state(about["preprocess"]) if has_images(case) else None
    field = PreferencePromptField(
        tokenizer=tokenizer_from_state(about["tokenizer"]),
        max_len=512,
        path=str(start),
        states=about["form"]["states"] or None,
        preprocess=preprocess,
    )
    field.restore(about)
    fields: dict[str, Field] = {"pairs": field}
    if preprocess is not None:
        fields["images"] = ImageViewsField(preprocess=preprocess)
    options |= {} if options["loss"] == "simpo" else {"reference": str(reference)}
    return Preferences(model=load_model(loaded).train(), fields=fields, seed=0, max_tokens=8, **options)


def make_batch(task: Preferences, records: list[Record]) -> Batch:
    values = {
        name: field.collate([field.encode(record, (0, 0, 0)) for record in records])
        for name, field in task.fields.items()
    }
    return Batch([record.id for record in records], values, [])


def compute(task: Preferences, records: list[Record]) -> dict[str, Any]:
    """Mean loss, mean rewards and gradients of a batch by our task."""
    terms = task.loss(make_batch(task, records)).values()
    loss = sum((term.weight * term.total / term.count for term in terms), torch.zeros(()))
    loss.backward()
    gradients = {f"model.{name}": parameter.grad for name, parameter in task.model.named_parameters()}
    zero = {name: torch.zeros(1) for name, grad in gradients.items() if grad is None}
    return {
        "loss": loss.item(),
        "rewards": torch.cat(task._rewards).mean(0).tolist(),
        "gradients": summarise({**gradients, **zero}),
    }


def to_rows(records: list[Record]) -> list[dict[str, Any]]:
    """The pairs in TRL's form, one per row."""
    return [
        {
            "prompt": [{"role": role, "content": text} for role, text in pair.prompt],
            "chosen": [{"role": "assistant", "content": pair.chosen}],
            "rejected": [{"role": "assistant", "content": pair.rejected}],
            **({"images": record.images()} if record.open_image else {}),
        }
        for record in records
        for pair in record["pairs"]
    ]


def read_gradients(model: Any, start: Path, folder: Path) -> dict[str, Tensor]:
    """The gradients of transformers' model of a folder, by our names: they are stored as if they were weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    folder.mkdir()
    for path in start.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    model.save_pretrained(folder)
    return dict(read(str(folder))["state_dict"])
