"""What is found for an image depends on nothing but the image, its id and the options."""

import json
from itertools import groupby

import numpy as np
import pytest
import torch
from searches import BOS, IMAGES, MAX_LEN, POSITIONS, SEARCHES, V, check_same_texts, common_token, part, run

from vlm.decoding.beam import BeamSearch
from vlm.decoding.beam_row import as_json
from vlm.decoding.constraints import Rules
from vlm.decoding.loop import decode, decode_batch
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.nn.step.replay import Stepper
from vlm.randomness import numpy_rng


@pytest.fixture
def context(make_context):
    return make_context(IMAGES)


@pytest.mark.sample(slow=12)
@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_rows_queue_and_order_change_nothing(make_decoder, context, name, positions):
    decoder = make_decoder(V, MAX_LEN, sharpness=0.5, positions=POSITIONS[positions]())
    decoding, end = Decoding(**SEARCHES[name]), {"eos_id": common_token(decoder, context)}
    alone = run(decoder, context, decoding, chunk=1, rows=1, **end)
    if positions == "learned" and name in ("greedy", "beam", "sample"):  # so that images leave at different times
        assert len({len(row[0].tokens) for row in alone}) > 1
    check_same_texts(run(decoder, context, decoding, chunk=IMAGES, rows=IMAGES, **end), alone)
    check_same_texts(run(decoder, context, decoding, chunk=5, rows=2, **end), alone)
    check_same_texts(run(decoder, context, decoding, chunk=2, rows=5, order=list(range(IMAGES))[::-1], **end), alone)


def test_one_beam_is_greedy_search(make_decoder, context, monkeypatch):
    decoder, decoding = make_decoder(V, MAX_LEN, sharpness=0.5), Decoding(length_penalty=0.0)
    end = {"eos_id": common_token(decoder, context)}
    truth = run(decoder, context, decoding, **end)
    monkeypatch.setattr("vlm.decoding.loop.StepwiseSearch", BeamSearch)
    check_same_texts(run(decoder, context, decoding, **end), truth)


@pytest.mark.slow
@torch.no_grad()
def test_samples_equal_drawing_without_a_cache(make_decoder, context):
    decoder = make_decoder(V, MAX_LEN)
    sampling = Sampling(temperature=0.9, top_p=0.95)
    end = common_token(decoder, context)
    found = run(decoder, context, Decoding(sampling=sampling, results=2, seed=5), eos_id=end)
    for place in range(IMAGES):
        for column in range(2):
            draws = numpy_rng(5, "caption", f"image {place}", column).random(MAX_LEN)
            text = [BOS]
            for draw in draws:
                logits = decoder.head(decoder(torch.tensor([text]), None, part(context, [place])))[:, -1]
                cumulative = np.cumsum(sampling.probabilities(logits.double())[0].numpy())
                text.append(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")))
                if text[-1] == end:
                    break
            assert found[place][column].tokens == text[1:]


@pytest.mark.parametrize("name", ["greedy", "sample"])
def test_the_host_may_lag_behind(make_decoder, context, name, monkeypatch):
    import vlm.decoding.loop as engine

    decoder, decoding = make_decoder(V, MAX_LEN, sharpness=0.5), Decoding(**SEARCHES[name])
    end = {"eos_id": common_token(decoder, context)}
    truth = run(decoder, context, decoding, **end)
    begin = engine._Loop.__init__

    def lagging(self, *given):
        begin(self, *given)
        self.pace = 4

    monkeypatch.setattr(engine._Loop, "__init__", lagging)
    check_same_texts(run(decoder, context, decoding, **end), truth)


def test_finished_images_make_room(make_decoder, context):
    decoder, fed = make_decoder(V, MAX_LEN, sharpness=0.5), []
    end = common_token(decoder, context)
    step = decoder.step

    def counting(tokens, state):
        fed.append(len(tokens))
        return step(tokens, state)

    decoder.step = counting
    found = run(decoder, context, Decoding(), rows=4, eos_id=end)
    needed = sum(len(row[0].tokens) for row in found)
    assert max(fed) == 4
    assert needed <= sum(fed) <= needed + 4 * MAX_LEN // 2


RULES = {"no_repeat_ngram": 2, "min_tokens": 1, "repetition_penalty": 1.3, "banned": ((3, 4), (5, 6, 7))}


@pytest.mark.sample(slow=5)
@pytest.mark.parametrize("options", [{}, {"sampling": Sampling(), "results": 2}, {"beam": 2}])
@pytest.mark.parametrize("names", [tuple(RULES), ("no_repeat_ngram",), ("banned",)])
def test_rules_hold_while_ended_texts_wait_in_their_rows(make_decoder, make_context, names, options):
    """With many rows, texts that ended early wait for longer than a text lasts until others join."""
    decoder, context = make_decoder(V, MAX_LEN, sharpness=0.5), make_context(120)
    rules = Rules(**{name: RULES[name] for name in names})
    decoding, end = Decoding(max_tokens=5, rules=rules, **options), {"eos_id": common_token(decoder, context)}
    few = run(decoder, context, decoding, rows=2, **end)
    check_same_texts(run(decoder, context, decoding, rows=40, **end), few)


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(beam=2)])
def test_nothing_to_do(make_decoder, decoding):
    assert list(decode(make_decoder(V, MAX_LEN), [], decoding, bos_id=BOS, eos_id=2, rows=4)) == []


def test_without_log_probabilities_the_texts_are_the_same(make_decoder, context):
    decoder = make_decoder(V, MAX_LEN)
    truth, found = (run(decoder, context, Decoding(logprobs=wanted), eos_id=2) for wanted in (True, False))
    assert [row[0].tokens for row in found] == [row[0].tokens for row in truth]
    assert not any(row[0].logprobs for row in found)


def test_the_tree_holds_every_text(make_decoder, context):
    decoder, trees = make_decoder(V, MAX_LEN, sharpness=0.5), {}
    end = common_token(decoder, context)
    texts = decode_batch(decoder, context, Decoding(beam=3, results=3), bos_id=BOS, eos_id=end, trees=trees)
    for place, found in enumerate(texts):
        tree = json.loads(json.dumps(as_json(trees[place], piece=str)))
        nodes = {node["id"]: node for node in tree["nodes"]}
        paths = []
        for node in nodes.values():
            path, at = [], node
            while at is not None:
                path.append(int(at["token"]))
                at = nodes.get(at["parent"])
            paths.append(path[::-1])
            if len(path) > 1:
                before = nodes[node["parent"]]
                assert before["kept"] and before["step"] == node["step"] - 1
                assert node["total"] == pytest.approx(before["total"] + node["logprob"], abs=1e-5)
        assert all(text.tokens in paths for text in found)


@pytest.mark.parametrize(
    ("decoding", "columns"), [(Decoding(beam=3), 3), (Decoding(sampling=Sampling(), results=2), 2)]
)
def test_texts_side_by_side_are_bounded_and_change_nothing(decoding, columns, make_decoder, context, monkeypatch):
    decoder, widths = make_decoder(V, MAX_LEN, sharpness=0.5), []
    truth = run(decoder, context, decoding, eos_id=2)
    monkeypatch.setattr("vlm.decoding.loop.TEXTS", 2 * columns + 1)
    step = decoder.step
    monkeypatch.setattr(decoder, "step", lambda tokens, state: (widths.append(len(tokens)), step(tokens, state))[1])
    check_same_texts(run(decoder, context, decoding, eos_id=2), truth)
    assert max(widths) == 2 * columns


def test_a_chunk_without_ids_ends_nothing_that_runs(make_decoder, context):
    """None waits now: texts that run go on, later images join them, and the end is where none runs and none waits."""
    decoder, decoding = make_decoder(V, MAX_LEN, sharpness=0.5), Decoding()
    end = common_token(decoder, context)
    truth = run(decoder, context, decoding, eos_id=end)

    def chunks():
        for place in range(0, IMAGES, 3):
            places = [place, place + 1, place + 2]
            yield [f"image {one}" for one in places], part(context, places)
            yield (), None
            yield (), None

    queue, texts, came = chunks(), {}, 0
    while came < IMAGES:
        found = dict(decode(decoder, queue, decoding, bos_id=BOS, eos_id=end, rows=4))
        texts |= {came + place: rows for place, rows in found.items()}
        came += len(found)
    check_same_texts([texts[place] for place in range(IMAGES)], truth)


@pytest.mark.parametrize("name", ["greedy", "sample", "beam"])
def test_texts_are_shown_as_they_grow(make_decoder, context, name):
    """Each step adds one token to what was shown; beams, of which any may be dropped, show none."""
    decoder, decoding, shown = make_decoder(V, MAX_LEN, sharpness=0.5), Decoding(**SEARCHES[name]), {}

    def watch(place, texts):
        shown.setdefault(place, []).append([list(text) for text in texts])
        return True

    end = common_token(decoder, context)
    chunks = [(range(at, at + 3), part(context, range(at, at + 3))) for at in range(0, IMAGES, 3)]
    found = dict(decode(decoder, chunks, decoding, bos_id=BOS, eos_id=end, rows=4, watch=watch))
    assert set(found) == set(shown) == set(range(IMAGES))
    for place, views in shown.items():
        texts = [] if name == "beam" else [text.tokens for text in found[place]]
        assert [view for view, _ in groupby(views)] == [
            [text[:length] for text in texts] for length in range(1, 1 + max(map(len, texts), default=1))
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_an_unwanted_text_gives_up_its_row(make_decoder, context, name, monkeypatch):
    decoder, decoding = make_decoder(V, MAX_LEN, sharpness=0.5), Decoding(**SEARCHES[name])
    truth, steps, real = run(decoder, context, decoding, eos_id=-1, rows=1), [], Stepper.logits
    monkeypatch.setattr(Stepper, "logits", lambda *args: steps.append(1) or real(*args))
    run(decoder, context, decoding, eos_id=-1, rows=1)
    whole, unwanted = len(steps), {0, 3, 4, IMAGES - 1}
    steps.clear()
    chunks = [(range(IMAGES), context)]

    def watch(place, texts):
        return place not in unwanted

    found = dict(decode(decoder, chunks, decoding, bos_id=BOS, eos_id=-1, rows=1, watch=watch))
    assert {place for place, texts in found.items() if not texts} == unwanted
    check_same_texts(
        [found[place] for place in range(IMAGES) if place not in unwanted],
        [truth[place] for place in range(IMAGES) if place not in unwanted],
    )
    assert len(steps) == whole * (IMAGES - len(unwanted)) // IMAGES + len(unwanted)  # one step each
