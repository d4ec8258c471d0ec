"""T5 and TrOCR, imported and exported again: transformers computes the same, and vlm reads the folder again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from hugging import photos, saved_trocr
from PIL import Image
from translators import saved_t5

from vlm.checkpoint.load import read
from vlm.cli.main import run as command

V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1}
WORDS = ["a man", "two dogs run", "the big brown cat", "red", "a rock ."]
PROMPTS = [f"{first} {second}" for first in WORDS[:4] for second in WORDS[1:]]


def export(source: Path, folder: Path) -> None:
    assert command(["export", str(folder), "-c", str(source), "--to", "huggingface"]) == 0
    state, again = read(source)["state_dict"], read(folder)["state_dict"]
    assert state.keys() == again.keys() and all(tensor.equal(again[name]) for name, tensor in state.items())


def load(kind: Any, folder: Path) -> Any:
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, V11], ids=["1.0", "1.1"])
def test_t5_computes_the_same_after_import_and_export(tmp_path: Path, options: dict[str, Any]) -> None:
    """Logits and greedy texts of 16 prompts."""
    torch.manual_seed(2)
    model, tokenizer = saved_t5(tmp_path / "theirs", **options)
    export(tmp_path / "theirs", tmp_path / "ours")
    ours = load(t.AutoModelForSeq2SeqLM, tmp_path / "ours")
    texts = set()
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        start = torch.tensor([[model.config.decoder_start_token_id, 5, 9]])
        logits = [one(**given, decoder_input_ids=start).logits for one in (ours, model)]
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        rows = [one.generate(**given, do_sample=False, num_beams=1, max_new_tokens=6).tolist() for one in (ours, model)]
        assert rows[0] == rows[1]
        texts.add(tuple(rows[0][0]))
    assert len(texts) > 1


@torch.no_grad()
@pytest.mark.parametrize("small", [False, True])
def test_trocr_computes_the_same_after_import_and_export(tmp_path: Path, small: bool) -> None:
    """Logits and greedy texts of 16 images."""
    torch.manual_seed(2)
    model, *_ = saved_trocr(tmp_path / "theirs", small=small)
    export(tmp_path / "theirs", tmp_path / "ours")
    ours = load(t.VisionEncoderDecoderModel, tmp_path / "ours")
    if small:  # from_pretrained leaves the sinusoids of any such folder on "meta"
        positions = ours.decoder.model.decoder.embed_positions
        positions.weights = model.decoder.model.decoder.embed_positions.weights
        assert positions.padding_idx == model.decoder.model.decoder.embed_positions.padding_idx
    processors = [t.AutoImageProcessor.from_pretrained(tmp_path / name) for name in ("ours", "theirs")]
    start = torch.tensor([[model.generation_config.decoder_start_token_id or 2, 5, 9]])
    paths = photos(tmp_path / "photos")
    upright = [Image.open(path).convert("RGB") for path in paths]
    images = [*upright, *(image.rotate(180) for image in upright)]
    texts = set()
    for image in images[:16]:
        pixels = [one(image, return_tensors="pt").pixel_values for one in processors]
        torch.testing.assert_close(*pixels, rtol=0, atol=1e-6)
        logits = [one(pixel_values=pixels[0], decoder_input_ids=start).logits for one in (ours, model)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": 6}
        rows = [one.generate(pixel_values=pixels[0], **options).tolist() for one in (ours, model)]
        assert rows[0] == rows[1]
        texts.add(tuple(rows[0][0]))
    assert len(texts) > 1
