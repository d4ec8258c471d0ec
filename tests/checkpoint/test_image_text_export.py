"""Models that read images inside their prompts, exported: transformers computes the same as before and as we do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from hugging import photos, saved, wide
from image_text import MODELS, byte_pairs, pieces, saved_image_text
from PIL import Image

from vlm.checkpoint.file import write
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.images.image import Preprocess
from vlm.data.text.conversation import PLAIN, Turn
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.models.context import PLACE, interleave_states
from vlm.models.pretrained.architectures.vision_language import select_bucketed_positions, spread_bucketed_positions
from vlm.models.pretrained.load import open_folder
from vlm.data.text.hugging_face import read_tokenizer

QUESTIONS = [f"{word} {number}?" for word in ("what", "where", "how many dogs", "red") for number in range(4)]
CLASS_NAMES = ("llava_clip", "llava_full", "llava_siglip", "idefics3", "smolvlm", "smolvlm_tiles", "paligemma")


def their_inputs(processor: Any, path: str, question: str) -> Any:
    text = f"<image>answer en {question}"
    if processor.chat_template is not None:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=text, images=[Image.open(path).convert("RGB")], return_tensors="pt")


def load(folder: Path) -> tuple[Any, Any]:
    model, report = t.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), t.AutoProcessor.from_pretrained(folder)


@pytest.mark.sample(plain=2, slow=7)
@torch.no_grad()
@pytest.mark.parametrize("name", CLASS_NAMES)
def test_a_folder_is_equal_after_import_and_export(tmp_path: Path, name: str) -> None:
    """Inputs, logits and greedy texts of 16 prompts."""
    torch.manual_seed(5)
    original, their_processor = saved_image_text(tmp_path / "theirs", name)
    assert command(["export", str(tmp_path / "ours"), "-c", str(tmp_path / "theirs"), "--to", "huggingface"]) == 0
    model, processor = load(tmp_path / "ours")
    their_processor = t.AutoProcessor.from_pretrained(tmp_path / "theirs")
    assert type(model) is type(original) and type(processor) is type(their_processor)
    assert processor.chat_template == their_processor.chat_template
    paths = photos(tmp_path / "photos")
    texts = set()
    for place, question in enumerate(QUESTIONS):
        path = paths[place % len(paths)]
        given, expected = (their_inputs(one, path, question) for one in (processor, their_processor))
        assert given.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(given[key], expected[key], rtol=0, atol=1e-6)
        torch.testing.assert_close(model(**given).logits, original(**expected).logits, rtol=1e-4, atol=1e-4)
        rows = [one.generate(**given, do_sample=False, max_new_tokens=6)[0].tolist() for one in (model, original)]
        assert rows[0] == rows[1]
        texts.add(tuple(rows[0][given["input_ids"].shape[1] :]))
    assert len(texts) > 1


@pytest.mark.parametrize("count", [13, 14, 26, 27, 32])
def test_positions_of_idefics3_are_those_that_it_selects(count: int) -> None:
    torch.manual_seed(0)
    for shuffle in (1, count if count == 13 else 2 if count % 2 == 0 else 3):
        positions = torch.randn(count**2, 4)
        table = spread_bucketed_positions(positions, count, shuffle)
        assert select_bucketed_positions(table, (count, count)).equal(positions)
        assert len(table) in (count**2, (count + shuffle) ** 2)
