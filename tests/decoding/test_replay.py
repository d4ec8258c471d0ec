"""A decode step that can be recorded once and replayed: the same texts, by steps that are all alike."""

from dataclasses import replace

import pytest
import torch
from emulated_graph import emulate
from searches import BOS, IMAGES, MAX_LEN, POSITIONS, SEARCHES, V, check_same_texts, common_token, run
from torch.utils._python_dispatch import TorchDispatchMode
from waits import Waits, wait_of

from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.loop import _Loop, decode_batch
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.nn.step.replay import FixedDecodeState, StepperPool

LONG = 24  # steps, so that most of them are replayed
ALL_RULES = Rules(no_repeat_ngram=2, repetition_penalty=1.2, min_tokens=2, banned=((3,), (4, 5)), prefix=(6,))
REQUIRED = (((8, 9), (10,)), ((9, 9, 11),))
LONG_SEARCHES = {
    **SEARCHES,
    "all rules": {"rules": ALL_RULES},
    "sample, all rules": {"sampling": Sampling(), "results": 2, "rules": ALL_RULES},
    "required, all rules": {"beam": 4, "results": 2, "rules": replace(ALL_RULES, required=REQUIRED)},
    "sample, required": {"sampling": Sampling(), "results": 2, "rules": Rules(prefix=(6,), required=REQUIRED)},
    "groups, all rules": {"beam": 4, "groups": 2, "results": 3, "rules": ALL_RULES},
}
KINDS = [(name, positions, {}) for name in LONG_SEARCHES for positions in POSITIONS]


@pytest.fixture(params=["cross", pytest.param("prefix", marks=pytest.mark.slow)])
def kind(request):
    return request.param  # hidden states are not recorded


@pytest.fixture
def context(make_context):
    return make_context(IMAGES)


def test_texts_of_different_lengths_go_on(make_decoder):
    decoder = make_decoder(V, MAX_LEN, context=False)
    starts, tokens = torch.tensor([0, 2, 4]), torch.randint(V, (3, MAX_LEN))
    grown, fixed = (decoder.start(None, rows=3, max_len=MAX_LEN, starts=starts) for _ in range(2))
    for state in (grown, fixed):
        decoder.step(tokens[:, :6], state)
    fixed = FixedDecodeState(fixed)
    assert fixed.length == 6
    for at in range(6, MAX_LEN):
        if at == 7:
            tokens = tokens[[2, 0]]
            for state in (grown, fixed):
                state.select(torch.tensor([2, 0]))
        last = tokens[:, at : at + 1]
        torch.testing.assert_close(decoder.step(last, fixed), decoder.step(last, grown), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_cache_of_another_type_takes_tokens_in(make_decoder, context):
    """As on a CPU in bfloat16, whose keys and values are kept in 32 bits."""
    decoder = make_decoder(V, MAX_LEN).bfloat16()
    low, sizes = type(context)(context.states.bfloat16(), context.mask), {"rows": IMAGES, "max_len": MAX_LEN}
    grown, fixed = decoder.start(low, **sizes), FixedDecodeState(decoder.start(low, **sizes))
    assert fixed.caches[0].keys.dtype == torch.float32
    for _ in range(3):
        tokens = torch.randint(V, (IMAGES, 1))
        torch.testing.assert_close(decoder.step(tokens, fixed), decoder.step(tokens, grown), rtol=0, atol=0.05)


class LaunchRecorder(TorchDispatchMode):
    """Records what a step launches: operations, and for the tensors that they take sizes and where they lie."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.calls = kept, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert wait_of(func, args) is None
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        places = [tensor.data_ptr() if tensor.data_ptr() in self.kept else None for tensor in tensors]
        numbers = [leaf for leaf in flat if isinstance(leaf, int | float)]
        self.calls.append((str(func), [tuple(tensor.shape) for tensor in tensors], places, numbers))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("beams", [1, 3])
@torch.inference_mode()
def test_every_step_launches_the_same(make_decoder, context, positions, beams):
    decoder = make_decoder(V, MAX_LEN, positions=POSITIONS[positions]())
    state = FixedDecodeState(decoder.start(context, rows=IMAGES * beams, max_len=MAX_LEN, beams=beams))
    held = [state.now, state.starts, state.slots, state.mask, state.beam_ancestors]
    held += [cache.keys for cache in state.caches]
    kept = {tensor.data_ptr() for tensor in held if tensor is not None}
    assert len(kept) == 4 + (beams > 1) + len(state.caches)
    steps = []
    for step in range(MAX_LEN + 3):  # past the end of the ring
        with LaunchRecorder(kept) as launched:
            decoder.step(torch.full((IMAGES * beams, 1), BOS), state)
        state.reorder_beams(torch.randint(beams, (IMAGES, beams)))
        state.num_steps += 1
        if step == 4:
            rows = torch.tensor([2, 5])
            state.replace(rows, decoder.read(context.rows(rows)))
        steps.append(launched.calls)
    assert len(steps[0]) > 20
    assert all(calls == steps[0] for calls in steps[1:])


def positions_of(name):
    sizes = {"relative": {"num_heads": 2, "max_len": LONG}, "each layer": {"head_dim": 8, "max_len": LONG}}
    return type(made)(**sizes[name]) if (made := POSITIONS[name]()) and name in sizes else made


BLOCKS = [{"num_kv_heads": 1}, {"qk_norm": True}, {"pre_norm": False}, {"activation": "swiglu", "norm": "rms"}]


@pytest.mark.sample(slow=24)
@pytest.mark.parametrize("name, positions, blocks", [*KINDS, *(("beam", "learned", b) for b in BLOCKS)])
@pytest.mark.parametrize("rows", [4, IMAGES])  # with and without others that join
def test_replayed_texts_are_those_of_launched_steps(
    make_decoder, context, name, positions, blocks, rows, monkeypatch, caplog
):
    decoder = make_decoder(V, LONG, sharpness=0.5, positions=positions_of(positions), **blocks)
    decoding, end = Decoding(**LONG_SEARCHES[name]), {"eos_id": common_token(decoder, context)}
    truth = run(decoder, context, decoding, rows=rows, **end)
    counts = emulate(monkeypatch)
    check_same_texts(run(decoder, context, decoding, rows=rows, **end), truth)
    assert counts["captures"] == 1 and counts["replays"] > 0 and not caplog.records


@pytest.mark.parametrize("positions", POSITIONS)
def test_continued_texts_are_replayed(make_decoder, positions, monkeypatch, caplog):
    decoder = make_decoder(V, LONG, context=False, positions=positions_of(positions))
    prompts = [torch.randint(2, V, (length,)).tolist() for length in (1, 3, 7, 12, 2, 40)]

    def texts(eos_id):
        options = {"sampling": Sampling(), "max_tokens": 60, "eos_id": eos_id, "seed": 1}
        return [[(item.prompt, item.token) for item in step] for step in continue_texts(decoder, prompts, **options)]

    end = texts(-1)[30][0][1]
    truth = texts(end)
    counts = emulate(monkeypatch)
    assert texts(end) == truth
    assert len({len(step) for step in truth}) > 1  # texts have ended
    assert counts["replays"] > 5 and not caplog.records


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 7, 1)])
def test_texts_that_share_prompts_are_replayed(make_decoder, lengths, scored, monkeypatch, caplog):
    decoder = make_decoder(V, LONG, context=False, positions=positions_of("rotary"))
    made = [torch.randint(2, V, (length,)).tolist() for length in lengths]
    sources = [place for place in range(len(made)) for _ in range(3)]
    prompts = [made[source] for source in sources]

    def texts():
        options = {"sampling": Sampling(), "max_tokens": 30, "eos_id": 2, "seed": range(len(prompts)), "top": 2}
        found = [[] for _ in made] if scored else None
        steps = [*continue_texts(decoder, prompts, sources=sources, prompt_scores=found, **options)]
        return [[(item.prompt, item.token) for item in step] for step in steps], found

    truth = texts()
    counts = emulate(monkeypatch)
    assert texts() == truth
    assert counts["replays"] > 5 and not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "beam", "all rules"])
def test_batches_of_an_evaluation_share_a_capture(make_decoder, make_context, name, monkeypatch):
    decoder, contexts = make_decoder(V, LONG, sharpness=0.5), [make_context(5) for _ in range(4)]
    decoding, ends = Decoding(**LONG_SEARCHES[name]), {"bos_id": BOS, "eos_id": 2}
    truth = [decode_batch(decoder, context, decoding, **ends) for context in contexts]
    counts, pool = emulate(monkeypatch), StepperPool()
    for context, texts in zip(contexts, truth, strict=True):
        check_same_texts(decode_batch(decoder, context, decoding, pool=pool, **ends), texts)
    assert counts["captures"] == 1
    decoder.token_embed.weight.data = decoder.token_embed.weight.data.flip(
        0
    )  # elsewhere, as when averages are taken in
    texts = decode_batch(decoder, contexts[0], decoding, pool=pool, **ends)
    assert counts["captures"] == 2
    monkeypatch.undo()
    check_same_texts(texts, decode_batch(decoder, contexts[0], decoding, **ends))


def test_a_capture_that_fails_gives_its_stream_back(make_decoder, context, monkeypatch, caplog):
    decoder, decoding = make_decoder(V, LONG, sharpness=0.5), Decoding()
    end = {"eos_id": common_token(decoder, context)}
    truth = run(decoder, context, decoding, **end)
    counts, streams = emulate(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    head = decoder.head
    decoder.head = lambda hidden: head(hidden) * float(hidden.isfinite().all())  # a wait
    check_same_texts(run(decoder, context, decoding, **end), truth)
    assert counts == {"captures": 1, "resets": 1} and streams == ["the stream before"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_SEARCHES)
def test_no_step_waits_for_the_device(make_decoder, context, name, monkeypatch):
    """Waits are counted in all but `_start`, and `_read_ended`, which reads what eight steps have chosen."""
    decoder = make_decoder(V, LONG, sharpness=0.5)
    decoding, end = Decoding(**LONG_SEARCHES[name]), {"eos_id": common_token(decoder, context)}
    emulate(monkeypatch)
    advance, settle, total = _Loop.advance, _Loop._read_ended, []
    start = _Loop._start

    def start_counted(loop):
        if loop.steps is None and not start(loop):
            return None
        loop.waits = Waits()
        with loop.waits as counts:
            found = advance(loop)
        total.append(counts)
        return found

    def settle_uncounted(loop):
        loop.waits.__exit__(None, None, None)
        found = settle(loop)
        loop.waits.__enter__()
        return found

    monkeypatch.setattr(_Loop, "advance", start_counted)
    monkeypatch.setattr(_Loop, "_read_ended", settle_uncounted)
    run(decoder, context, decoding, **end)
    assert sum(map(len, total)) == 0, total


@pytest.mark.gpu
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", SEARCHES)
def test_replayed_texts_are_those_of_a_cpu(make_decoder, context, name, positions, monkeypatch, caplog):
    decoder = make_decoder(V, MAX_LEN, sharpness=0.5, positions=POSITIONS[positions]())
    decoding, end = Decoding(**SEARCHES[name]), {"eos_id": common_token(decoder, context)}
    truth = run(decoder, context, decoding, rows=4, **end)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    moved = type(context)(context.states.cuda(), context.mask.cuda())
    check_same_texts(run(decoder.cuda(), moved, decoding, rows=4, device="cuda", **end), truth)
    assert replays and not caplog.records


@torch.inference_mode()
def test_a_step_takes_one_token(make_decoder, context):
    decoder = make_decoder(V, MAX_LEN)
    state = FixedDecodeState(decoder.start(context, rows=IMAGES, max_len=MAX_LEN))
    with pytest.raises(ValueError, match="1 token a step, not 2"):
        decoder.step(torch.full((IMAGES, 2), BOS), state)
