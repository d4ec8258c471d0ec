"""Twenty steps of SGD on a small random SmolVLM, which are compared with another trainer's."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_text import MODELS, saved_image_text
from PIL import Image
from torch import Tensor

from vlm.checkpoint.load import load_model, read
from vlm.data.fields import ImageViewsField
from vlm.data.images.image import Preprocess
from vlm.data.records import Question, Record
from vlm.data.text.prompt_field import QuestionPromptField
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.training.step.losses import token_loss

STEPS, BATCH, RATE = 20, 2, 0.02
SIZES = ((64, 64), (100, 60), (60, 130))
COUNTS = (1, 2, 1, 3)
TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}:{% if m['role'] == 'assistant' %}"
    "{% generation %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<end_of_utterance>{% endgeneration %}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>{% endif %}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def picture(number: int) -> Image.Image:
    width, height = SIZES[number % len(SIZES)]
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8))


def save_start(folder: Path) -> None:
    """Writes the model that training starts from, with a template that marks what the assistant writes."""
    torch.manual_seed(53)
    saved_image_text(folder, "smolvlm_tiles")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def load_processor(folder: Path) -> Any:
    """The processor of the folder on Pillow's resizing, as ours."""
    torch.manual_seed(53)
    _, processor = MODELS["smolvlm_tiles"]()
    processor.chat_template = TEMPLATE
    return processor


def make_records() -> list[Record]:
    """A record of one conversation of two turns about one to three images per sample."""
    records = []
    for number in range(STEPS * BATCH):
        before = (("user", f"what is {number % 7}?"), ("assistant", f"a cat {number % 5}"))
        question = Question("and the color?", f"it is red {number % 3}", before=before)
        record = Record(str(number), {"questions": [question]})
        images = [partial(picture, 10 * number + at) for at in range(COUNTS[number % len(COUNTS)])]
        record.open_image, *record.open_more = images
        records.append(record)
    return records


def to_messages(record: Record) -> list[dict[str, Any]]:
    """The conversation as messages of transformers, with the images before the first text."""
    (question,) = record["questions"]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in question.turns]
    messages[0]["content"] = [{"type": "image"}] * len(record.images()) + messages[0]["content"]
    return messages


def train(folder: Path, records: list[Record]) -> dict[str, Tensor]:
    """Trains with our field, model and loss; returns the weights."""
    loaded = read(str(folder))
    about, model = loaded["vlm"], load_model(loaded).train()
    preprocess = Preprocess.from_state(about["preprocess"])
    field = QuestionPromptField(
        tokenizer=tokenizer_from_state(about["tokenizer"]),
        max_len=4000,
        path=str(folder),
        states=about["form"]["states"],
        preprocess=preprocess,
    )
    field.restore(about)
    images = ImageViewsField(preprocess=preprocess)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for at in range(0, len(records), BATCH):
        batch = records[at : at + BATCH]
        rows = field.collate([field.encode(record, (0, 0, 0)) for record in batch])
        pixels = preprocess.normalize(images.collate([images.encode(record, (0, 0, 0)) for record in batch]))
        hidden = model(pixels, rows.tokens, rows.segments, rows.image_states, rows.scored)
        total, count = token_loss(hidden, rows.targets, model.head_parts)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder by our names."""
    return dict(read(str(folder))["state_dict"])


def summarise(weights: dict[str, Tensor]) -> dict[str, list[float]]:
    """The norm and four evenly spaced values of each tensor."""
    short = {}
    for name, tensor in weights.items():
        flat = tensor.double().flatten()
        places = torch.linspace(0, len(flat) - 1, 4).round().long()
        short[name] = [round(value, 8) for value in (flat.norm().item(), *flat[places].tolist())]
    return short
