"""Answers that are parts of a text: scores as BERT's, spans by brute force, long texts in windows."""

import pytest
import torch
from bert import copy_weights
from transformers import BertConfig, BertForQuestionAnswering

from vlm.data.text.inputs import EncodedSample, Input, input_rows
from vlm.data.text.passages import PassageField, find_words
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.errors import UserError
from vlm.models.classifier import TokenClassifier
from vlm.models.text_encoder import TextEncoder
from vlm.tasks.span_answering.predict import Span, choose_answer, likeliest_spans, span_scores
from vlm.tasks.span_answering.train import SpanAnswering

V, MAX_LEN, D, DEPTH, N = 31, 12, 24, 2, 3
# A question of two tokens and passages of three and five words, one of them of three pieces.
ROWS = [
    Input([1, 5, 6, 2, 7, 8, 9, 2], [0, 0, 0, 0, 1, 1, 1, 1], [0, 4, 5, 6]),
    Input([1, 5, 6, 2, 9, 10, 11, 12, 13, 14, 15, 2], [0] * 4 + [1] * 8, [0, 4, 5, 8, 9, 10]),
]


@pytest.fixture
def rows():
    return input_rows([EncodedSample(ROWS)], pad_id=0)


@pytest.fixture
def models(scramble):
    """BERT for question answering, and ours with its weights."""
    sizes = {"vocab_size": V, "max_position_embeddings": MAX_LEN, "hidden_size": D, "num_hidden_layers": DEPTH}
    config = BertConfig(**sizes, num_attention_heads=N, intermediate_size=4 * D, type_vocab_size=2)
    theirs = scramble(BertForQuestionAnswering(config))
    options = {"pre_norm": False, "embed_norm": True, "token_types": 2, "norm_eps": 1e-12}
    encoder = TextEncoder(vocab_size=V, max_len=MAX_LEN, dim=D, depth=DEPTH, num_heads=N, **options)
    ours = TokenClassifier(encoder=copy_weights(encoder, theirs.bert), num_classes=2)
    ours.head.load_state_dict(theirs.qa_outputs.state_dict())
    return theirs, ours.eval()


def test_equals_bert_for_question_answering(models, rows):
    """Scores, and the loss where every token of a row may be a start or an end."""
    theirs, ours = models
    read = (part[:, :MAX_LEN] for part in (rows.tokens, (rows.segments != 0).long(), rows.types))
    truth = theirs(**dict(zip(("input_ids", "attention_mask", "token_type_ids"), read, strict=True)))
    scores = span_scores(ours, rows)
    for number, row in enumerate(ROWS):
        places = list(row.places)
        torch.testing.assert_close(scores[number, places, 0], truth.start_logits[number, places], rtol=0, atol=1e-5)
        torch.testing.assert_close(scores[number, places, 1], truth.end_logits[number, places], rtol=0, atol=1e-5)
        others = sorted({*range(16)} - {*places})
        assert (scores[number, others] == -torch.inf).all()
    whole = input_rows([EncodedSample([Input(ROWS[1].ids, ROWS[1].types, range(12))])], pad_id=0)
    starts, ends = torch.tensor([8]), torch.tensor([9])
    more = {"start_positions": starts, "end_positions": ends}
    truth = theirs(whole.tokens[:, :12], token_type_ids=whole.types[:, :12], **more).loss
    loss = torch.nn.functional.cross_entropy(span_scores(ours, whole), torch.stack([starts, ends], 1))
    torch.testing.assert_close(loss, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("longest", [1, 2, 30])
def test_the_likeliest_span_is_that_of_all_spans(longest):
    torch.manual_seed(longest)
    for _ in range(50):
        scores = torch.full((3, 9, 2), -torch.inf)
        places = [sorted({0, *torch.randint(2, 9, (count,)).tolist()}) for count in (1, 4, 8)]
        for row, own in enumerate(places):
            scores[row, own] = torch.randn(len(own), 2)
        for row, (own, found) in enumerate(zip(places, likeliest_spans(scores, longest=longest), strict=True)):
            spans = [(a, b) for a in own[1:] for b in own[1:] if 0 <= b - a < longest]
            value = {(a, b): float(scores[row, a, 0] + scores[row, b, 1]) for a, b in [*spans, (0, 0)]}
            start, end = max(spans, key=value.__getitem__)
            assert (found.first, found.last) == (own.index(start) - 1, own.index(end) - 1)
            assert found.score == pytest.approx(value[start, end], abs=1e-5)
            assert found.abstaining == pytest.approx(value[0, 0], abs=1e-5)
            start_share, end_share = scores[row].softmax(0)[[start, end], [0, 1]].tolist()
            assert found.probability == pytest.approx(start_share * end_share, abs=1e-5)


def test_an_answer_is_that_of_the_best_window_and_none_where_that_scores_higher(models):
    text = "red green blue"
    windows = [(0, Span(0, 1, 3.0, 1.0, 0.5, 0.1)), (1, Span(0, 1, 4.0, 3.5, 0.4, 0.2))]
    words = find_words(text)
    assert choose_answer(text, words, windows, abstains=True) == ("green blue", 4, 0.4)
    doubtful = [windows[0], (1, windows[1][1]._replace(score=2.0)), (2, Span(0, 0, 0.0, 9.0, 0.1, 0.9))]
    assert choose_answer(text, words, doubtful, abstains=True) == ("red green", 0, 0.5)
    none = [(0, one._replace(abstaining=5.0)) for _, one in windows]
    assert choose_answer(text, words, none, abstains=True) == ("", -1, 0.1)
    assert choose_answer(text, words, none, abstains=False).text == "red green"
    no_words = input_rows([EncodedSample([Input([1, 2, 2], [0, 0, 1], [0])])], pad_id=0)
    (span,) = likeliest_spans(span_scores(models[1], no_words), longest=30)
    assert choose_answer(" ", [], [(0, span)], abstains=False).text == ""


def test_a_model_without_a_type_for_shared_words_is_refused(models):
    field = PassageField(tokenizer=ByteTokenizer(), max_len=64, stride=32, marks_shared=True)
    with pytest.raises(UserError, match=r"marks_shared=true needs 3 token types, but the model has 2"):
        SpanAnswering(model=models[1], fields={"questions": field}, seed=0)
