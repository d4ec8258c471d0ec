"""BERT and its kin with their heads, saved by `transformers` itself: the same ids, logits and answers."""

import re

import pytest
import torch
import transformers
from hugging import LABELS, saved_bert, saved_reader, word_pieces
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM

import vlm
from vlm.checkpoint.load import read
from vlm.cli.main import run
from vlm.data.text.passages import encode_passage
from vlm.errors import UserError
from vlm.inference.predictor import encode_on_device
from vlm.tasks.masked_language_modeling.predict import GapFiller
from vlm.tasks.span_answering.predict import SpanAnswerer, span_scores
from vlm.tasks.tagging.predict import Tagger
from vlm.tasks.text_classification.predict import TextClassifier

KINDS = ("Bert", "DistilBert", "Roberta", "XLMRoberta")
TEXTS = ["a man in a red shirt", "two dogs run over the green grass, don't they?", "Sitting on THE table.", "zzz 42"]


OLD = {"weight": "gamma", "bias": "beta"}


def close(found, truth):
    torch.testing.assert_close(found.float(), truth, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", [*(f"{kind}ForMaskedLM" for kind in KINDS), "BertForPreTraining"])
def test_gaps_are_filled_alike(folder, name, capsys):
    theirs, tokenizer = saved_reader(folder, getattr(transformers, name))
    ours = GapFiller(folder)
    texts = ["a [MASK] in a red shirt", "two [MASK] run over the [MASK] grass, don't they?", "Sitting on THE [MASK]."]
    rows, whole = [ours.encode(text) for text in texts], []
    found = iter(ours.probabilities(rows))
    for text, row in zip(texts, rows, strict=True):
        given = tokenizer(text.replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
        ids, output = given.input_ids[0], theirs(**given)
        assert row.ids == ids.tolist()
        logits = output.prediction_logits if name == "BertForPreTraining" else output.logits
        gaps = ids == tokenizer.mask_token_id
        first, second = logits[0, gaps].topk(2).values.T
        assert (first - second).min() > 1e-3
        for probabilities in logits[0, gaps].softmax(-1):
            close(next(found), probabilities)
        whole.append(tokenizer.decode(ids.where(~gaps, logits[0].argmax(-1)), skip_special_tokens=True))
    assert run(["fill", *texts, "-c", folder, "--precision", "fp32"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{text}\t{one}" for text, one in zip(texts, whole, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_pairs_are_classified_alike(folder, kind, capsys):
    theirs, tokenizer = saved_reader(folder, getattr(transformers, f"{kind}ForSequenceClassification"), **LABELS)
    ours = TextClassifier(folder)
    pairs = [(first, second) for first, second in zip(TEXTS, reversed(TEXTS), strict=True)]
    together = not kind.endswith("Roberta")  # which has two ends between the texts
    for samples in ([(text,) for text in TEXTS], pairs)[: 1 + together]:
        truth = theirs(**tokenizer(*map(list, zip(*samples, strict=True)), padding=True, return_tensors="pt")).logits
        close(ours.probabilities(samples), truth.softmax(-1))
    pair = ["classify", "--text", "a man", "--pair", "a big cat", "-c", folder, "--precision", "fp32"]
    assert run(pair) == (0 if together else 2)
    if not together:
        return
    assert run(["classify", "--text", "a man\twith a tab", "-c", folder, "--precision", "fp32"]) == 0
    logits = theirs(**tokenizer("a man", "a big cat", return_tensors="pt")).logits
    assert LABELS["id2label"][logits.argmax().item()] in capsys.readouterr().out.splitlines()[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_words_are_tagged_alike(folder, kind, capsys):
    labels = {"id2label": {0: "O", 1: "B"}, "label2id": {"O": 0, "B": 1}}
    theirs, tokenizer = saved_reader(folder, getattr(transformers, f"{kind}ForTokenClassification"), **labels)
    ours, sentences = Tagger(folder), [text.split() for text in TEXTS]
    found = iter(ours.probabilities(sentences))
    for words in sentences:
        ids = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        logits, places = theirs(**ids).logits[0], ids.word_ids()
        for word in range(len(words)):
            close(next(found), logits[places.index(word)].softmax(-1))
    assert run(["tag", "--text", "two dogs run", "-c", folder]) == 0
    assert capsys.readouterr().out.count("/") == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_answers_are_found_alike(folder, tmp_path, kind, capsys):
    theirs, tokenizer = saved_reader(folder, getattr(transformers, f"{kind}ForQuestionAnswering"))
    ours, question, context = SpanAnswerer(folder), "who runs?", "two dogs, a cat and a man run over the grass."
    [window] = encode_passage(ours.tokenizer, ours.max_len, ours.stride, question, context)
    ids = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets = ids.pop("offset_mapping")[0].tolist()
    assert window.row.ids == ids.input_ids[0].tolist()
    assert kind != "Bert" or window.row.types == ids.token_type_ids[0].tolist()
    truth = theirs(**ids)
    scores = span_scores(ours.model, encode_on_device([[window.row]], 0, "cpu"))[0]
    places = list(window.row.places)
    close(scores[places], torch.stack([truth.start_logits[0], truth.end_logits[0]], -1)[places])
    # The best span of words by brute force over their logits.
    best = max(
        ((start, stop) for start in places[1:] for stop in places[1:] if start <= stop),
        key=lambda span: (truth.start_logits[0, span[0]] + truth.end_logits[0, span[1]]).item(),
    )
    ends = [stop for stop in (*places[1:], len(offsets) - 1) if stop > best[1]]
    expected = context[offsets[best[0]][0] : offsets[ends[0] - 1][1]]
    (tmp_path / "text.txt").write_text(context)
    command = ["answer", str(tmp_path / "text.txt"), "--question", question, "-c", folder, "--precision", "fp32"]
    assert run(command) == 0
    assert capsys.readouterr().out.rstrip("\n").split("\t")[2] == expected


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_encoders_give_the_same_vectors(folder, kind):
    theirs, tokenizer = saved_reader(folder, getattr(transformers, f"{kind}Model"))
    found = vlm.load(folder, precision="fp32").embed(TEXTS, pooling="mean", normalize=False)
    for text, vector in zip(TEXTS, found, strict=True):
        close(torch.as_tensor(vector), theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0))


def test_norms_may_have_their_old_names(folder):
    """As the folder of bert-base-uncased has them."""
    saved_bert(folder, BertForMaskedLM)
    before, tensors = read(folder)["state_dict"], load_file(f"{folder}/model.safetensors")
    old = {
        re.sub(r"LayerNorm\.(weight|bias)$", lambda found: f"LayerNorm.{OLD[found[1]]}", name): tensor
        for name, tensor in tensors.items()
    }
    assert len(old.keys() - tensors.keys()) > 8
    save_file(old, f"{folder}/model.safetensors")
    after = read(folder)["state_dict"]
    assert before.keys() == after.keys() and all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "options", [{"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_options_of_the_tokenizer_are_kept(folder, options):
    _, tokenizer = saved_bert(folder, BertForMaskedLM, word_pieces(**options))
    ours = GapFiller(folder).tokenizer
    lines = ["Ein Fuß, é ü \u4e1c\u4eac\u4eacA", "THE The the", "e\u0301\u00e9t"]
    assert [ours.encode(line) for line in lines] == tokenizer(lines, add_special_tokens=False).input_ids
    assert word_pieces()(lines).input_ids != tokenizer(lines).input_ids
    for _ in range(100):
        ids = torch.randint(len(tokenizer), (6,)).tolist()
        assert ours.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["BertModel", "BertForMultipleChoice"])
def test_an_encoder_alone_fills_no_gap(folder, name):
    """Nor does one whose head is none of ours."""
    saved_bert(folder, getattr(transformers, name))
    with pytest.raises(UserError, match=r"contains only an encoder, .* use `vlm embed`, .* task=TASK"):
        GapFiller(folder)
