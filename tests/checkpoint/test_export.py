"""Folders for others: transformers computes with its own classes what we compute, and we read them again."""

import json
import os
import subprocess
from pathlib import Path

import hugging
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from small import TASKS as SMALL

import vlm
from vlm.checkpoint.file import inference_weights, write
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.images.image import Preprocess
from vlm.data.text.hugging_face import check_tokens, make_tokenizer_files
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.folder import Folder
from vlm.models.vit import ViT

EXACT = {"device": "cpu", "precision": "fp32"}
TEXTS = [
    "a small red circle left of a blue cross",
    "Two dogs run, over the green grass!",
    "zwei Männer – 東京 \U0001f642 naïve",
    "  two  spaces\tand\nlines ",
]
SHIPPED = str(Path(__file__).parents[2] / "data" / "sample" / "captioner.ckpt")
BLOCK = {"dim": 24, "num_heads": 3, "mlp_ratio": 2.0, "activation": "gelu", "norm_eps": 1e-5}
IMAGES = {"image_size": 24, "patch_size": 8, "depth": 2, **BLOCK}


def tokenizer(kind: str):
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer(lowercase=True).fit(hugging.TEXTS)
    model_type, _, fallback = kind.partition("-")
    options = {"vocab_size": 320, "model_type": model_type, "byte_fallback": not fallback}
    return SentencePieceTokenizer(**(options | ({"vocab_size": 60} if fallback else {}))).fit(hugging.TEXTS)


def captioner(folder: Path, *, kind: str = "bpe", token: bool = False, resize: str = "crop", **changes) -> Path:
    """A random captioner of ours as a checkpoint."""
    torch.manual_seed(1)
    own = tokenizer(kind)
    own.add_languages(changes.get("languages", ()))
    encoder = IMAGES | {"class_token": token} | changes.get("encoder", {})
    decoder = {"vocab_size": own.vocab_size, "max_len": 16, "depth": 2, "context_dim": encoder["dim"], **BLOCK}
    decoder |= changes.get("decoder", {})
    model = hugging.wide(VisionLanguageModel(encoder=ViT(**encoder), decoder=Decoder(**decoder)), std=0.4)
    model.decoder.positions.weight.data *= 4  # or a random model repeats one token
    for block in model.decoder.blocks:
        block.cross_attn.proj.weight.data *= 20  # or it writes the same of all images
    spec = {"encoder": {"name": "ViT", "args": encoder}, "decoder": {"name": "Decoder", "args": decoder}}
    about = {
        "task": "captioning",
        "model": {"name": "VisionLanguageModel", "args": spec},
        "tokenizer": own.state(),
        "preprocess": Preprocess(image_size=encoder["image_size"], resize=resize, crop=changes.get("crop")).state(),
        "max_tokens": 14,
        "scores": {"val/cider": 1.25, "val/cider@low": 1.0, "val/cider@high": 1.5, "val/cider@shuffled": 0.25},
        "origin": "test",
    }
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    path = folder / "captioner.ckpt"
    write(path, {"format": 2, "vlm": about, "state_dict": state, "global_step": 0, "epoch": -1})
    return path


def theirs(folder: Path, paths: list[str]) -> tuple[list[list[int]], list[str]]:
    """The tokens that transformers writes of some photos, by the files of a folder alone, and their texts."""
    model = transformers.VisionEncoderDecoderModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = processor([Image.open(path).convert("RGB") for path in paths], return_tensors="pt")
    rows = model.generate(**pixels)
    ids = [[id for id in row if id not in own.all_special_ids] for row in rows.tolist()]
    return ids, own.batch_decode(rows, skip_special_tokens=True)


def even(path: str) -> bool:
    """True for a photo with an even margin around its centre: theirs cut half a pixel less of an odd one."""
    with Image.open(path) as image:
        return int(24 * max(image.size) / min(image.size)) % 2 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token": True},
        {"token": True, "resize": "squash", "kind": "unigram"},
        {"kind": "bytes", "resize": "squash", "crop": 0.8},
        {"kind": "unigram", "decoder": {"activation": "gelu_tanh"}, "encoder": {"activation": "relu"}},
        {"token": True, "encoder": {"dim": 12}, "kind": "unigram-bare"},
        {"token": True, "resize": "squash", "encoder": {"image_size": [16, 40]}},
    ],
    ids=str,
)
def test_transformers_writes_what_we_write(tmp_path: Path, options: dict) -> None:
    path, folder = captioner(tmp_path, **options), tmp_path / "out"
    assert command(["export", str(folder), "-c", str(path), "--to", "huggingface"]) == 0
    ours = load_model(read(path))
    other = transformers.VisionEncoderDecoderModel.from_pretrained(folder).eval()
    size = options.get("encoder", {}).get("image_size", [24, 24])
    images, tokens = torch.randn(3, 3, *size), torch.randint(3, ours.decoder.token_embed.num_embeddings, (3, 9))
    with torch.no_grad():
        expected = ours.head(ours(images, tokens))
        found = other(pixel_values=images, decoder_input_ids=tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.manual_seed(2)  # a grey level of difference turns near ties of a random model
    photos = [path for path in hugging.photos(tmp_path / "photos", 9) if even(path)]
    assert len(photos) > 4
    model = vlm.load(path, **EXACT)
    written, (ids, texts) = model.caption(photos), theirs(folder, photos)
    assert len({one.text for one in written}) > 1
    assert [[token for token in one.tokens if token > 3] for one in written] == ids
    whole = [(one.text, text) for one, text in zip(written, texts, strict=True) if "\ufffd" not in one.text]
    assert all(one == text for one, text in whole)  # broken characters are counted in two ways
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    preprocess = Preprocess.from_state(read(path)["vlm"]["preprocess"])
    for photo in photos:
        image = Image.open(photo).convert("RGB")
        pixels = processor(image, return_tensors="pt").pixel_values[0]
        same = preprocess.normalize(preprocess(image)[None])[0]
        levels = (pixels - same).abs().amax() * 255 * 0.5
        assert levels <= 1.01


@pytest.mark.slow
def test_a_captioner_of_several_languages_writes_in_its_first_one_there(tmp_path: Path) -> None:
    path, folder = captioner(tmp_path, kind="unigram", languages=["de", "en"]), tmp_path / "out"
    assert command(["export", str(folder), "-c", str(path), "--to", "huggingface"]) == 0
    photos = [path for path in hugging.photos(tmp_path / "photos", 9) if even(path)]
    ours, again = vlm.load(path, **EXACT), vlm.load(folder, **EXACT)
    german, english = (ours.caption(photos, language=language) for language in ("de", "en"))
    assert [one.text for one in german] != [one.text for one in english]
    ids, texts = theirs(folder, photos)
    assert ids == [[token for token in one.tokens if token > 3] for one in german]
    assert all(ours.text == text for ours, text in zip(german, texts, strict=True) if "\ufffd" not in ours.text)
    for language, captions in ((None, german), ("de", german), ("en", english)):
        assert [one.tokens for one in again.caption(photos, language=language)] == [one.tokens for one in captions]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes", "char", "bpe-bare", "unigram-bare"])
def test_tokenizers_give_the_same_ids_and_texts(tmp_path: Path, kind: str) -> None:
    own = tokenizer(kind)
    for name, text in make_tokenizer_files(own).items():
        (tmp_path / name).write_text(text)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(other) == own.vocab_size
    for text in [*hugging.TEXTS, *TEXTS]:
        ids = own.encode(text)
        assert other(text, add_special_tokens=False).input_ids == ids
        if "bare" not in kind:
            assert other.decode(ids, skip_special_tokens=True) == own.decode(ids)
    assert (other.pad_token_id, other.bos_token_id, other.eos_token_id) == (own.pad_id, own.bos_id, own.eos_id)
    (tmp_path / "config.json").write_text('{"model_type": "vision-encoder-decoder"}')
    check_tokens(Folder(str(tmp_path)), own)  # a training may start from the folder with it
    with pytest.raises(UserError, match="choose the tokenizer that the weights were trained with"):
        check_tokens(Folder(str(tmp_path)), CharTokenizer(lowercase=False).fit(["zyx"]))


@pytest.mark.parametrize("kind, names", [("class", True), ("mean", False)])
def test_classifiers_give_equal_logits(tmp_path: Path, kind: str, names: bool) -> None:
    encoder = IMAGES | {"class_token": names}
    model = hugging.wide(Classifier(encoder=ViT(**encoder), num_classes=3, pool=kind))
    args = {"encoder": {"name": "ViT", "args": encoder}, "num_classes": 3, "pool": kind}
    about = {"task": "classification", "model": {"name": "Classifier", "args": args}, "scores": {}, "origin": "test"}
    about |= {"preprocess": Preprocess(image_size=24).state(), "classes": ["a", "b c", "d"]}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    write(tmp_path / "one.ckpt", {"format": 2, "vlm": about, "state_dict": state, "global_step": 0, "epoch": -1})
    assert command(["export", str(tmp_path / "out"), "-c", str(tmp_path / "one.ckpt")]) == 0
    other = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    images = torch.randn(4, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(other(images).logits, model(images), atol=1e-4, rtol=0)
    assert other.config.id2label == {0: "a", 1: "b c", 2: "d"}
    before, after = inference_weights(read(tmp_path / "one.ckpt")), inference_weights(read(tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_language_models_give_equal_logits(tmp_path: Path) -> None:
    path = Path(__file__).with_name("files") / "language_modeling.ckpt"
    assert command(["export", str(tmp_path / "out"), "-c", str(path)]) == 0
    ours = vlm.load(path, **EXACT)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = own("A large", return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        module = ours.module
        torch.testing.assert_close(other(**tokens).logits, module.head(module(tokens.input_ids)), atol=1e-4, rtol=0)
    written = own.decode(other.generate(**tokens, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True)
    assert written == "A large" + ours.generate("A large", max_tokens=20, sample=False).text
    assert command(["generate", "-c", str(tmp_path / "out"), "--prompt", "A large", "--device", "cpu"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("token, width", [(True, 24), (False, 12)])
def test_what_goes_out_comes_in_again_bitwise(tmp_path: Path, token: bool, width: int) -> None:
    path = captioner(tmp_path, token=token, encoder={"dim": width})
    photos = hugging.photos(tmp_path / "photos", 3)
    expected = vlm.load(path, **EXACT).caption(photos)
    for form in ("huggingface", "safetensors"):
        assert command(["export", str(tmp_path / form), "-c", str(path), "--to", form]) == 0
        before, after = inference_weights(read(path)), inference_weights(read(tmp_path / form))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert vlm.load(tmp_path / form, **EXACT).caption(photos) == expected
        assert not [*(tmp_path / form).glob("*.bin"), *(tmp_path / form).glob("*.ckpt")]


@pytest.mark.parametrize("task", [task for task in SMALL if task not in ("thermometer", "preferences")])
def test_every_task_leaves_as_safetensors_and_comes_again(tmp_path: Path, task: str) -> None:
    path = Path(__file__).with_name("files") / f"{task}.ckpt"
    assert command(["export", str(tmp_path / "out"), "-c", str(path), "--to", "safetensors"]) == 0
    before, after = read(path), read(tmp_path / "out")
    one, other = inference_weights(before), inference_weights(after)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert json.dumps(after["vlm"], sort_keys=True) == json.dumps(before["vlm"], sort_keys=True)
    assert command(["info", "-c", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Scores" in card and "licence is not recorded" in card and str(tmp_path) not in card


ACTIVATIONS = "not one of relu, gelu, gelu_tanh, quick_gelu"
WIDER = {"encoder": {"dim": 36}, "decoder": {"context_dim": 36}}


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"encoder": {"num_kv_heads": 1}}, "model.encoder.num_kv_heads is 1, not None"),
        ({"encoder": {"norm": "rms"}}, "model.encoder.norm is rms, not layer"),
        ({"decoder": {"activation": "swiglu"}}, f"model.decoder.activation is swiglu, {ACTIVATIONS}"),
        ({"decoder": {"bias": False}}, "model.decoder.bias is False, not True"),
        (WIDER, "model.encoder.dim: 36 exceeds the decoder's 24"),
        ({"resize": "pad"}, "data.preprocess.resize: pad, with a grey border, has no equivalent"),
        ({"encoder": {"image_size": [16, 40]}}, "model.encoder.image_size is [16, 40], not a square"),
        ("tagging", "model: transformers has no class for this model (TokenClassifier of TextEncoder)"),
    ],
)
def test_what_no_class_computes_is_refused_by_its_key(tmp_path: Path, capsys, changes: dict | str, line: str) -> None:
    stored = Path(__file__).with_name("files") / f"{changes}.ckpt"
    path = stored if isinstance(changes, str) else captioner(tmp_path, **changes)
    assert command(["export", str(tmp_path / "out"), "-c", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}") and "--to safetensors" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_default_captioner_goes_out(tmp_path: Path) -> None:
    sample, folder = Path(__file__).parents[2] / "data" / "sample", tmp_path / "out"
    assert command(["export", str(folder), "-c", str(sample / "captioner.ckpt")]) == 0
    scenes = sorted(map(str, sample.glob("*.png")))
    ours = [one.text for one in vlm.load(sample / "captioner.ckpt", **EXACT).caption(scenes)]
    assert [text.strip() for text in theirs(folder, scenes)[1]] == ours


def test_faults_of_folders_are_lines(tmp_path: Path, capsys) -> None:
    path = captioner(tmp_path)
    assert command(["export", str(tmp_path), "-c", str(path)]) == 2
    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert command(["export", str(tmp_path / "out"), "-c", str(path), "--to", "tflite"]) == 2
    known = "huggingface, safetensors, gguf, peft, onnx or pt2"
    assert f"--to: 'tflite' is unknown; choose {known}" in capsys.readouterr().err
    assert command(["export", str(tmp_path / "out"), "-c", str(path), "--to", "safetensors"]) == 0
    for damage in ("{", '{"format": 2}', "[]"):
        (tmp_path / "out" / "vlm.json").write_text(damage)
        assert command(["info", "-c", str(tmp_path / "out")]) == 2
        assert "vlm.json: cannot be read" in capsys.readouterr().err


def test_numbers_that_torch_cannot_sum_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    path, out, name = captioner(tmp_path), tmp_path / "out", "encoder.norm.bias"
    assert command(["export", str(out), "-c", str(path), "--to", "safetensors"]) == 0
    tensors = load_file(out / "model.safetensors")

    def write_filled(bits: int, dtype: torch.dtype) -> Path:
        numbers = torch.full(tensors[name].shape, bits, dtype=torch.uint8).view(dtype)
        save_file(tensors | {name: numbers}, out / "model.safetensors")
        return out

    ones = load_model(read(write_filled(0x38, torch.float8_e4m3fn))).encoder.norm.bias
    assert torch.equal(ones, torch.ones(len(ones)))
    with pytest.raises(UserError, match=r"out: its weights are not finite numbers \(model\.encoder\.norm\.bias\).*$"):
        read(write_filled(0x7F, torch.float8_e4m3fn))  # NaN
    with pytest.raises(UserError, match=r"out: is not a valid checkpoint of vlm.*$"):
        read(write_filled(0x22, torch.float4_e2m1fn_x2))  # two in a byte


def test_the_card_has_the_command_that_was_run_without_folders_of_this_machine(tmp_path: Path) -> None:
    typed = ["task=captioning", "data=captions", "data.root=/home/ada/my photos", "optim.lr=1e-3", "resume=x`\n```", 7]
    older, newer = Path(__file__).with_name("files") / "captioning.ckpt", tmp_path / "newer.ckpt"
    loaded = read(older)
    loaded["vlm"]["typed"] = typed
    write(newer, loaded)
    for path, name in ((newer, "out"), (older, "older")):
        assert command(["export", str(tmp_path / name), "-c", str(path), "--to", "safetensors"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    (line,) = (line for line in card.split("\n") if "vlm train" in line)
    shown = [text.replace("/home/ada/", ".../") for text in map(str, typed)]
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == ["vlm", "train", *shown] and "ada" not in card
    assert "vlm train" not in (tmp_path / "older" / "README.md").read_text()


def test_the_card_has_the_scores_with_intervals_and_controls(tmp_path: Path) -> None:
    path = captioner(tmp_path)
    assert command(["export", str(tmp_path / "out"), "-c", str(path)]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| metric | model | low | high | shuffled |" in card
    assert "| cider | 1.2500 | 1.0000 | 1.5000 | 0.2500 |" in card
    assert np.isclose(
        sum(one.numel() for one in inference_weights(read(path)).values()),
        float(card.partition("parameters: ")[2].split("\n")[0].replace(",", "")),
    )


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert command(["export", str(tmp_path / "out"), "-c", SHIPPED]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("size", ["4k", "300k"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, size: str, capsys) -> None:
    """There is no room for the small files, or for the weights alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        assert command(["export", str(disk / "out"), "-c", SHIPPED]) == 1
        assert capsys.readouterr().err.startswith(f"error: {disk / 'out'}: cannot be written (")
        assert list((disk / "out").iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
