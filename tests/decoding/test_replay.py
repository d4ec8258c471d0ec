"""A decode step that can be recorded once and replayed: the same texts, by steps that are all alike."""

import pytest
import torch
from searches import BOS, IMAGES, MAX_LEN, POSITIONS, SEARCHES, V, common_token, run, same
from torch.utils._python_dispatch import TorchDispatchMode

from vlm.decoding.options import Decoding
from vlm.nn.step.fixed_state import FixedDecodeState


@pytest.fixture
def context(make_context):
    return make_context(IMAGES)


class Fixed:
    """A decoder with the state that recording needs; each step is taken, as if it were replayed."""

    def __init__(self, decoder):
        self.decoder, self.max_len = decoder, decoder.max_len
        self.keys_values, self.head = decoder.keys_values, decoder.head

    def start(self, context, **sizes):
        return FixedDecodeState(self.decoder.start(context, **sizes))

    def step(self, tokens, state):
        state.taken += 1
        return self.decoder.step(tokens, state)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", SEARCHES)
def test_texts_are_those_of_growing_states(make_decoder, context, name, positions):
    decoder = make_decoder(V, MAX_LEN, sharpness=0.5, positions=POSITIONS[positions]())
    decoding, end = Decoding(**SEARCHES[name]), {"eos_id": common_token(decoder, context)}
    truth = run(decoder, context, decoding, rows=4, **end)
    same(run(Fixed(decoder), context, decoding, rows=4, **end), truth)


def test_texts_of_different_lengths_go_on(make_decoder):
    decoder = make_decoder(V, MAX_LEN, context_dim=None)
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


class Launched(TorchDispatchMode):
    """Records what a step launches: operations, and for the tensors that they take sizes and where they lie."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.calls = kept, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
    held = [state.now, state.starts, state.slots, state.mask, state.lineage, *(cache.keys for cache in state.caches)]
    kept = {tensor.data_ptr() for tensor in held if tensor is not None}
    assert len(kept) == 4 + (beams > 1) + len(state.caches)
    steps = []
    for step in range(MAX_LEN + 3):  # past the end of the ring
        with Launched(kept) as launched:
            decoder.step(torch.full((IMAGES * beams, 1), BOS), state)
        state.descend(torch.randint(beams, (IMAGES, beams)))
        state.taken += 1
        if step == 4:
            rows = torch.tensor([2, 5])
            news = decoder.keys_values(type(context)(context.states[rows], context.mask[rows]))
            state.replace(rows, news, context.mask[rows])
        steps.append(launched.calls)
    assert len(steps[0]) > 20
    assert all(calls == steps[0] for calls in steps[1:])
    assert not any(name in call[0] for call in steps[0] for name in ("_local_scalar_dense", "nonzero"))


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
    same(run(decoder.cuda(), moved, decoding, rows=4, device="cuda", **end), truth)
    assert replays and not caplog.records


@torch.inference_mode()
def test_a_step_takes_one_token(make_decoder, context):
    decoder = make_decoder(V, MAX_LEN)
    state = FixedDecodeState(decoder.start(context, rows=IMAGES, max_len=MAX_LEN))
    with pytest.raises(ValueError, match="1 token a step, not 2"):
        decoder.step(torch.full((IMAGES, 2), BOS), state)
