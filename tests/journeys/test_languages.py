"""A captioner of three languages: trained once on drawn photos, then used and judged in each."""

import json
import re
from itertools import groupby
from math import exp, prod
from pathlib import Path

import journey
import pytest
import torch
from flickr import draw_flickr8k, translate_flickr8k
from journey import only_run, results
from tiny_checkpoints import FILES

import vlm as vlm_api
from vlm.checkpoint import load as ckpt
from vlm.cli.main import run as vlm
from vlm.data.images.image import load_image
from vlm.data.sources.captions import Flickr8kLanguages
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.inference.writing import word_probabilities
from vlm.serving.demo_forms import Values, build_form
from vlm.tasks.captioning.predict import Captioner
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow
LANGUAGES = ("en", "de", "zh")
ABSENT = ("test3.jpg", "val1.jpg")  # without a German caption
MAX_LEN = 48  # in tokens: the longest captions are cut
EXACT = ["--device", "cpu", "--precision", "fp32"]
PLAIN = str(FILES / "captioning.ckpt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = draw_flickr8k(tmp_path_factory.mktemp("flickr8k"))
    return translate_flickr8k(folder, folder, without=ABSENT)


@pytest.fixture(scope="module")
def overrides(root, small):
    data = ["data=flickr8k_languages", f"data.root={root}", f"data.languages_root={root}"]
    data += ["data.image_size=64", f"data.max_len={MAX_LEN}"]
    common = [option for option in small if not option.startswith("data.source.")]
    return [*common, *data, "tokenizer=char", "optim=adamw", "optim.lr=1e-2", "trainer.max_epochs=25"]


@pytest.fixture(scope="module")
def run(overrides, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert main([*overrides, f"runs={runs}", "trainer.check_val_every_n_epoch=25"]) == 0
    return only_run(runs)


@pytest.fixture(scope="module")
def best(run):
    return journey.best(run)


@pytest.fixture(scope="module")
def own_scores(run):
    """Of the run's own test: metrics, predictions and details."""
    return {name: results(run / "evaluation" / "test", name) for name in ("metrics", "predictions", "details")}


@pytest.fixture(scope="module")
def records(root):
    source = Flickr8kLanguages(root=str(root), languages_root=str(root), languages=LANGUAGES)
    return list(source.split("test").records())


@pytest.fixture(scope="module")
def photos(root, records):
    return [str(root / "images" / record.id) for record in records]


def texts_in(record, language):
    pairs = zip(record["captions"], record["languages"], strict=True)
    return [text for text, own in pairs if own == language]


def test_each_language_has_the_scores_of_its_captions_alone(run, own_scores, records):
    metrics, predictions, details = own_scores.values()
    means = []
    for language in LANGUAGES:
        written = {row["image_id"]: row["caption"] for row in predictions if row["language"] == language}
        references = {record.id: texts for record in records if (texts := texts_in(record, language))}
        assert written.keys() == references.keys() and ("test3.jpg" in written) == (language != "de")
        metric = CaptionMetric()
        metric.update(list(written), list(written.values()), [references[id] for id in written])
        scores = metric.compute()
        assert {name: metrics[f"test/{name}_{language}"] for name in scores} == scores
        for kind in ("low", "high", "constant", "shuffled"):
            assert f"test/cider_{language}@{kind}" in metrics
        means.append(scores["cider"])
    assert metrics["test/cider"] == pytest.approx(sum(means) / 3) and "test/cider@low" not in metrics
    assert list(details) == list(LANGUAGES) and "test3.jpg" not in details["de"]
    page = (run / "evaluation" / "test" / "report.html").read_text()
    assert "Best captions (zh)" in page and "Zh: scored by characters" in page


def test_samples_have_an_images_captions_in_all_languages_together(run):
    file = sorted((run / "samples").glob("step_*.jsonl"))[-1]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    by_image = [(image, [row["language"] for row in own]) for image, own in groupby(rows, lambda row: row["image_id"])]
    assert len({image for image, _ in by_image}) == len(by_image) > 1
    assert all(own in ([*LANGUAGES], [name for name in LANGUAGES if name != "de"]) for _, own in by_image)


def test_the_loss_is_that_of_captions_alone_without_the_tokens_of_languages(own_scores, best, records):
    captioner = Captioner(best)
    total = count = 0
    for record in records:
        context = captioner.encode([captioner.pixels(record.image())])
        for text, language in zip(record["captions"], record["languages"], strict=True):
            it = captioner.tokenizer
            own = it.languages.index(language) + it.vocab_size - 3
            ids = [it.bos_id, own, *it.encode(text)[: MAX_LEN - 3], it.eos_id]
            with torch.inference_mode():
                logits = captioner.model.head(captioner.model.decoder(torch.tensor([ids[:-1]]), None, context))[0]
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            total, count = total + losses[1:].sum().item(), count + len(ids) - 2
    assert own_scores["metrics"]["test/loss"] == pytest.approx(total / count, rel=1e-5)


def by_hand(captioner, pixels, language):
    """The likeliest token after each, the language's set after the begin, without any cache."""
    it, ids = captioner.tokenizer, []
    begin = [it.bos_id, [it.piece(id) for id in range(it.vocab_size)].index(f"<{language}>")]
    context = captioner.encode([pixels])
    with torch.inference_mode():
        while len(ids) + 1 < captioner.max_tokens:
            logits = captioner.model.head(captioner.model.decoder(torch.tensor([begin + ids]), None, context))[0, -1]
            if (token := int(logits.argmax())) == it.eos_id:
                break
            ids.append(token)
    return it.decode(ids)


def test_the_command_and_python_caption_in_each_language(own_scores, best, photos, capsys):
    model, captioner = vlm_api.load(best, device="cpu", precision="fp32"), Captioner(best)
    for language in (*LANGUAGES, None):
        named = [] if language is None else ["--language", language]
        assert vlm(["caption", *photos, "-c", best, *EXACT, *named]) == 0
        lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
        own = language or "en"
        expected = {path: by_hand(captioner, captioner.pixels(load_image(path)), own) for path in photos}
        assert lines == expected
        assert [one.text for one in model.caption(photos, language=language)] == list(expected.values())
        kept = {row["image_id"]: row["caption"] for row in own_scores["predictions"] if row["language"] == own}
        assert kept.items() <= {Path(path).name: text for path, text in expected.items()}.items()
    german, chinese = (model.caption(photos[0], language=language) for language in ("de", "zh"))
    assert german.text.startswith("Ein") and chinese.text.endswith("。")  # it has learned that much
    beams = model.caption(photos[0], language="zh", prefix="大", beam=3, results=2)
    assert all(one.text.startswith("大") for one in beams)
    assert model.attention(photos[0], language="de").caption.text == german.text
    form = build_form(captioner)
    assert form.languages == tuple(LANGUAGES)
    (shown,) = form.answer(Values(photos=[load_image(photos[0])], options={"language": "de"}))
    assert re.findall(r"<b>(.*?)</b>", shown) == german.text.split()


def test_the_words_of_a_caption_have_its_whole_probability(best, photos):
    captioner = Captioner(best)
    pixels = captioner.pixels(load_image(photos[0]))
    context = captioner.encode([pixels])
    ((_, (text,)),) = captioner.results([[pixels]], captioner.options(language="de"))
    words = word_probabilities(captioner, context, text.tokens)
    assert [word for word, _ in words] == text.text.split()
    read = torch.tensor([[captioner.tokenizer.bos_id, *text.tokens]])
    with torch.inference_mode():
        end = captioner.model.head(captioner.model.decoder(read, None, context))[0, -1].softmax(-1)
    whole = prod(share for _, share in words) * end[captioner.tokenizer.eos_id].item()
    assert whole == pytest.approx(exp(text.logprob), rel=1e-4)


def test_a_language_that_is_not_there_is_one_line(best, photos, capsys):
    assert vlm(["caption", photos[0], "-c", best, "--language", "fr"]) == 2
    assert capsys.readouterr().err == "error: --language fr: not supported by this model; choose from en, de, zh\n"
    assert vlm(["caption", photos[0], "-c", PLAIN, "--language", "de"]) == 2
    assert "--language de: this model has no language tokens; remove the option" in capsys.readouterr().err
    with pytest.raises(vlm_api.Error, match="choose from en, de, zh"):
        vlm_api.load(best, device="cpu").caption(photos[0], language="fr")


def test_an_evaluation_may_choose_languages_that_the_checkpoint_knows(own_scores, best, tmp_path, capsys, root):
    assert vlm(["evaluate", "-c", best, "--device", "cpu", "--out", str(tmp_path), "data.languages=[de]"]) == 0
    metrics = results(tmp_path)
    assert metrics["test/cider_de"] == own_scores["metrics"]["test/cider_de"] == metrics["test/cider"]
    assert not any("_zh" in name for name in metrics)
    capsys.readouterr()
    options = ["data=flickr8k_languages", f"data.root={root}", f"data.languages_root={root}"]
    assert vlm(["evaluate", "-c", PLAIN, "--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.count("\n") <= 2


def test_a_captioner_of_one_language_is_its_own_control(overrides, tmp_path):
    short = ["trainer.max_epochs=1", "data.languages=[zh]"]
    assert main([*overrides, *short, f"runs={tmp_path}"]) == 0
    folder = only_run(tmp_path)
    assert ckpt.read(folder / "checkpoints" / "best.ckpt")["vlm"]["tokenizer"]["options"]["languages"] == ["zh"]
    metrics = results(folder / "evaluation" / "test")
    assert metrics["test/cider"] == metrics["test/cider_zh"]
    assert main([f"resume={folder}", "trainer.max_epochs=2"]) == 0
    assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 4


def test_what_languages_do_not_go_with_is_refused(overrides, best, tmp_path, capsys):
    assert main([*overrides, "task.reward=cider", f"model.init_from={best}", f"runs={tmp_path}"]) == 2
    assert "task.reward: not supported for captions in several languages" in capsys.readouterr().err
    data = [option for option in overrides if option.startswith(("data=", "data.root", "data.languages_root"))]
    assert vlm(["shard", *data, "--out", str(tmp_path / "shards")]) == 2
    assert "vlm shard: caption languages are not supported in shards" in capsys.readouterr().err
