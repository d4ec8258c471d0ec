"""Folders that `transformers` saves itself, used as they are: the same logits, pixels, ids and texts."""

import json
from pathlib import Path

import pytest
import torch
from hugging import CAPTIONERS, TEXTS, caption_logits, photos, pixels_of, saved_captioner, saved_trocr, write_captions
from text_lines import varied_lines
from transformers import ViTImageProcessor

from vlm.data.images.image import load_image
from vlm.data.text.hugging_face import read_tokenizer
from vlm.decoding.options import Decoding
from vlm.inference.info import describe
from vlm.models.pretrained.folder import Folder
from vlm.tasks.captioning.predict import Captioner


def texts_of(captioner, paths, **options):
    """Captions of files by the folder's own options, unless others are stated."""
    pixels = [captioner.pixels(load_image(path)) for path in paths]
    found = dict(captioner.results([pixels], captioner.options(**options, batch_size=4)))
    return [found[place][0].text for place in range(len(paths))]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["whole", "shards"])
@pytest.mark.parametrize("name", CAPTIONERS)
def test_a_captioner_computes_the_same(folder, tmp_path, name, options):
    theirs, tokenizer, processor = CAPTIONERS[name](folder, **options)
    ours, paths = Captioner(folder), photos(tmp_path / "photos")
    pixels = pixels_of(processor, paths)
    mine = torch.stack([ours.pixels(load_image(path)) for path in paths])
    level = 1.01 / 255 / min(ours.preprocess.std)
    torch.testing.assert_close(ours.preprocess.normalize(mine), pixels, rtol=0, atol=level)
    tokens = torch.tensor([tokenizer(text).input_ids[:8] for text in TEXTS[:4]])
    assert [ours.tokenizer.encode(text) for text in TEXTS] == tokenizer(TEXTS, add_special_tokens=False).input_ids
    logits = ours.model.head(ours.model(pixels[:4], tokens))
    truth = caption_logits(theirs, pixels[:4], tokens)
    torch.testing.assert_close(logits, truth, rtol=0, atol=1e-4)
    first, second = truth[:, -1].topk(2).values.T
    assert (first - second).min() > 1e-3


GENERATION = {
    "plain": {},
    "beam": {"num_beams": 4, "max_length": 16},
    "early": {"num_beams": 4, "max_new_tokens": 9, "early_stopping": True, "length_penalty": 0.5}
    | {"no_repeat_ngram_size": 2},
    "rules": {"repetition_penalty": 1.5, "min_new_tokens": 5},
}


@torch.no_grad()
@pytest.mark.parametrize("name", GENERATION)
def test_captions_by_the_folders_own_options_are_those_of_generate(folder, tmp_path, name):
    theirs, tokenizer, processor = saved_captioner(folder, generation=GENERATION[name])
    paths = photos(tmp_path / "photos")
    truth = tokenizer.batch_decode(theirs.generate(pixels_of(processor, paths)), skip_special_tokens=True)
    assert texts_of(Captioner(folder), paths) == truth
    assert len(set(truth)) > 1


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", CAPTIONERS)
def test_captions_are_those_of_generate(folder, tmp_path, name, beam):
    theirs, tokenizer, processor = CAPTIONERS[name](folder)
    paths = photos(tmp_path / "photos")
    truth = write_captions(theirs, tokenizer, pixels_of(processor, paths), num_beams=beam, max_length=16)
    assert texts_of(Captioner(folder), paths, beam=beam, max_tokens=15) == truth
    assert len(set(truth)) > 2


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_preprocessing_is_theirs(folder, tmp_path, resample, normalize):
    levels = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "do_normalize": normalize}
    processor = ViTImageProcessor(size={"height": 24, "width": 24}, resample=resample, **levels)
    saved_captioner(folder, processor=processor)
    preprocess, paths = Captioner(folder).preprocess, photos(tmp_path / "photos")
    ours = preprocess.normalize(torch.stack([preprocess(load_image(path)) for path in paths]))
    atol = 1.01 / 255 / (0.26 if normalize else 1)
    torch.testing.assert_close(ours, pixels_of(processor, paths), rtol=0, atol=atol)


def test_info_tells_of_a_folder(folder):
    saved_captioner(folder, generation={"num_beams": 4})
    lines = describe(folder)
    assert "from        a VisionEncoderDecoderModel of Hugging Face" in lines
    assert "BytePairTokenizer" in lines and "image_size=24" in lines


def test_options_of_the_user_go_first(folder):
    saved_captioner(folder, generation={"num_beams": 4, "max_length": 16, "do_sample": False})
    captioner = Captioner(folder)
    expected = Decoding(beam=4, max_tokens=15, end_counts=True, early_stopping=False)
    assert captioner.build_decoding(captioner.options()) == expected
    assert json.loads(json.dumps(captioner.decoding)) == captioner.decoding


@pytest.mark.parametrize("small", [False, True])
def test_trocr_reads_the_tokenizers_of_before_tokenizer_json(folder, small):
    """RoBERTa's vocab.json with merges.txt, and XLM-R's model of SentencePiece, whose ids are not the model's."""
    _, theirs, _ = saved_trocr(folder, small=small)
    (Path(folder) / "tokenizer.json").unlink()
    ours = read_tokenizer(Folder(folder))
    lines = [line for line in varied_lines(500) if "<" not in line]
    assert not [line for line in lines if ours.encode(line) != theirs(line, add_special_tokens=False).input_ids][:3]
    for text in TEXTS:
        assert ours.decode([0, *ours.encode(text), 2]) == text
