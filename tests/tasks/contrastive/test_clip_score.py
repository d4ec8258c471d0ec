"""CLIPScore against its formula, computed with transformers' CLIPModel."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.tasks.contrastive.predict import ImageRetriever, clip_scores

CAPTIONS = {"1": "A Red circle", "2": "two dogs run", "3": "word " * 40}
WORDS = ["a", "photo", "depicts", "red", "circle", "two", "dogs", "run", "word"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, images):
    """A CLIP of random weights, with a tokenizer of whole words and a processor."""
    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    ends = {"bos_token_id": 9, "eos_token_id": 10, "pad_token_id": 10}
    text = tower | ends | {"vocab_size": 11, "max_position_embeddings": 12}
    vision = tower | {"hidden_size": 24, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, 0.5, 0.5)
    model.save_pretrained(path)
    CLIPImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}).save_pretrained(path)
    vocab = {word: n for n, word in enumerate([*WORDS, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="word"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("<|endoftext|>", 10), ("<|startoftext|>", 9))
    tokenizer.save(str(path / "tokenizer.json"))
    if not all(truth(path, images).values()):  # the cosines of such weights have one sign, here that above 0
        model.text_projection.weight.data.neg_()
        model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    for name in CAPTIONS:
        Image.effect_noise((60, 44), 30 * int(name)).convert("RGB").save(path / f"{name}.png")
    return path


def truth(folder, images):
    """2.5 * max(cos, 0), of one image at a time."""
    model = CLIPModel.from_pretrained(folder).eval()
    processor = CLIPImageProcessor.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(12)
    scores = {}
    for name, caption in CAPTIONS.items():
        pixels = processor(Image.open(images / f"{name}.png"), return_tensors="pt").pixel_values
        ids = torch.tensor([tokenizer.encode(f"A photo depicts {caption}").ids])
        with torch.no_grad():
            out = model(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids))
        cosine = torch.cosine_similarity(out.text_embeds, out.image_embeds).item()
        scores[name] = 2.5 * max(cosine, 0.0)
    return scores


def test_is_the_formula_with_transformers_model(folder, images, tmp_path):
    expected, files = truth(folder, images), {name: images / f"{name}.png" for name in CAPTIONS}
    scores = clip_scores(str(folder), CAPTIONS, files)
    assert scores == pytest.approx(expected, abs=2e-3)  # resized pixels differ by one in 255
    assert min(expected.values()) > 0 and len({round(value, 4) for value in expected.values()}) > 1
    shutil.copytree(folder, tmp_path / "negative")
    path = tmp_path / "negative" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"text_projection.weight": -tensors["text_projection.weight"]}, path)
    assert set(clip_scores(str(path.parent), CAPTIONS, files).values()) == {0.0}  # a negative cosine counts as 0


def test_the_command_scores_files(folder, images, tmp_path, capsys):
    results = [{"image_id": int(name), "caption": caption} for name, caption in CAPTIONS.items()]
    notes = {"images": [{"id": int(name), "file_name": f"{name}.png"} for name in CAPTIONS], "annotations": results}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "references.json").write_text(json.dumps(notes))
    files = [str(tmp_path / "results.json"), str(tmp_path / "references.json"), "--no-java", "--format", "json"]
    assert vlm(["score", *files, "--clip", str(folder), "--images", str(images), "--per-image"]) == 0
    scores = json.loads(capsys.readouterr().out)
    expected = truth(folder, images)
    assert scores["clipscore"] == pytest.approx(sum(expected.values()) / 3, abs=2e-3)
    assert scores["per_image"]["2"]["clipscore"] == pytest.approx(expected["2"], abs=2e-3)
    assert vlm(["score", *files, "--clip", str(folder), "--images", str(tmp_path)]) == 2
    assert "1.png: no such image" in capsys.readouterr().err
    assert vlm(["score", *files, "--clip", str(folder)]) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.update(projection_dim=17), "projection.weight is"),
        (lambda config: config["text_config"].update(hidden_size=10**9), "text_config.hidden_size is 1000000000, not"),
        (lambda config: config["vision_config"].update(hidden_act="wave"), "vision_config.hidden_act is 'wave', not"),
    ],
    ids=["projection", "giant", "activation"],
)
def test_a_folder_that_does_not_fit_is_a_line(folder, tmp_path, change, words):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        ImageRetriever(str(tmp_path))
