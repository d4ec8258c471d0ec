"""Marian and T5 folders as translators, beside transformers."""

import random
import shutil

import pytest
import torch
from hugging import TEXTS
from text_lines import varied_lines
from transformers import MarianMTModel, MarianTokenizer
from translators import GERMAN, saved_marian, saved_t5

import vlm
from vlm.cli.main import run
from vlm.data.text.inputs import encode_text
from vlm.tasks.translation.predict import Translator

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1, "num_heads": 5}
NAMES = {"marian": (saved_marian, {}), "t5": (saved_t5, {}), "t5_gated": (saved_t5, GATED)}
DRAW = random.Random(0)
WORDS = [word for text in TEXTS for word in text.split()]
SENTENCES = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(1, 15))) for _ in range(50)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("translators")
    torch.manual_seed(0)
    return {name: (root / name, *save(root / name, **options)) for name, (save, options) in NAMES.items()}


@pytest.fixture(params=NAMES)
def pair(request, folders):
    """Our translator, their model and their tokenizer."""
    folder, *theirs = folders[request.param]
    return Translator(str(folder)), *theirs


def translate(translator, **options):
    """Translations of the sentences."""
    texts = dict(translator.results([SENTENCES], translator.options(**options, batch_size=8)))
    return [texts[place][0].text for place in range(len(SENTENCES))]


@pytest.mark.slow
def test_ids_of_varied_lines_are_equal(pair):
    ours, _, theirs = pair
    lines = [line for line in varied_lines(1000, seed=0) if "<" not in line]  # special tokens in a text are text here
    lines += [*GERMAN[:4], "", ">>deu<< a dog"]
    encode, encode_written = ours.tokenizer.encode, ours.tokenizer.encode_written
    assert not [line for line in lines if theirs(line)["input_ids"] != [*encode(line), ours.tokenizer.eos_id]][:3]
    written = [(line, theirs(text_target=line)["input_ids"][:-1]) for line in lines]
    assert not [line for line, ids in written if encode_written(line) != ids][:3]
    for _, ids in written:
        assert ours.tokenizer.decode(ids).strip() == theirs.decode(ids, skip_special_tokens=True).strip()


@torch.no_grad()
def test_logits_and_loss_are_equal(pair):
    ours, model, tokenizer = pair
    read = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    labels = tokenizer(text_target=GERMAN, return_tensors="pt", padding=True)["input_ids"].repeat(5, 1)[:50]
    theirs = model(**read, labels=labels.masked_fill(labels == tokenizer.pad_token_id, -100))
    start = torch.full((50, 1), ours.tokenizer.bos_id)
    hidden = ours.model.decoder(torch.cat([start, labels[:, :-1]], 1), None, ours.encode(SENTENCES))
    logits = ours.model.head(hidden)
    assert theirs.logits.std() > 0.1
    torch.testing.assert_close(logits, theirs.logits, rtol=0, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(logits.mT, labels, ignore_index=ours.tokenizer.pad_id)
    torch.testing.assert_close(loss, theirs.loss, rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 4])
def test_texts_of_fifty_sentences_are_equal(pair, beam):
    ours, model, tokenizer = pair
    found = model.generate(**tokenizer(SENTENCES, return_tensors="pt", padding=True), num_beams=beam)
    truth = tokenizer.batch_decode(found, skip_special_tokens=True)
    assert translate(ours, beam=beam) == truth
    assert len({*truth}) > 10
    assert beam > 1 or len({len(row[row != tokenizer.pad_token_id]) for row in found}) > 1


@pytest.mark.slow
def test_the_commands_take_a_folder(folders, tmp_path, capsys):
    folder, model, tokenizer = folders["marian"]
    (tmp_path / "lines.txt").write_text("\n".join(SENTENCES[:3]))
    assert run(["translate", str(tmp_path / "lines.txt"), "-c", str(folder), "--precision", "fp32"]) == 0
    found = model.generate(**tokenizer(SENTENCES[:3], return_tensors="pt", padding=True))  # four beams, as it says
    assert capsys.readouterr().out.splitlines() == tokenizer.batch_decode(found, skip_special_tokens=True)
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.en").write_text("\n".join(TEXTS))
        (tmp_path / f"{split}.de").write_text("\n".join(GERMAN))
    data = ["data=aligned", f"data.root={tmp_path}", "data.from=en", "data.to=de"]
    assert run(["evaluate", "-c", str(folder), *data]) == 0
    assert "length_ratio" in capsys.readouterr().out
    assert run(["import", str(folder), "--out", str(tmp_path / "one.ckpt")]) == 0
    assert vlm.load(str(tmp_path / "one.ckpt")).translate(SENTENCES[:2]) == vlm.load(str(folder)).translate(
        SENTENCES[:2]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_starts_from_a_folder(folders, tmp_path, monkeypatch, name):
    """Its model computes what the folder's does as long as nothing is learned; it tests, and is used."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.en").write_text("\n".join(TEXTS[:4]))
        (tmp_path / f"{split}.de").write_text("\n".join(GERMAN[:4]))
    data = ["data=aligned", f"data.root={tmp_path}", "data.from=en", "data.to=de", "data.max_len=64"]
    chosen = ["model=pretrained", f"model.path={folders[name][0]}", "optim.lr=1e-20", "trainer.max_steps=1"]
    run = vlm.train(*data, *chosen)
    ours, theirs = Translator(str(run.best)), Translator(str(folders[name][0]))
    read = [encode_text(ours.tokenizer, 64, text) for text in SENTENCES]
    assert read == [encode_text(theirs.tokenizer, 64, text) for text in SENTENCES]
    tokens = torch.randint(3, 80, (50, 8))
    with torch.inference_mode():
        logits = [one.model.head(one.model.decoder(tokens, None, one.encode(SENTENCES))) for one in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)


def test_a_sentencepiece_model_alone_is_read(folders, tmp_path):
    """As in folders of before there was a tokenizer.json."""
    folder, *_ = folders["t5"]
    other = shutil.copytree(folder, tmp_path / "folder")
    (other / "tokenizer.json").unlink()
    one, other = (Translator(str(place)).tokenizer for place in (folder, other))
    assert other.read_begin == []
    for text in [*TEXTS, *GERMAN, *SENTENCES]:
        assert other.encode(text) == one.encode(text)
        assert other.decode(other.encode(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_a_marian_folder_goes_out_again(folders, tmp_path, trained):
    """Training changes the embeddings of both sides apart, which then go out apart."""
    folder, model, tokenizer = folders["marian"]
    assert run(["import", str(folder), "--out", str(tmp_path / "one.ckpt")]) == 0
    if trained:
        stored = torch.load(tmp_path / "one.ckpt", weights_only=True)
        stored["state_dict"]["model.encoder.token_embed.weight"][5:] *= 1.5
        torch.save(stored, tmp_path / "one.ckpt")
    assert run(["export", str(tmp_path / "out"), "--to", "huggingface", "-c", str(tmp_path / "one.ckpt")]) == 0
    back, words = (
        MarianMTModel.from_pretrained(tmp_path / "out").eval(),
        MarianTokenizer.from_pretrained(tmp_path / "out"),
    )
    read = words(SENTENCES, return_tensors="pt", padding=True)
    assert read["input_ids"].equal(tokenizer(SENTENCES, return_tensors="pt", padding=True)["input_ids"])
    texts = words.batch_decode(back.generate(**read), skip_special_tokens=True)  # as its generation_config.json says
    assert texts == translate(Translator(str(tmp_path / "one.ckpt")))
    (tmp_path / "out" / "vlm_export.json").unlink()  # what we keep for ourselves
    assert texts == translate(Translator(str(tmp_path / "out")))
    theirs = words.batch_decode(model.generate(**read), skip_special_tokens=True)
    assert (texts == theirs) is not trained
