"""Training starts from weights of another run: those that fit are copied, all others are named."""

import json
import re

import pytest
import torch
from tiny_checkpoints import FILES
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from vlm.checkpoint.file import inference_weights, write
from vlm.checkpoint.load import read, read_base_weights
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.start import start_from
from vlm.checkpoint.stored import FORMAT
from vlm.cli.main import run as vlm
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer
from vlm.errors import UserError
from vlm.nn.image_size import sides

SIZES = {"dim": 8, "depth": 1, "num_heads": 2}


def vit(**changes):
    return {"name": "ViT", "args": {"image_size": 8, "patch_size": 4, **SIZES, **changes}}


def decoder(**changes):
    return {"name": "Decoder", "args": {"vocab_size": 259, "max_len": 6, **SIZES, **changes}}


def captioner(encoder=None, **changes):
    text = decoder(context_dim=8, **changes)
    return {"name": "VisionLanguageModel", "args": {"encoder": encoder or vit(), "decoder": text}}


def dual():
    texts = {"name": "TextEncoder", "args": {"vocab_size": 259, "max_len": 6, **SIZES}}
    return {"name": "DualEncoder", "args": {"encoder": vit(), "text_encoder": texts, "embed_dim": 8}}


def classifier(**changes):
    return {"name": "Classifier", "args": {"encoder": vit(**changes), "num_classes": 3}}


@pytest.fixture
def saved(tmp_path, scramble):
    """Writes a checkpoint of a specification in a run's folder; returns the folder and the weights."""

    def save(spec, tokenizer=None, size=None):
        model = scramble(rebuild(spec))
        state = model.state_dict()
        about = {"model": spec} | ({"tokenizer": tokenizer.state()} if tokenizer else {})
        about |= {"preprocess": {"image_size": size}} if size else {}
        content = {f"model.{name}": tensor for name, tensor in state.items()}
        write(tmp_path / "checkpoints" / "best.ckpt", {"format": FORMAT, "vlm": about, "state_dict": content})
        return str(tmp_path), state

    return save


def start_model(spec, places, tokenizer=None):
    torch.manual_seed(1)
    model = rebuild(spec)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lines = start_from(model, places, tokenizer)
    return model.state_dict(), fresh, lines


CROSS = "blocks.*.cross_attn (6 tensors), blocks.*.norm_cross (2 tensors)"
STARTS = [  # the model of the file, ours, the part that starts from it, what is taken, and what is said
    (captioner(), captioner(), "", "", "model$"),
    (classifier(), captioner(), "encoder", "encoder.", r"unused: head \(2 tensors\)$"),
    (captioner(), classifier(), "", "encoder.", r"unused: decoder \(.*unchanged: head \(2 tensors\)"),
    (dual(), classifier(), "", "encoder.", "unused: .*text_projection"),
    (dual(), classifier(), "encoder", "encoder.", "unused: .*text_projection"),
    (classifier(), dual(), "encoder", "encoder.", "unused: head"),
    (decoder(), captioner(), "decoder", "decoder.", f"decoder: not in the file, unchanged: {re.escape(CROSS)}$"),
]


@pytest.mark.parametrize(("old", "new", "part", "taken", "said"), STARTS)
def test_a_model_or_a_part_of_it_starts_from_that_of_another(old, new, part, taken, said, saved):
    place, theirs = saved(old)
    ours, fresh, lines = start_model(new, {part: f"{place}/checkpoints/best.ckpt" if part else place})
    if old["name"] == "Decoder":
        theirs = {f"decoder.{name}": tensor for name, tensor in theirs.items()}
    names = {name for name in ours if name.startswith(taken) and name in theirs}
    for name in ours:
        assert torch.equal(ours[name], theirs[name] if name in names else fresh[name]), name
    assert lines[0] == f"{place}/checkpoints/best.ckpt: {len(names)} tensors loaded for {part or 'model'}"
    assert re.search(said, "\n".join(sorted(lines)), re.DOTALL)


def test_weights_of_other_shapes_are_named_and_stay(saved):
    place, theirs = saved(captioner(max_len=9))
    ours, fresh, lines = start_model(captioner(), {"": place})
    assert torch.equal(ours["decoder.positions.weight"], fresh["decoder.positions.weight"])
    assert torch.equal(ours["decoder.norm.weight"], theirs["decoder.norm.weight"])
    assert "model: decoder.positions.weight is (6, 8), in the file (9, 8); not loaded" in lines
    # Five vectors are a grid of 2 x 2 after one token, and none without.
    place, _ = saved(vit(class_token=True))
    ours, fresh, lines = start_model(vit(image_size=12), {"": place})
    assert torch.equal(ours["positions.weight"], fresh["positions.weight"])
    assert "model: positions.weight is (9, 8), in the file (5, 8); not loaded" in lines


@pytest.mark.parametrize("pool", ["mean", "class"])
@pytest.mark.parametrize(
    ("old", "size"), [(8, 12), (8, 4), ([8, 16], [12, 40]), ([4, 16], 8), ([4, 16], [16, 4])], ids=str
)
def test_positions_of_images_of_another_size_are_interpolated(pool, old, size, saved):
    """As torchvision resizes an image of as many channels; the class token's position stays as it is."""
    spec = classifier() | {"args": classifier()["args"] | {"pool": pool}}
    spec["args"]["encoder"] = vit(class_token=pool == "class", image_size=old)
    place, theirs = saved(spec, size=old)
    spec["args"]["encoder"] = vit(class_token=pool == "class", image_size=size)
    ours, _, lines = start_model(spec, {"": place})
    name, before = "encoder.positions.weight", int(pool == "class")
    rows, columns = (side // 4 for side in sides(old))
    grid = theirs[name][before:].T.reshape(1, 8, rows, columns)
    resized = (
        resize(grid, [side // 4 for side in sides(size)], InterpolationMode.BICUBIC, antialias=False)[0].flatten(1).T
    )
    torch.testing.assert_close(ours[name][before:], resized)
    assert torch.equal(ours[name][:before], theirs[name][:before])
    assert all(torch.equal(ours[other], theirs[other]) for other in ours if other != name)
    shapes = f"{tuple(ours[name].shape)}, in the file {tuple(theirs[name].shape)}"
    assert lines[1:] == ([] if len(ours[name]) == len(theirs[name]) else [f"model: {name} is {shapes}; interpolated"])


@pytest.mark.parametrize("more", [0, 5])
def test_weights_of_tokens_with_other_ids_stay(more, saved):
    """As many of them, or more; the remedy is said."""
    place, theirs = saved(decoder(vocab_size=ByteTokenizer().vocab_size + more), ByteTokenizer(lowercase=True))
    ours, fresh, lines = start_model(decoder(), {"": place}, ByteTokenizer())
    assert torch.equal(ours["token_embed.weight"], fresh["token_embed.weight"])
    at = lines.index("model: token_embed.weight belongs to another tokenizer in the file; not loaded")
    path = f"{place}/checkpoints/best.ckpt"
    assert lines[at + 1] == f"  to keep that tokenizer, set tokenizer=pretrained tokenizer.path={path}"
    ours, _, _ = start_model(decoder(), {"": place}, ByteTokenizer(lowercase=True))
    assert more or torch.equal(ours["token_embed.weight"], theirs["token_embed.weight"])


@pytest.mark.parametrize(
    ("spec", "part", "said"),
    [(captioner(dim=16, num_heads=4), "", "no weight in"), (classifier(), "decoder", "no weight in")],
)
def test_a_file_of_which_nothing_fits_is_refused_in_a_line(spec, part, said, saved):
    place, _ = saved(vit(dim=12, depth=2) if part else decoder(dim=12))
    model = rebuild(captioner()) if part else rebuild(classifier())
    with pytest.raises(UserError, match=rf"^model\.{f'{part}.' if part else ''}init_from: {said}") as caught:
        start_from(model, {part: place})
    assert "\n" not in str(caught.value)


def test_a_part_that_the_model_lacks_and_a_file_that_is_absent_are_refused(saved, tmp_path):
    place, _ = saved(decoder())
    with pytest.raises(UserError, match=r"model\.encoder\.init_from: the model has no encoder"):
        start_from(rebuild(decoder()), {"encoder": place})
    with pytest.raises(UserError, match="no such checkpoint"):
        start_from(rebuild(decoder()), {"": "nowhere"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"it has neither config\.json .*give a run's folder, or a \.ckpt file"):
        start_from(rebuild(vit()), {"": str(tmp_path / "empty")})


# A Hugging Face folder whose tokens have other ids


def folder(path, pieces, name):
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 0, "content": "<pad>"}]}
    content = {"tokenizer.json": tokenizer, "vocab.json": vocabulary}.get(name)
    (path / name).write_text(json.dumps(content) if content else "\n".join(pieces))
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return str(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "vocab.txt"])
def test_a_tokenizer_of_equal_size_with_other_ids_is_refused(name, tmp_path):
    tokenizer = CharTokenizer().fit(["abc de"])
    pieces = ["<pad>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcde"]
    assert len(pieces) == tokenizer.vocab_size
    same = folder(tmp_path, pieces, name)
    model = rebuild(decoder(vocab_size=len(pieces)))
    with pytest.raises(UserError, match="holds a bert for a TextEncoder"):  # the tokens were let pass
        start_from(model, {"": same}, tokenizer)
    pieces[-2:] = pieces[:-3:-1]
    with pytest.raises(UserError, match=rf"model\.init_from: token 263 is 'e' in .*{name}, but 'd' in this run"):
        start_from(model, {"": folder(tmp_path, pieces, name)}, tokenizer)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match="holds a bert for a TextEncoder"):  # without a tokenizer, too
        start_from(model, {"": same}, tokenizer)


def test_an_exported_folder_is_taken_as_the_checkpoint_that_it_was(tmp_path):
    path = FILES / "classification.ckpt"
    assert vlm(["export", str(tmp_path / "out"), "-c", str(path), "--to", "safetensors"]) == 0
    model = read(path)["vlm"]["model"]
    state, fresh, _ = start_model(model, {"": str(tmp_path / "out")})
    assert all(torch.equal(state[name], tensor) for name, tensor in inference_weights(read(path)).items())
    tensors = read_base_weights(rebuild(model), "", tmp_path / "out")  # of adapters
    assert all(torch.equal(tensors[name], state[name]) for name in fresh)
