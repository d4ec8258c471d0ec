"""Zero-shot classes and ranked images of the tiny checkpoint; CLIPScore against transformers' CLIPModel."""

import json
import shutil

import pytest
import tiny_checkpoints as tiny
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from vlm.cli.main import run as vlm
from vlm.data.images.image import load_image
from vlm.errors import UserError
from vlm.tasks.classification.predict import Classes, classes_record
from vlm.tasks.contrastive.predict import DualClassifier, ImageRetriever, clip_scores

PATH, CLASSIFIER = (str(tiny.FILES / f"{task}.ckpt") for task in ("contrastive", "classification"))
LABELS = ["red circle", "blue cross", "green triangle"]
PROMPTS = ["a small {}", "a large {} left of a {}"]
EXACT = ["-c", PATH, *tiny.EXACT]


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def encoder():
    return DualClassifier(PATH)


def flags(flag, values):
    return [part for value in values for part in (flag, value)]


def test_probabilities_are_those_of_the_classes_mean_embeddings(encoder, capsys):
    options = [*flags("--prompt", PROMPTS), *flags("--label", LABELS), "--top", "3"]
    assert vlm(["classify", *tiny.IMAGES, *options, *EXACT]) == 0
    found = lines(capsys)
    heads = []
    for label in LABELS:
        each = torch.cat([encoder.embed_texts([prompt.replace("{}", label)]) for prompt in PROMPTS])
        torch.testing.assert_close(each.norm(dim=1), torch.ones(2))
        heads.append(F.normalize(each.mean(0), dim=0))
    for path, record in zip(tiny.IMAGES, found, strict=True):
        image = encoder.embed_images([encoder.pixels(load_image(path))])[0]
        truth = (encoder.model.scale.detach() * torch.stack(heads) @ image).softmax(0).tolist()
        assert [record["top"][label] for label in LABELS] == pytest.approx(truth, abs=1e-5)
        assert record["image"] == path and record["class"] == max(LABELS, key=record["top"].__getitem__)


def test_classes_may_stand_in_a_file_and_one_that_is_named_again_counts_once(tmp_path, capsys):
    (tmp_path / "names.txt").write_text("\n".join(LABELS) + "\n")
    found = []
    for options in (
        flags("--label", LABELS),
        flags("--label", LABELS * 2),
        ["--labels", str(tmp_path / "names.txt")],
    ):
        assert vlm(["classify", *tiny.IMAGES, *options, *EXACT]) == 0
        found.append(lines(capsys))
    assert found[0] == found[1] == found[2]


def test_probabilities_of_classes_of_one_name_are_summed():
    best = Classes("b", 0.4, (("b", 0.4), ("a", 0.25), ("a", 0.25)))
    assert classes_record("jsonl", {}, best)["top"] == {"b": 0.4, "a": 0.5}


@pytest.mark.parametrize("count", [2, 10])
def test_images_are_ranked_by_their_similarity_to_each_text(count, encoder, capsys):
    texts = ["a small red circle", "a large blue cross"]
    assert (
        vlm(["retrieve", *tiny.IMAGES, *flags("--text", texts), "--top", str(count), "--batch-size", "2", *EXACT]) == 0
    )
    found = lines(capsys)
    assert [record["text"] for record in found] == [text for text in texts for _ in range(min(count, 3))]
    images = encoder.embed_images([encoder.pixels(load_image(path)) for path in tiny.IMAGES])
    for text in texts:
        products = dict(zip(tiny.IMAGES, (images @ encoder.embed_texts([text])[0]).tolist(), strict=True))
        own = [record for record in found if record["text"] == text]
        best = sorted(products, key=products.__getitem__, reverse=True)[:count]
        assert [record["image"] for record in own] == best
        similarities = [record["similarity"] for record in own]
        assert similarities == pytest.approx([products[image] for image in best], abs=1e-4)


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_ranked(tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert vlm(["retrieve", str(tmp_path / "bad.png"), *tiny.IMAGES, "--text", "a cross", *EXACT]) == 1
    said = capsys.readouterr()
    assert "bad.png" in said.err and len(said.out.splitlines()) == 3
    assert vlm(["retrieve", str(tmp_path / "bad.png"), "--text", "a cross", *EXACT]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["classify", *tiny.IMAGES], "--label: missing"),
        (["classify", *tiny.IMAGES, "--label", "x", "--prompt", "a photo"], "--prompt a photo: must contain {}"),
        (["classify", "--label", "x"], "IMAGES: missing"),
        (["classify", *tiny.IMAGES, "--label", "x", "--pair", "y"], "--pair: not supported by a model for contrastive"),
        (["predict", *tiny.IMAGES], "--label: missing"),
        (
            ["classify", *tiny.IMAGES, "--label", "x", "-c", CLASSIFIER],
            "--label: not supported by a model for classification",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_line(arguments, said, capsys):
    assert vlm([*arguments, *([] if "-c" in arguments else ["-c", PATH])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


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


@pytest.mark.slow
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
