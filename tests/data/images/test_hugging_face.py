"""Files of preprocessing as Hugging Face has them, old and new."""

import json

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, DeiTImageProcessor, ViTImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from vlm.data.images.hugging_face import read_preprocess
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder


def write_config(folder, name="preprocessor_config.json", **config):
    (folder / name).write_text(json.dumps(config))
    return str(folder)


PROCESSORS = {"CLIP": CLIPImageProcessor, "DeiT": DeiTImageProcessor, "ViT": ViTImageProcessor}


@pytest.mark.parametrize(
    ("kind", "size", "crop"), [("CLIP", 40, 36), ("CLIP", 36, 36), ("DeiT", 42, 36), ("ViT", 36, 0)]
)
def test_a_bare_number_is_what_its_processor_takes_it_for(tmp_path, kind, size, crop):
    """As the folders of the first CLIP and DeiT have them."""
    sizes = {"size": size} | ({"crop_size": crop} if crop else {})
    folder = write_config(tmp_path, feature_extractor_type=f"{kind}FeatureExtractor", **sizes)
    image = Image.effect_noise((70, 50), 90).convert("RGB")
    truth = PROCESSORS[kind](**sizes)(image, return_tensors="pt").pixel_values
    preprocess = read_preprocess(Folder(folder))
    assert preprocess.image_size == (36, 36)
    torch.testing.assert_close(preprocess.normalize(preprocess(image)[None]), truth, rtol=0, atol=1.01 / 255 / 0.26)


def test_it_may_stand_beside_that_of_texts(tmp_path):
    own = {"image_processor_type": "BlipImageProcessor", "size": {"height": 48, "width": 48}}
    preprocess = read_preprocess(Folder(write_config(tmp_path, "processor_config.json", image_processor=own)))
    assert (preprocess.image_size, preprocess.resize) == ((48, 48), "squash")
    assert preprocess.mean == [0.48145466, 0.4578275, 0.40821073]


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("Fuyu", {}, "FuyuImageProcessor is not supported"),
        ("CLIP", {"size": 20, "crop_size": 24}, "crops 24 pixels out of 20"),
        ("DeiT", {"size": 29, "crop_size": 24}, "crops 24 pixels out of 29"),
        ("CLIP", {"do_center_crop": False}, "not square"),
        ("ViT", {"do_resize": False}, "does not resize"),
        ("ViT", {"size": 10**6}, "size is 1000000, not an integer"),
        ("CLIP", {"size": "wide"}, "size is 'wide', not an integer"),
    ],
)
def test_what_is_not_ours_is_refused(tmp_path, kind, config, words):
    with pytest.raises(UserError, match=words):
        read_preprocess(Folder(write_config(tmp_path, image_processor_type=f"{kind}ImageProcessor", **config)))


def test_the_share_that_is_cut_gives_whole_pixels_again(tmp_path):
    for size in range(225, 300):
        sizes = {"size": {"shortest_edge": size}, "crop_size": 224}
        preprocess = read_preprocess(Folder(write_config(tmp_path, image_processor_type="CLIPImageProcessor", **sizes)))
        assert int(preprocess.image_size[0] / preprocess.crop) == size


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "whole"])
def test_squares_of_an_image_are_those_of_idefics3(tmp_path, tiles):
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}, do_image_splitting=tiles
    )
    processor.save_pretrained(tmp_path)
    preprocess = read_preprocess(Folder(str(tmp_path)))
    sides = torch.Generator().manual_seed(0)
    sizes = [(96, 96), (32, 32), (7, 300), (300, 7), (1, 1), (90, 61)]
    sizes += [tuple(size) for size in torch.randint(5, 400, (60, 2), generator=sides).tolist()]
    for size in sizes:
        image = Image.effect_noise(size, 90).convert("RGB")
        theirs = processor(image, return_tensors="pt", return_row_col_info=True)
        views, rows, columns = preprocess.views(image)
        assert (rows, columns) == (theirs["rows"][0][0], theirs["cols"][0][0]), size
        torch.testing.assert_close(preprocess.normalize(views), theirs["pixel_values"][0], rtol=0, atol=1e-6)
