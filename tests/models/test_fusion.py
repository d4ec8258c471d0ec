"""Context as a prefix: against Hugging Face's GIT, and what must hold of rows that begin with it."""

import pytest
import torch
from transformers import GitConfig, GitForCausalLM

from vlm.data.batch import pack
from vlm.decoding.search import greedy
from vlm.errors import UserError
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.fusion import Prefix
from vlm.models.heads import VocabularyHead
from vlm.nn.mask import Texts, causal_within, with_prefix

V, D, WIDTH, DEPTH, N, MAX_LEN = 31, 24, 32, 2, 3, 20
VISION = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
LAYERS = {
    "attn.proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm2": "output.LayerNorm",
}
OTHERS = {
    "token_embed.weight": "git.embeddings.word_embeddings.weight",
    "positions.weight": "git.embeddings.position_embeddings.weight",
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in (
            ("embed_norm", "git.embeddings.LayerNorm"),
            ("prefix.project", "git.visual_projection.visual_projection.0"),
            ("prefix.norm", "git.visual_projection.visual_projection.1"),
            ("vocabulary_head.own", "output"),
        )
        for kind in ("weight", "bias")
    },
}


@pytest.fixture
def git(scramble):
    config = GitConfig(
        vision_config={**VISION, "image_size": 24, "patch_size": 8},
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=DEPTH,
        num_attention_heads=N,
        intermediate_size=4 * D,
        max_position_embeddings=MAX_LEN,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return scramble(GitForCausalLM(config))


@pytest.fixture
def like_git(git):
    """Our decoder of GIT's kind, with its weights."""
    decoder = Decoder(
        vocab_size=V,
        max_len=MAX_LEN,
        dim=D,
        depth=DEPTH,
        num_heads=N,
        pre_norm=False,
        norm_eps=1e-12,
        embed_norm=True,
        prefix=Prefix(dim=D, context_dim=WIDTH, norm=True),
        vocabulary_head=VocabularyHead(dim=D, vocab_size=V, tied=False, bias=True),
    )
    theirs = git.state_dict()
    state = {ours: theirs[name] for ours, name in OTHERS.items()}
    for n in range(DEPTH):
        layer = f"git.encoder.layer.{n}"
        for kind in ("weight", "bias"):
            joined = [theirs[f"{layer}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            state[f"blocks.{n}.attn.qkv.{kind}"] = torch.cat(joined)
            state |= {f"blocks.{n}.{ours}.{kind}": theirs[f"{layer}.{name}.{kind}"] for ours, name in LAYERS.items()}
    decoder.load_state_dict(state)
    return decoder.eval()


def context_of(git, images):
    return Context(git.git.image_encoder(images).last_hidden_state)


@torch.no_grad()
def test_logits_equal_git_packed_and_unpacked(git, like_git):
    images = torch.randn(2, 3, 24, 24)
    texts = [[torch.randint(V, (length,)).tolist() for length in lengths] for lengths in ((5, 3, 7), (4, MAX_LEN))]
    tokens, segments = pack(texts, pad_id=0)
    packed = like_git.head(like_git(tokens, segments, context_of(git, images)))
    for row, captions in enumerate(texts):
        one = images[row : row + 1]
        for segment, caption in enumerate(captions, start=1):
            caption = torch.tensor([caption])
            truth = git(caption, pixel_values=one).logits[:, -caption.shape[1] :]
            assert truth.std() > 0.3
            alone = like_git.head(like_git(caption, None, context_of(git, one)))
            torch.testing.assert_close(alone, truth, rtol=0, atol=1e-4)
            torch.testing.assert_close(packed[row][segments[row] == segment], truth[0], rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[1] * 8, [3, 1, 4]])
def test_cached_logits_equal_git(git, like_git, chunks):
    images, tokens = torch.randn(2, 3, 24, 24), torch.randint(V, (2, 8))
    state = like_git.start(context_of(git, images), rows=2, max_len=8)
    stepped = torch.cat([like_git.head(like_git.step(part, state)) for part in tokens.split(chunks, 1)], 1)
    torch.testing.assert_close(stepped, git(tokens, pixel_values=images).logits[:, -8:], rtol=0, atol=1e-4)


@torch.no_grad()
def test_greedy_texts_equal_git(git, like_git):
    images = torch.randn(3, 3, 24, 24)
    theirs = git.generate(pixel_values=images, input_ids=torch.ones(3, 1, dtype=torch.long), max_length=12)
    ours = greedy(like_git, context_of(git, images), bos_id=1, eos_id=-1, max_tokens=11)
    assert ours.tokens == theirs[:, 1:].tolist()
    assert len(set(map(tuple, ours.tokens))) == 3


def test_the_mask_of_a_row():
    segments = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]])
    prefix = torch.tensor([[True, True], [True, False]])
    mask = with_prefix(causal_within(segments), prefix, count=2, length=4, device=segments.device)
    drawn = [["".join(str(int(sees)) for sees in line) for line in row[0]] for row in mask]
    assert drawn[0] == ["110000", "110000", "111000", "111100", "110010", "110001"]
    assert drawn[1] == ["100000", "100000", "101000", "101100", "101110", "101111"]
    texts = Texts(segments, torch.tensor([0, 2, 3, 4, 8], dtype=torch.int32))
    assert with_prefix(texts, prefix, count=2, length=4, device=segments.device).equal(mask)
    assert with_prefix(None, None, count=1, length=1, device=segments.device).int().tolist() == [[[[1, 0], [1, 1]]]]
    causal = with_prefix("causal", None, count=2, length=2, device=segments.device)
    assert causal.int().tolist() == [[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]]]


def test_the_prefix_sees_itself_in_both_directions_and_no_text(like_git):
    states, tokens = torch.randn(1, 5, WIDTH), torch.randint(V, (1, 4))
    seen: list[torch.Tensor] = []
    like_git.blocks[-1].register_forward_hook(lambda block, args, output: seen.append(output))
    for changed in (tokens, (tokens + 1) % V):
        like_git(changed, None, Context(states))
    torch.testing.assert_close(seen[0][:, :5], seen[1][:, :5], rtol=0, atol=0)
    states[:, -1] += 1
    like_git(tokens, None, Context(states))
    assert (seen[0][:, 0] - seen[2][:, 0]).abs().max() > 1e-3  # the last state changes the first


def test_too_few_positions_for_a_counted_prefix_are_refused():
    decoder = Decoder(
        vocab_size=V, max_len=8, dim=D, depth=1, num_heads=N, prefix=Prefix(dim=D, context_dim=D, counted=True)
    )
    context, tokens = Context(torch.randn(1, 9, D)), torch.zeros(1, 3, dtype=torch.long)
    for use in (lambda: decoder(tokens, None, context), lambda: decoder.start(context, rows=1, max_len=8)):
        with pytest.raises(UserError, match=r"model\.position\.max_len: 8 positions are too few .* set it to 17"):
            use()


def test_two_ways_of_taking_context_are_refused():
    with pytest.raises(ValueError, match=r"context_dim .* prefix"):
        Decoder(
            vocab_size=V,
            max_len=8,
            dim=D,
            depth=1,
            num_heads=N,
            context_dim=D,
            prefix=Prefix(dim=D, context_dim=D),
        )
