"""Text to text against nn.Transformer and Hugging Face's models, and translation's three attentions by hand."""

import pytest
import torch
from torch import nn

from vlm.models.context import Context, concat_batches
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import TextToText, VisionLanguageModel, encode_in_parts
from vlm.models.text_encoder import TextEncoder
from vlm.nn.attention import recorded

V, D, N, MAX_LEN, BOS, EOS = 31, 24, 3, 16, 1, 2
TEXTS = torch.randint(3, V, (4, 9), generator=torch.Generator().manual_seed(0))
SEGMENTS = (torch.arange(9) < torch.tensor([9, 4, 7, 2])[:, None]).long()  # texts of 9, 4, 7 and 2 tokens
TOKENS = torch.randint(V, (4, 7), generator=torch.Generator().manual_seed(1))


def text_to_text(*, decoder=None, encoder=None, **options):
    sizes = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": 2, "num_heads": N} | options
    encoder = TextEncoder(**sizes | (encoder or {}))
    return TextToText(encoder=encoder, decoder=Decoder(**sizes, context_dim=sizes["dim"], **decoder or {}))


def drawn(weights):
    """Attention weights of one head (L, S) as rows of digits: 1 where something is seen."""
    return ["".join("1" if weight > 0 else "0" for weight in row) for row in weights.tolist()]


def softmax_rows(q, k, seen):
    """softmax(q kᵀ / √d_k) over what may be seen."""
    powers = torch.where(seen, (q @ k.T / q.shape[1] ** 0.5).exp(), 0.0)
    return powers / powers.sum(1, keepdim=True)


@torch.no_grad()
def test_the_three_attentions(scramble):
    """A text of n = 3 words is read beside a longer one, m = 4 words are written; one head, d = 4, d_k = 3.

                        queries            keys and values         weights    who sees whom
    encoder, self       text    3 x 3      text        3 x 3       3 x 3      all see all, none the padding
    decoder, self       words   4 x 3      words       4 x 3       4 x 4      each itself and those before it
    decoder, cross      words   4 x 3      text        3 x 3       4 x 3      all words see all of the text
    """
    model = scramble(text_to_text(dim=4, depth=1, num_heads=1, head_dim=3))
    texts, segments = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]]), torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
    words = torch.tensor([[1, 11, 12, 13], [1, 11, 12, 13]])
    read, written = model.encoder.blocks[0], model.decoder.blocks[0]
    with recorded(read.attn, written.attn, written.cross_attn) as records:
        context = model.encode(texts, segments)
        hidden = model.decoder(words, None, context)
    encoder, decoder, cross = (record[0][0, 0] for record in records)

    assert drawn(encoder) == ["11100", "11100", "11100", "00011", "00011"]  # padding sees itself, and nothing sees it
    assert drawn(decoder) == ["1000", "1100", "1110", "1111"]
    assert drawn(cross) == ["11100", "11100", "11100", "11100"]
    for weights in (encoder, decoder, cross):
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))

    x = model.encoder.embed(texts, torch.arange(5), None)[0]
    q, k, v = (read.norm1(x) @ read.attn.qkv.weight.T + read.attn.qkv.bias).split(3, 1)
    assert q.shape == k.shape == v.shape == (5, 3)
    torch.testing.assert_close(encoder[:3, :3], softmax_rows(q[:3], k[:3], torch.ones(3, 3, dtype=torch.bool)))

    y = model.decoder.embed(words, torch.arange(4))[0]
    q, k, v = (written.norm1(y) @ written.attn.qkv.weight.T + written.attn.qkv.bias).split(3, 1)
    torch.testing.assert_close(decoder, softmax_rows(q, k, torch.ones(4, 4).tril() > 0))
    y = y + decoder @ v @ written.attn.proj.weight.T + written.attn.proj.bias

    attn = written.cross_attn
    q = written.norm_cross(y) @ attn.q.weight.T + attn.q.bias  # of the words
    k, v = (context.states[0, :3] @ attn.kv.weight.T + attn.kv.bias).split(3, 1)  # of what the encoder gave last
    torch.testing.assert_close(cross[:, :3], softmax_rows(q, k, torch.ones(4, 3, dtype=torch.bool)))
    y = y + cross[:, :3] @ v @ attn.proj.weight.T + attn.proj.bias
    y = model.decoder.norm(y + written.mlp(written.norm2(y)))
    torch.testing.assert_close(hidden[0], y)


def copy(ours, theirs):
    """Weights of one of nn.Transformer's layers into one of our blocks."""
    pairs = [(ours.attn.qkv, theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias)]
    layers = [
        (ours.attn.proj, theirs.self_attn.out_proj),
        (ours.mlp.fc1, theirs.linear1),
        (ours.mlp.fc2, theirs.linear2),
    ]
    layers.append((ours.norm1, theirs.norm1))
    if isinstance(theirs, nn.TransformerDecoderLayer):
        cross = theirs.multihead_attn
        pairs.append((ours.cross_attn.q, cross.in_proj_weight[:D], cross.in_proj_bias[:D]))
        pairs.append((ours.cross_attn.kv, cross.in_proj_weight[D:], cross.in_proj_bias[D:]))
        layers += [(ours.cross_attn.proj, cross.out_proj), (ours.norm_cross, theirs.norm2), (ours.norm2, theirs.norm3)]
    else:
        layers.append((ours.norm2, theirs.norm2))
    for ours, weight, bias in [*pairs, *((one, other.weight, other.bias) for one, other in layers)]:
        ours.weight.copy_(weight)
        ours.bias.copy_(bias)


@torch.no_grad()
@pytest.mark.parametrize("pre_norm", [True, False])
def test_equals_nn_transformer(scramble, pre_norm):
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 4 * D, "norm_first": pre_norm}
    theirs = scramble(nn.Transformer(D, N, dropout=0.0, activation="gelu", batch_first=True, **sizes))
    ours = text_to_text(pre_norm=pre_norm).eval()
    for side in ("encoder", "decoder"):
        stack, other = getattr(ours, side), getattr(theirs, side)
        for block, layer in zip(stack.blocks, other.layers, strict=True):
            copy(block, layer)
        if pre_norm:
            stack.norm.load_state_dict(other.norm.state_dict())
        else:
            other.norm = None  # as in the paper, which has none after the last layer
    texts, tokens = ours.encoder.embed(TEXTS, torch.arange(9), None), ours.decoder.embed(TOKENS, torch.arange(7))
    padding = {name: SEGMENTS == 0 for name in ("src_key_padding_mask", "memory_key_padding_mask")}
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    truth = theirs(texts, tokens, tgt_mask=causal, tgt_is_causal=True, **padding)
    torch.testing.assert_close(ours(TEXTS, TOKENS, None, SEGMENTS), truth, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_is_padded_and_what_lies_beside_it_change_nothing(scramble):
    model = scramble(text_to_text())
    hidden = model(TEXTS, TOKENS, None, SEGMENTS)
    for row, length in enumerate((9, 4, 7, 2)):
        alone = model(TEXTS[row : row + 1, :length], TOKENS[row : row + 1])
        torch.testing.assert_close(hidden[row : row + 1], alone, rtol=0, atol=1e-5)
    other = TEXTS.clone()
    other[0, 3] = 3 if TEXTS[0, 3] != 3 else 4
    changed = (model(other, TOKENS, None, SEGMENTS) - hidden).abs().amax((1, 2))
    assert changed[0] > 0.01 and not changed[1:].any()


def test_contexts_of_different_lengths_are_joined_under_a_mask():
    states = torch.randn(3, 4, 2)
    parts = [Context(states[:1]), Context(states[1:, :2], torch.tensor([[True, False], [True, True]]))]
    found = concat_batches(parts)
    assert found.states.shape == (3, 4, 2) and not found.states[1:, 2:].any()
    assert found.mask.int().tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert concat_batches([Context(states[:1]), Context(states[1:])]).mask is None


@torch.no_grad()
def test_parts_of_a_batch_keep_their_masks():
    class Masking(nn.Module):
        """Masks all cells of an image that are black."""

        def forward(self, images):
            cells = images.flatten(2).transpose(1, 2)
            return Context(cells, cells.any(-1))

    images = torch.randn(19, 3, 2, 2) * (torch.rand(19, 1, 2, 2) > 0.4)
    decoder = Decoder(vocab_size=V, max_len=4, dim=D, depth=1, num_heads=N, context_dim=3)
    model = VisionLanguageModel(encoder=Masking(), decoder=decoder)
    whole, parts = model.encode(images), encode_in_parts(model, images)
    assert torch.equal(whole.states, parts.states) and torch.equal(whole.mask, parts.mask)
    assert not whole.mask.all()
