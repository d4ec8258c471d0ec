"""Random mutations of the files of Hugging Face folders: each is read, or refused in a line, and soon."""

import json
import random
import re
import shutil
import time

import pytest
import torch
from hugging import CAPTIONERS, CLASSIFIERS, saved, saved_bert, saved_decoder, saved_gpt2, saved_reader
from mutations import change
from transformers import (
    BertForSequenceClassification,
    DistilBertForTokenClassification,
    RobertaForSequenceClassification,
)

from vlm.checkpoint.load import load_model, read
from vlm.errors import UserError

IMAGES, TOKENS = torch.zeros(1, 3, 24, 24), torch.ones(1, 3, dtype=torch.long)
# How a folder of each kind is saved, and how its model is used.
FOLDERS = {
    "vit_gpt2": (CAPTIONERS["vit_gpt2"], (IMAGES, TOKENS)),
    "blip": (CAPTIONERS["blip"], (IMAGES, TOKENS)),
    "git": (CAPTIONERS["git"], (IMAGES, TOKENS)),
    "gpt2": (saved_gpt2, (TOKENS,)),
    "llama": (lambda folder: saved_decoder(folder, "llama"), (TOKENS,)),
    "qwen2": (lambda folder: saved_decoder(folder, "qwen2"), (TOKENS,)),
    "bert": (lambda folder: saved_bert(folder, BertForSequenceClassification), (TOKENS,)),
    "distilbert": (lambda folder: saved_reader(folder, DistilBertForTokenClassification), (TOKENS,)),
    "roberta": (lambda folder: saved_reader(folder, RobertaForSequenceClassification), (TOKENS,)),
    "dinov2": (lambda folder: saved(folder, CLASSIFIERS["dinov2"]()), (IMAGES,)),
    "siglip": (lambda folder: saved(folder, CLASSIFIERS["siglip"]()), (IMAGES,)),
}
FILES = ("config.json", "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer_config.json")
SIZES = re.compile("size|num|eps|act|n_|vocab|position|label")  # keys that mostly matter
MUTATIONS = 36  # a folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("folders")
    for name, (save, _) in FOLDERS.items():
        save(root / name)
    return root


@torch.no_grad()
@pytest.mark.parametrize("name", FOLDERS)
def test_any_config_is_read_or_refused_in_a_line(originals, tmp_path, name):
    chance, read_whole = random.Random(name), 0
    for number in range(MUTATIONS):
        folder = shutil.copytree(originals / name, tmp_path / str(number))
        file = folder / chance.choice([file for file in FILES if (folder / file).is_file()])
        content = json.loads(file.read_text())
        what = f"{file.name}: {change(content, chance, mostly=SIZES)}"
        file.write_text(json.dumps(content))
        started = time.process_time()
        try:
            load_model(read(folder))(*FOLDERS[name][1])
            read_whole += 1
        except UserError as fault:
            assert "\n" not in str(fault) and str(folder) in str(fault), what
            assert "does not describe a supported model" not in str(fault), (what, str(fault))
        except BaseException as fault:
            pytest.fail(f"{what}: {fault!r}")
        assert time.process_time() - started < 5, what
        shutil.rmtree(folder)
    assert MUTATIONS / 5 < read_whole < MUTATIONS  # most keys are none that a model of ours depends on
