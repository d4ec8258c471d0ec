"""Every score beside its official implementation on generated texts, odd ones included: a sample, and nightly in full.

Two references are not among the requirements of the tests, because their packages need many others; without them their
tests are skipped: `pip install --no-deps lmms-eval==0.7.3 pycocoevalcap==1.2` (and Java for its tokenizer).
"""

import ast
import random
import re
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import absl.logging
import jiwer
import numpy as np
import pytest
import sacrebleu
from rapidfuzz.distance import Levenshtein
from rouge_score import rouge_scorer
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.scheme import BILOU, IOBES
from torchmetrics.functional.text import squad

from vlm.data.text.words import words
from vlm.evaluation.metrics.bootstrap import caption_scorer
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.texts import NAMES, TextScores
from vlm.evaluation.metrics.tokens import WORDS
from vlm.tasks.image_questions.train import compute_anls, process_answer, vqa_accuracy
from vlm.tasks.span_answering.train import score_answer as squad_scores
from vlm.tasks.tagging.metrics import SCHEMES, tag_scorer

# absl, which rouge_score imports, logs to the stderr of its import: a file of pytest's, which it would close when
# another library configures logging.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
SAMPLE, FULL = 60, 1500  # inputs of each metric
COUNTS = pytest.mark.parametrize(
    "count", [pytest.param(SAMPLE, marks=pytest.mark.slow), pytest.param(FULL, marks=pytest.mark.nightly)]
)
PLAIN_WORDS = "a the an red blue dog dogs run runs running two 2 one none zero ten cat sat on mat it its of"
ODD_WORDS = """
don't dont it's couldnt've girl's U.S. Dr. e.g. 1,000 1,234.50 2.5 .5 5. 3.5% $5 2:50 1/2 100,978 10-12 t-shirt
well-known snake_case @user #tag (x) [y] {z} <unk> "quoted" 'single' `` '' ... -- - ! ? ; : , & &amp; &quot; &lt;
cafe\u0301 caf\u00e9 na\u00efve stra\u00dfe \u0130stanbul \u01c5 \ufb01n \u03c3\u03c2
\u041c\u043e\u0441\u043a\u0432\u0430 \u6211\u559c\u6b22\u732b \u732b\u304c
\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0645\u0631\u062d\u0628\u0627 \U0001f642
\U0001f468\u200d\U0001f469 \u200b \ufeff \u201cq\u201d \u2019 \u2014 \u2026
"""
PLAIN, ODD = PLAIN_WORDS.split(), ODD_WORDS.split()
GAPS = ["\t", "  ", "\u00a0", "\u2028", "\x85", "\x0b", "\x0c", "\u3000", " \t ", ""]


def odd_text(draw, most=12):
    """Draws a text: often plain words, sometimes nothing, white space, one word many times, or a very long one."""
    kind = draw.random()
    if kind < 0.04:
        return ""
    if kind < 0.07:
        return draw.choice([" ", "\t", "  ", "\u00a0", " \u2028 "])
    if kind < 0.10:
        return " ".join([draw.choice(PLAIN + ODD)] * draw.randint(2, 40))
    if kind < 0.12:
        return " ".join(draw.choices(PLAIN + ODD, k=200))
    if kind < 0.15:
        return "".join(draw.choices(".,;:!?-'\"()", k=draw.randint(1, 8)))
    share = draw.choice([0.0, 0.2, 0.6])
    parts = [draw.choice(ODD if draw.random() < share else PLAIN) for _ in range(draw.randint(1, most))]
    text = "".join(part + (draw.choice(GAPS) if draw.random() < share / 4 else " ") for part in parts)
    return draw.choice([text.strip(), text.strip(), text, text.capitalize(), text.upper()])


def like(draw, text):
    """Draws a text that resembles another: equal, in other case, with some words changed; or another one."""
    kind = draw.random()
    if kind < 0.15:
        return text
    if kind < 0.25:
        return odd_text(draw)
    parts = text.split(" ")
    changed = [draw.choice([part, part, part, part.lower(), draw.choice(PLAIN + ODD), ""]) for part in parts]
    return " ".join(changed) if kind < 0.8 else "".join(draw.choice([mark, mark, mark, ""]) for mark in text)


def draw_pairs(count, name):
    draw = random.Random(name)
    references = [odd_text(draw) for _ in range(count)]
    return [(like(draw, text), text) for text in references]


def lmms_eval(file, name, **known):
    """Returns a definition in a file of lmms-eval without importing what the others in it need."""
    if (spec := find_spec("lmms_eval")) is None:
        pytest.skip("needs pip install --no-deps lmms-eval==0.7.3")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    node = next(node for node in tree.body if getattr(node, "name", None) == name)
    node.decorator_list = []
    exec(compile(ast.Module([node], []), file, "exec"), known)  # the reference's own code
    return known[name]


@COUNTS
def test_vqa_answers_beside_eval_ai(count):
    """But for its removal of all commas, question marks and 's, which VQA's script lacks, and our contractions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = lmms_eval("tasks/_task_utils/vqa_eval_metric.py", "EvalAIAnswerProcessor", re=re)()
    draw, differing = random.Random("vqa"), {"its", "im", "ive", "id've", "i'dve"}
    for _ in range(count):
        text = odd_text(draw, 4).replace("\u2019", "'")
        if text.count(".") > 32:  # its limit, the value of re.UNICODE, which it gives as a count
            continue
        marked = text.replace("\n", " ").replace("\t", " ").strip()
        theirs = processor.process_digit_article(processor.process_punctuation(marked)).lower()
        ours = process_answer(text)
        pairs = zip(ours.split(" "), theirs.split(" "), strict=True)
        assert all(one == other or other in differing for one, other in pairs), (text, ours, theirs)


@COUNTS
def test_vqa_accuracy_beside_its_definition(count):
    draw = random.Random("people")
    for _ in range(count):
        people = [odd_text(draw, 2) for _ in range(draw.randint(1, 4))]
        people = draw.choices(people, k=10)
        answer = like(draw, draw.choice(people))
        agree = [process_answer(one) == process_answer(answer) for one in people]
        others = [agree[:place] + agree[place + 1 :] for place in range(10)]
        assert vqa_accuracy(answer, people) == pytest.approx(np.mean([min(1, sum(nine) / 3) for nine in others]))


@COUNTS
def test_anls_beside_the_competitions(count):
    draw, official = random.Random("anls"), None
    if find_spec("lmms_eval"):
        official = lmms_eval("api/metrics.py", "anls", levenshtein_distance=Levenshtein.distance)
    for answer, right in draw_pairs(count, "anls"):
        answers = [right, *(odd_text(draw, 3) for _ in range(draw.randint(0, 2)))]
        edits = (Levenshtein.distance(*(" ".join(side.lower().split()) for side in (one, answer))) for one in answers)
        lengths = (max(len(one.upper()), len(answer.upper()), 1) for one in answers)
        shares = [count / length for count, length in zip(edits, lengths, strict=True)]
        expected = 1 - min(shares) if 1 - min(shares) >= 0.5 else 0
        assert compute_anls(answer, answers) == pytest.approx(expected), (answer, answers)
        if official:
            assert official(answers, [answer])["anls"] == pytest.approx(expected)


@COUNTS
def test_squad_beside_torchmetrics(count):
    """Of questions with an answer; torchmetrics has no others."""
    draw = random.Random("squad")
    for number, (answer, right) in enumerate(draw_pairs(count, "squad")):
        answers = [f"{right} x", *(odd_text(draw, 5) + " y" for _ in range(draw.randint(0, 2)))]
        target = {"answers": {"answer_start": [0] * len(answers), "text": answers}, "id": str(number)}
        official = squad({"prediction_text": answer, "id": str(number)}, target)
        expected = [float(official[name]) / 100 for name in ("exact_match", "f1")]
        assert squad_scores(answer, answers) == pytest.approx(expected, abs=1e-6), (answer, answers)


@COUNTS
@pytest.mark.parametrize("name", SCHEMES)
def test_spans_beside_seqeval(name, count):
    """IOB as conlleval reads it, the default of seqeval; other schemes strictly."""
    draw, strict = random.Random("spans"), {"IOBES": IOBES, "BILOU": BILOU}.get(name)
    tags = ["O", "O", *(f"{mark}-{kind}" for mark in SCHEMES[name].marks for kind in ("A", "B"))]
    tags += [] if strict else ["B-a-b", "I-a-b"]
    options = {"mode": "strict", "scheme": strict} if strict else {}
    for _ in range(count // 10):
        true = [draw.choices(tags, k=draw.randint(1, 9)) for _ in range(10)]
        taken = [[draw.choice([tag, tag, draw.choice(tags)]) for tag in sentence] for sentence in true]
        ours = tag_scorer(true, taken, SCHEMES[name])(np.ones((1, len(true))))[0, 1:]
        official = [
            score(true, taken, zero_division=0, **options) for score in (precision_score, recall_score, f1_score)
        ]
        assert ours == pytest.approx(official), (true, taken)


@COUNTS
def test_texts_beside_sacrebleu_and_jiwer(count):
    """Corpora of one text to 20; also a resample, whose scores come from counts."""
    draw, pairs = random.Random("corpora"), draw_pairs(count, "texts")
    while pairs:
        size = draw.choice([1, 2, 5, 20])
        texts, references = (list(side) for side in zip(*pairs[:size], strict=True))
        pairs = pairs[size:]
        scores = TextScores(texts, references)
        draws = np.array([[draw.randint(0, 2) for _ in texts], [1] * len(texts)], float)
        draws[0, 0] = 1
        for row, found in zip(draws, scores.score(draws), strict=True):
            chosen = [place for place, times in enumerate(row.astype(int)) for _ in range(times)]
            some, wanted = [texts[place] for place in chosen], [references[place] for place in chosen]
            expected = {
                "bleu": sacrebleu.corpus_bleu(some, [wanted]).score,
                "chrf": sacrebleu.corpus_chrf(some, [wanted]).score,
                "exact_match": np.mean([one == other for one, other in zip(some, wanted, strict=True)]),
            }
            if any(map(str.strip, wanted)):  # else jiwer's rates depend on its version
                expected |= {"wer": jiwer.wer(wanted, some), "cer": jiwer.cer(wanted, some)}
            ours = dict(zip(NAMES, found, strict=True))
            assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-9), (some, wanted)
        assert list(scores.summary.values()) == pytest.approx(scores.score(draws)[1], abs=1e-9)


class OurWords:
    """A tokenizer for rouge-score with words of all scripts; its own drops all but a to z and digits."""

    def tokenize(self, text):
        return list(words(text.lower().replace("_", " ")))


@COUNTS
def test_rouge_beside_rouge_score(count):
    kinds = ["rouge1", "rouge2", "rougeL"]
    latin, any_script = rouge_scorer.RougeScorer(kinds), rouge_scorer.RougeScorer(kinds, tokenizer=OurWords())
    for text, reference in draw_pairs(count, "rouge"):
        ours = TextScores([text], [reference]).summary
        scorers = [any_script, *([latin] if (text + reference).isascii() else [])]
        for scorer in scorers:
            official = scorer.score(reference, text)
            expected = {name: official[name].fmeasure for name in kinds}
            assert {name: ours[name] for name in kinds} == pytest.approx(expected), (text, reference)


@COUNTS
def test_captions_beside_pycocoevalcap(count):
    """Corpora of 10 images; tokens come from its Java tokenizer too, if there is Java."""
    if not find_spec("pycocoevalcap"):
        pytest.skip("needs pip install --no-deps pycocoevalcap==1.2")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    draw, texts = random.Random("captions"), {}
    for place in range(count):
        first = one_script(odd_text(draw))
        others = [one_script(like(draw, first)) for _ in range(draw.randint(1, 5))]
        texts[f"{place:05d}"] = (first, others)
    written, right = ({id: [x] for id, (x, _) in texts.items()}, {id: x for id, (_, x) in texts.items()})
    tokens = [{id: [" ".join(WORDS.cut(x)) for x in row] for id, row in side.items()} for side in (written, right)]
    if shutil.which("java"):
        for side, ours in zip((written, right), tokens, strict=True):
            official = PTBTokenizer().tokenize({id: [{"caption": x} for x in row] for id, row in side.items()})
            assert official == ours
    for start in range(0, count, 10):
        ids = list(texts)[start : start + 10]
        one, other = ({id: side[id] for id in ids} for side in tokens)
        references = References({id: right[id] for id in ids}, units=WORDS)
        scores = references.score({id: written[id][0] for id in ids})
        expected = [*Bleu(4).compute_score(other, one, verbose=0)[0], Rouge().compute_score(other, one)[0]]
        expected.append(Cider().compute_score(other, one)[0])
        assert list(scores.summary().values()) == pytest.approx(expected, abs=1e-9), ids
        resampled = caption_scorer(scores)(np.ones((1, len(ids))))[0]
        assert resampled == pytest.approx(expected, abs=1e-9)


def one_script(text):
    """Leaves out what the module vlm.evaluation.metrics.tokens documents as different in the Java tokenizer."""
    kept = "".join(mark for mark in " ".join(text.split()) if ord(mark) < 0x300 and mark not in "\xad\u0130")
    return kept + " end" if kept else "end"
