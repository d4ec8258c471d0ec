"""Encoders and classifiers of images that `transformers` saves itself: the same states, classes and pixels."""

import pytest
import torch
from dual import saved_dual
from hugging import CLASSIFIERS, ENCODERS, photos, pixels_of, save_parts
from safetensors.torch import load_file, save_file

from vlm.checkpoint.hugging_face import describe_folder
from vlm.checkpoint.rebuild import rebuild
from vlm.data.images.image import Preprocess, load_image
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face
from vlm.tasks.classification.predict import ImageClassifier

FILE = "model.safetensors"


def encoder_of(folder):
    """The encoder of a folder, with its weights."""
    found, about = describe_folder(Folder(folder))
    encoder = rebuild(found.parts["encoder"])
    assert not any("unchanged" in line for line in load_hugging_face(encoder, Folder(folder)))
    return encoder.eval(), Preprocess.from_state(about["preprocess"])


def states(model, pixels, **options):
    """All states after the final norm."""
    found = model(pixel_values=pixels, **options).last_hidden_state
    return model.post_layernorm(found) if hasattr(model, "pre_layrnorm") else found


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_computes_the_same(folder, tmp_path, name):
    theirs, processor = save_parts(folder, ENCODERS[name]())
    (ours, preprocess), paths = encoder_of(folder), photos(tmp_path / "photos")
    pixels, mine = pixels_of(processor, paths), torch.stack([preprocess(load_image(path)) for path in paths])
    torch.testing.assert_close(preprocess.normalize(mine), pixels, rtol=0, atol=1.01 / 255 / min(preprocess.std))
    truth = states(theirs, pixels)
    assert truth.std() > 0.1
    torch.testing.assert_close(ours(pixels).states, truth, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["clip_vision", "siglip"])
@pytest.mark.parametrize("prefix", ["", "vision_model."], ids=["today", "published"])
def test_an_encoder_has_its_weights_with_and_without_a_prefix(folder, name, prefix):
    theirs, _ = save_parts(folder, ENCODERS[name]())
    stored = {f"{prefix}{key.removeprefix('vision_model.')}": one for key, one in load_file(f"{folder}/{FILE}").items()}
    save_file(stored, f"{folder}/{FILE}")
    pixels = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(encoder_of(folder)[0](pixels).states, states(theirs, pixels), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_positions_of_other_images_are_interpolated_as_theirs_are(folder, name):
    theirs, _ = save_parts(folder, ENCODERS[name]())
    spec = describe_folder(Folder(folder))[0].parts["encoder"]
    encoder = rebuild(spec | {"args": spec["args"] | {"image_size": 32}})
    (note,) = (line for line in load_hugging_face(encoder, Folder(folder)) if "interpolated" in line)
    stored = theirs.config.image_size
    assert note == f"positions.weight: interpolated from images of {stored} to 32 pixels"
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    option = {} if name == "dinov2" else {"interpolate_pos_encoding": True}
    truth = states(theirs, pixels, **option)
    torch.testing.assert_close(encoder.eval()(pixels).states, truth, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_names_the_same_classes(folder, tmp_path, name):
    theirs, processor = save_parts(folder, CLASSIFIERS[name]())
    ours, paths = ImageClassifier(folder), photos(tmp_path / "photos")
    pixels = pixels_of(processor, paths)
    logits = theirs(pixel_values=pixels).logits
    torch.testing.assert_close(ours.model(pixels), logits, rtol=0, atol=1e-4)
    assert logits.std(0).min() > 0.05 and ours.classes == ["cat", "dog", "a, b"]
    mine = torch.stack([ours.pixels(load_image(path)) for path in paths])
    found = ours.model(ours.preprocess.normalize(mine)).softmax(-1)
    torch.testing.assert_close(found, logits.softmax(-1), rtol=0, atol=2e-2)  # pixels are within a grey level of theirs


@torch.no_grad()
def test_the_whole_of_clip_gives_its_encoder_of_images(folder):
    model, *_ = saved_dual("clip", folder)
    encoder = rebuild(describe_folder(Folder(folder))[0].parts["encoder"])
    load_hugging_face(encoder, Folder(folder))
    pixels = torch.randn(2, 3, 24, 24)
    truth = model.vision_model(pixel_values=pixels).pooler_output
    torch.testing.assert_close(encoder(pixels).states[:, 0], truth, rtol=0, atol=1e-4)


def test_an_encoder_alone_classifies_nothing(folder):
    save_parts(folder, ENCODERS["dinov2"]())
    with pytest.raises(UserError, match=r"contains only an encoder, .* use `vlm embed`, .* model=pretrained"):
        ImageClassifier(folder)
