"""Attention against a softmax written out in float64."""

import pytest
import torch

from vlm.data.batch import text_bounds
from vlm.nn import attention as module
from vlm.nn.attention import (
    CrossAttention,
    SelfAttention,
    Texts,
    attention,
    attention_weights,
    causal_segment_mask,
    changing_lengths,
    packed_causal_mask,
    recompute_contexts,
    record_attention,
)
from vlm.nn.step.block import KeyValueCache

B, N, K = 3, 2, 5


def reference(q, k, v, allowed, bias=None, scale=K**-0.5):
    """Equation 1 of Vaswani et al., one query at a time."""
    q, k, v = q.double(), k.double(), v.double()
    bias = torch.zeros(q.shape[1], q.shape[2], k.shape[2]) if bias is None else bias
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, n, i in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        keys = [j for j in range(k.shape[2]) if allowed(b, i, j)]
        m = n * k.shape[1] // q.shape[1]  # the head of keys that this head of queries shares
        weights = [torch.exp(q[b, n, i] @ k[b, m, j] * scale + bias[n, i, j]) for j in keys]
        out[b, n, i] = sum(w * v[b, m, j] for w, j in zip(weights, keys, strict=True)) / sum(weights)
    return out


def heads(queries, keys):
    return torch.randn(B, N, queries, K), torch.randn(B, N, keys, K), torch.randn(B, N, keys, K)


def close(ours, truth):
    torch.testing.assert_close(ours.double(), truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
@pytest.mark.parametrize("queries, keys", [(4, 4), (3, 7), (1, 6)])
def test_attention_and_its_weights_are_a_softmax_written_out(queries, keys, kind, biased, kv_heads):
    """Groups of heads share keys and values; a bias is added to the scaled products."""
    q, k, v = torch.randn(B, 6, queries, K), torch.randn(B, kv_heads, keys, K), torch.randn(B, kv_heads, keys, K)
    drawn = torch.rand(B, 1, queries, keys) < 0.5
    drawn[..., 2] = True
    allowed = {  # as the reference has it, and as an option
        "all": (lambda b, i, j: True, None),
        "causal": (lambda b, i, j: j <= i + keys - queries, "causal"),
        "mask": (lambda b, i, j: drawn[b, 0, i, j], drawn),
    }[kind]
    more = {"bias": torch.randn(6, queries, keys), "scale": 0.3} if biased else {}
    options, truth = {"mask": allowed[1], **more}, reference(q, k, v, allowed[0], **more)
    close(attention(q, k, v, **options), truth)
    weights = attention_weights(q, k, **options)
    assert weights.min() >= 0
    close(weights.sum(-1), torch.ones(B, 6, queries).double())
    close(weights @ v.repeat_interleave(6 // kv_heads, dim=1), truth)


def test_causal_within_segments():
    segments = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    mask = causal_segment_mask(segments)
    assert mask.shape == (2, 1, 8, 8)
    for b in range(2):
        for i in range(8):
            for j in range(8):
                assert mask[b, 0, i, j] == (j <= i and segments[b, i] == segments[b, j])


def varlen(q, k, v, begins, key_begins, longest, longest_key, *, scale, window_size):
    """torch's kernel as its documentation has it: causal attention text by text, of (T, N, K)."""
    assert begins is key_begins and begins.dtype == torch.int32 and window_size == (-1, 0)
    spans = list(zip(begins.tolist(), begins.tolist()[1:], strict=False))
    assert spans[0][0] == 0 and spans[-1][1] == len(q) and max(end - at for at, end in spans) <= longest == longest_key
    parts = [[x[at:end].transpose(0, 1)[None].float() for x in (q, k, v)] for at, end in spans]
    return torch.cat([attention(*part, mask="causal", scale=scale)[0].transpose(0, 1) for part in parts]).to(q.dtype)


@pytest.fixture
def text_kernel(monkeypatch):
    """A device with a kernel for texts, here a CPU with one in Python; counts its calls."""
    calls = []
    monkeypatch.setattr(module, "has_text_kernel", lambda device: True)
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda *args, **options: (calls.append(1), varlen(*args, **options))[1]
    )
    return calls


SEGMENTS = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 3, 3, 3, 4]])


@pytest.mark.parametrize("kv_heads", [1, N])
def test_attention_text_by_text_is_that_through_a_mask(text_kernel, kv_heads):
    mask = packed_causal_mask(SEGMENTS, text_bounds(SEGMENTS))
    assert isinstance(mask, Texts)
    sizes = [(B, N, 8, K), (B, kv_heads, 8, K), (B, kv_heads, 8, K)]
    q, k, v = (torch.randn(size).bfloat16() for size in sizes)
    found = attention(q, k, v, mask=mask, scale=0.7)
    truth = attention(q, k, v, mask=causal_segment_mask(SEGMENTS), scale=0.7)
    assert text_kernel and found.shape == truth.shape
    torch.testing.assert_close(found, truth, rtol=0, atol=0.02)


@pytest.mark.parametrize("options", [{}, {"bias": torch.randn(N, 8, 8).bfloat16()}], ids=["float32", "bias"])
def test_kernels_without_bounds_take_the_mask(text_kernel, options):
    mask, dtype = packed_causal_mask(SEGMENTS, text_bounds(SEGMENTS)), torch.bfloat16 if options else torch.float32
    q, k, v = (x.to(dtype) for x in heads(8, 8))
    dense = causal_segment_mask(SEGMENTS)
    torch.testing.assert_close(attention(q, k, v, mask=mask, **options), attention(q, k, v, mask=dense, **options))
    torch.testing.assert_close(attention_weights(q, k, mask=mask), attention_weights(q, k, mask=dense))
    assert not text_kernel


def test_a_cpu_takes_the_mask():
    assert torch.equal(packed_causal_mask(SEGMENTS, text_bounds(SEGMENTS)), causal_segment_mask(SEGMENTS))
    assert text_bounds(SEGMENTS).tolist() == [0, 2, 5, 6, 8, 16, 17, 20, 23, 24]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 200])
def test_texts_on_a_gpu_are_those_of_a_mask(length):
    segments = torch.arange(length).div(37, rounding_mode="floor").expand(B, length).add(1).contiguous()
    q, k, v = (torch.randn(B, N, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    masks = packed_causal_mask(segments.cuda(), text_bounds(segments).cuda()), causal_segment_mask(segments.cuda())
    assert isinstance(masks[0], Texts)
    outputs = [attention(q, k, v, mask=mask) for mask in masks]
    torch.testing.assert_close(*outputs, rtol=0, atol=0.02)
    grads = [torch.autograd.grad(out.float().pow(2).sum(), (q, k, v)) for out in outputs]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)


def test_a_cache_returns_all_so_far_in_memory_allocated_once():
    cache = KeyValueCache(rows=B, heads=N, max_len=6, head_dim=K, like=torch.empty(0))
    place, parts = cache.keys.data_ptr(), [heads(length, length)[1:] for length in (3, 1, 2)]
    for done in range(1, 4):
        for found, whole in zip(cache.append(*parts[done - 1]), zip(*parts[:done], strict=True), strict=True):
            assert torch.equal(found, torch.cat(whole, 2))
    assert cache.length == 6 and cache.keys.data_ptr() == place


def test_dropout_is_for_training_only():
    layer, x = SelfAttention(dim=8, num_heads=2, dropout=0.5), torch.randn(1, 6, 8)
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_attention_by_cosines(scramble, kv_heads):
    layer = scramble(SelfAttention(dim=12, num_heads=3, num_kv_heads=kv_heads, qk_norm=True))
    x = torch.randn(2, 5, 12)
    with record_attention(layer) as [weights]:
        layer(x)
    qkv = layer.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2)  # (B, heads, L, K)
    q, k = qkv[:, :3, :, None], qkv[:, 3 : 3 + kv_heads, None].repeat_interleave(3 // kv_heads, 1)
    cosines = torch.nn.functional.cosine_similarity(q, k, dim=-1)
    torch.testing.assert_close(weights[0], (cosines * layer.cosine.scale).softmax(-1), rtol=0, atol=1e-5)


def test_cross_attention_by_cosines(scramble):
    layer = scramble(CrossAttention(dim=8, context_dim=6, num_heads=2, qk_norm=True))
    x, states = torch.randn(1, 4, 8), torch.randn(1, 7, 6)
    with record_attention(layer) as [weights]:
        layer(x, layer.keys_values(states))
    q = layer.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
    k = layer.kv(states)[..., :8].unflatten(-1, (2, 4)).transpose(1, 2)
    cosines = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)  # (1, 2, 4, 7)
    torch.testing.assert_close(weights[0], (cosines * layer.cosine.scale).softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"qk_norm": True}, {"bias": False, "head_dim": 5}])
def test_recording_changes_nothing_and_ends(scramble, options):
    layers = [scramble(SelfAttention(dim=8, num_heads=2, dropout=0.3, **options)).train() for _ in range(2)]
    x = torch.randn(3, 6, 8)

    def train_layers():
        torch.manual_seed(1)
        for layer in layers:
            layer.zero_grad()
        out = layers[1](layers[0](x, "causal"))
        out.square().sum().backward()
        return [out, *(parameter.grad.clone() for layer in layers for parameter in layer.parameters())]

    without = train_layers()
    with record_attention(*layers) as records:
        within = train_layers()
        train_layers()
    assert all(torch.equal(a, b) for a, b in zip(without, within, strict=True))
    assert [len(record) for record in records] == [2, 2]
    assert all(not weights.requires_grad for record in records for weights in record)
    assert not records[0][0].triu(1).any() and records[1][0].triu(1).any()
    layers[0](x)
    assert len(records[0]) == 2


def test_recording_ends_after_a_fault():
    layer = SelfAttention(dim=8, num_heads=2)
    with pytest.raises(ZeroDivisionError), record_attention(layer):
        assert layer.attend is not attention
        raise ZeroDivisionError
    assert layer.attend is attention


def test_heads_divide_one_another_and_the_width():
    for kv_heads in (0, 2, 4, -1):
        with pytest.raises(ValueError, match=f"num_kv_heads {kv_heads} does not divide num_heads 3"):
            SelfAttention(dim=12, num_heads=3, num_kv_heads=kv_heads)
    with pytest.raises(ValueError, match="num_heads 3 does not divide dim 8"):
        SelfAttention(dim=8, num_heads=3)


def test_cudnn_is_left_out_where_lengths_change_and_where_a_pass_is_recomputed():
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    before = allowed()
    with changing_lengths(torch.device("cpu")):
        assert allowed() == before
    with changing_lengths(torch.device("cuda")):
        assert not allowed() and torch.backends.cuda.flash_sdp_enabled()
        forward, again = recompute_contexts()
    assert allowed() == before
    with forward:
        assert allowed() == before
    with again:
        assert not allowed()
    assert allowed() == before
