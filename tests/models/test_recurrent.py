"""Models before the transformer: equal to plain torch and to equations, packed as alone, cached as whole."""

import pytest
import torch
from torch import nn

from vlm.models.context import Context
from vlm.models.neural_lm import NeuralLanguageModel
from vlm.models.recurrent import BahdanauDecoder, RecurrentDecoder, RecurrentEncoder, ShowAttendTellDecoder

V, D, C, MAX_LEN = 13, 8, 6, 20
SIZES = {"vocab_size": V, "max_len": MAX_LEN, "dim": D}
ATTENTION = SIZES | {"attention_dim": 5, "context_dim": C}
SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 0], [1, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0]])
DECODERS = {
    "window": lambda: NeuralLanguageModel(vocab_size=V, max_len=MAX_LEN, order=4, embed_dim=5, dim=D),
    "window, not direct": lambda: NeuralLanguageModel(
        vocab_size=V, max_len=MAX_LEN, order=2, embed_dim=5, dim=D, direct=False
    ),
    "lstm": lambda: RecurrentDecoder(**SIZES, depth=2),
    "gru": lambda: RecurrentDecoder(**SIZES, cell="gru"),
    "seq2seq": lambda: RecurrentDecoder(**SIZES, depth=2, context_dim=C, source="backward"),
    "seq2seq, both": lambda: RecurrentDecoder(**SIZES, cell="gru", context_dim=C, source="both"),
    "bahdanau": lambda: BahdanauDecoder(**ATTENTION),
    "bahdanau, lstm": lambda: BahdanauDecoder(**ATTENTION, cell="lstm"),
    "show, attend and tell": lambda: ShowAttendTellDecoder(**ATTENTION),
}
READERS = [name for name, build in DECODERS.items() if build().context_dim]


@pytest.fixture(params=DECODERS)
def decoder(request):
    return DECODERS[request.param]().double().eval()


def context_of(decoder, rows, lengths=None):
    if decoder.context_dim is None:
        return None
    mask = None if lengths is None else torch.arange(7) < torch.tensor(lengths)[:, None]
    return Context(torch.randn(rows, 7, C).double(), mask)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_the_window_model_is_bengios_equation():
    model = DECODERS["window"]().double()
    tokens = torch.randint(V, (1, 9))
    vectors = torch.cat([torch.zeros(3, 5).double(), model.token_embed.weight[tokens[0]]])
    own = model.vocabulary_head.own
    inner, direct = own.weight.split([D, 15], 1)
    for at in range(9):
        x = torch.cat([vectors[at + 3], vectors[at + 2], vectors[at + 1]])
        y = own.bias + direct @ x + inner @ torch.tanh(model.hidden.bias + model.hidden.weight @ x)
        close(model.head(model(tokens))[0, at], y)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_layers_are_torchs(cell):
    ours = RecurrentDecoder(**SIZES, depth=2, cell=cell).double()
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](D, D, num_layers=2, batch_first=True).double()
    for at, layer in enumerate(ours.layers):
        for name, weight in layer.named_parameters():
            getattr(theirs, name.replace("l0", f"l{at}")).data.copy_(weight)
    tokens = torch.randint(V, (3, 9))
    close(ours(tokens), theirs(ours.token_embed(tokens))[0])


def test_packed_texts_equal_each_alone(decoder):
    context = context_of(decoder, 2, [7, 4])
    tokens = torch.randint(V, SEGMENTS.shape)
    packed = decoder(tokens, SEGMENTS, context)
    assert packed.shape[:2] == SEGMENTS.shape
    for row, segments in enumerate(SEGMENTS):
        own = None if context is None else context.rows(slice(row, row + 1))
        for segment in range(1, int(segments.max()) + 1):
            where = segments == segment
            close(packed[row, where][None], decoder(tokens[row : row + 1, where], None, own))


@pytest.mark.parametrize("directions", ["both", "forward", "backward"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_encoder_reads_each_text_alone_as_torch_does(directions, cell):
    encoder = RecurrentEncoder(**SIZES, depth=2, cell=cell, directions=directions).double().eval()
    tokens = torch.randint(V, SEGMENTS.shape)
    context = encoder(tokens, SEGMENTS)
    assert torch.equal(context.mask, SEGMENTS != 0)
    for row, segments in enumerate(SEGMENTS):
        for segment in range(1, int(segments.max()) + 1):
            where = segments == segment
            x = encoder.token_embed(tokens[row : row + 1, where])
            x = x.flip(1) if directions == "backward" else x
            for layer in encoder.layers:
                x = layer(x)[0]
            close(context.states[row, where][None], x.flip(1) if directions == "backward" else x)


def test_the_bridge_takes_what_the_encoder_ended_with():
    encoder = RecurrentEncoder(vocab_size=V, max_len=MAX_LEN, dim=C, directions="both").double()
    decoder = DECODERS["seq2seq, both"]().double()
    tokens, segments = torch.randint(V, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    context = encoder(tokens, segments)
    for row, length in enumerate((6, 4)):
        _, (last, _) = encoder.layers[0](encoder.token_embed(tokens[row : row + 1, :length]))
        close(decoder.bridge.summary(context)[row], torch.cat([last[0, 0], last[1, 0]]))


def weights_of(cell):
    return [getattr(cell, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def soft_search(decoder, s, states):
    """The equations of Bahdanau et al. (2015), appendix A.1.2, a state at a time."""
    attention = decoder.search
    energies = [
        attention.score.weight[0]
        @ torch.tanh(attention.query.weight @ s + attention.query.bias + attention.key.weight @ h)
        for h in states
    ]
    weights = torch.stack(energies).softmax(0)
    return sum(weight * h for weight, h in zip(weights, states, strict=True))


def test_bahdanaus_decoder_is_its_equations():
    decoder = DECODERS["bahdanau"]().double()
    states, tokens = torch.randn(4, C).double(), torch.randint(V, (5,))
    hidden = decoder(tokens[None], None, Context(states[None]))[0]
    w_ih, w_hh, b_ih, b_hh = weights_of(decoder.cell)
    bridge = decoder.bridge.projections[0]
    summary = torch.cat([states[-1, : C // 2], states[0, C // 2 :]])  # both directions
    s = torch.tanh(bridge.weight @ summary + bridge.bias)
    for at, token in enumerate(tokens):
        y = decoder.token_embed(token)
        c = soft_search(decoder, s, states)
        gates, own = w_ih @ torch.cat([y, c]) + b_ih, w_hh @ s + b_hh
        r, z = torch.sigmoid(gates[:D] + own[:D]), torch.sigmoid(gates[D : 2 * D] + own[D : 2 * D])
        new = torch.tanh(gates[2 * D :] + r * own[2 * D :])
        s = (1 - z) * new + z * s
        t = decoder.output.weight @ torch.cat([s, y, c]) + decoder.output.bias
        close(hidden[at], torch.stack([torch.maximum(t[2 * j], t[2 * j + 1]) for j in range(D)]))


def test_show_attend_and_tell_is_its_equations():
    decoder = DECODERS["show, attend and tell"]().double()
    states, tokens = torch.randn(4, C).double(), torch.randint(V, (5,))
    hidden = decoder(tokens[None], None, Context(states[None]))[0]
    w_ih, w_hh, b_ih, b_hh = weights_of(decoder.cell)
    h, c = (torch.tanh(one.weight @ states.mean(0) + one.bias) for one in decoder.bridge.projections)
    for at, token in enumerate(tokens):
        y = decoder.token_embed(token)
        z = torch.sigmoid(decoder.gate.weight[0] @ h + decoder.gate.bias) * soft_search(decoder, h, states)
        i, f, g, o = (w_ih @ torch.cat([y, z]) + b_ih + w_hh @ h + b_hh).split(D)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        l_h, l_z = decoder.from_state, decoder.from_context
        close(hidden[at], y + l_h.weight @ h + l_h.bias + l_z.weight @ z)


@pytest.mark.parametrize("chunks", [[1] * 8, [3, 1, 4]])
@pytest.mark.parametrize("beams", [1, 3])
def test_steps_equal_whole_rows(decoder, chunks, beams):
    context = context_of(decoder, 2, [5, 7])
    tokens = torch.randint(V, (2 * beams, 8))
    copies = None if context is None else context.rows(torch.arange(2).repeat_interleave(beams))
    state = decoder.start(context, rows=2 * beams, max_len=8, beams=beams)
    stepped = torch.cat([decoder.step(part, state) for part in tokens.split(chunks, 1)], 1)
    assert state.length == 8
    close(stepped, decoder(tokens, None, copies))


def test_texts_of_other_lengths_begin_later(decoder):
    context, starts = context_of(decoder, 3), torch.tensor([0, 3, 5])
    tokens = torch.randint(V, (3, 8))
    state = decoder.start(context, rows=3, max_len=8, starts=starts, beams=1)
    stepped = decoder.step(tokens, state)
    for row, start in enumerate(starts.tolist()):
        own = None if context is None else context.rows(slice(row, row + 1))
        close(stepped[row : row + 1, start:], decoder(tokens[row : row + 1, start:], None, own))


def test_rows_are_replaced_kept_and_beams_reordered(decoder):
    """Row 1 of 2 gets another text, with another context, after two steps; its beams then change places."""
    context, other = context_of(decoder, 2), context_of(decoder, 1, [3])
    tokens, later = torch.randint(V, (4, 2)), torch.randint(V, (4, 3))
    state = decoder.start(context, rows=4, max_len=8, beams=2)
    decoder.step(tokens, state)
    state.replace(torch.tensor([1]), decoder.read(other))
    decoder.step(later[:, :1], state)
    state.reorder_beams(torch.tensor([[0, 1], [1, 1]]))
    state.select(torch.tensor([1]))
    stepped = decoder.step(later[2:, 1:], state)
    for beam in range(2):
        history = torch.cat([later[3:4, :1], later[2 + beam : 3 + beam, 1:]], 1)
        close(stepped[beam : beam + 1], decoder(history, None, other)[:, 1:])
