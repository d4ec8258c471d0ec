"""Texts equal to those of Hugging Face's `generate`, with copied weights, option by option."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

from vlm.decoding.constraints import Rules
from vlm.decoding.options import Decoding
from vlm.decoding.search import search
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face
from vlm.models.vit import ViT

V, D, MAX_LEN, BOS, EOS = 31, 24, 14, 1, 2
# What each side calls an option: ours of Decoding, ours of Rules, theirs.
OPTIONS = {
    "plain": ({}, {}, {}),
    "length_penalty_0": ({"length_penalty": 0.0}, {}, {"length_penalty": 0.0}),
    "length_penalty_2": ({"length_penalty": 2.0}, {}, {"length_penalty": 2.0}),
    "length_penalty_-1": ({"length_penalty": -1.0}, {}, {"length_penalty": -1.0}),
    "no_repeat_1": ({}, {"no_repeat_ngram": 1}, {"no_repeat_ngram_size": 1}),
    "no_repeat_2": ({}, {"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    "repetition": ({}, {"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
    "repetition_wanted": ({}, {"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "min_tokens": ({}, {"min_tokens": 6}, {"min_new_tokens": 6}),
    "banned": ({}, {"banned": ((5,), (7, 9), (3, 3))}, {"bad_words_ids": [[5], [7, 9], [3, 3]]}),
    "all": (
        {"length_penalty": 0.6},
        {"no_repeat_ngram": 2, "repetition_penalty": 1.3, "min_tokens": 4, "banned": ((4,),)},
        {
            "length_penalty": 0.6,
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.3,
            "min_new_tokens": 4,
            "bad_words_ids": [[4]],
        },
    ),
}


@pytest.fixture
def pair(scramble, tmp_path):
    sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 4 * D}
    encoder = scramble(ViTModel(ViTConfig(image_size=24, patch_size=8, **sizes)))
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
    config = GPT2Config(vocab_size=V, n_positions=MAX_LEN, n_embd=D, n_layer=2, n_head=3, **special)
    config.is_decoder = config.add_cross_attention = True
    text = scramble(GPT2LMHeadModel(config))
    text.base_model.wpe.weight.data *= 8  # or a random model with tied embeddings repeats one token
    text.base_model.wte.weight.data *= 0.35  # and is so sure of it that no penalty matters
    theirs = VisionEncoderDecoderModel(encoder=encoder, decoder=text).eval()
    theirs.generation_config.update(decoder_start_token_id=BOS, **special)
    theirs.save_pretrained(tmp_path)
    shape = {"dim": D, "depth": 2, "num_heads": 3}
    ours = VisionLanguageModel(
        encoder=ViT(image_size=24, patch_size=8, class_token=True, norm_eps=1e-12, **shape),
        decoder=Decoder(vocab_size=V, max_len=MAX_LEN, context_dim=D, activation="gelu_tanh", **shape),
    ).eval()
    load_hugging_face(ours, Folder(tmp_path))
    return ours, theirs


def ended(row):
    """Tokens up to the end token, without the fill after it."""
    return row[: row.index(EOS) + 1] if EOS in row else row


@torch.no_grad()
@pytest.mark.parametrize(
    "beam, results", [(1, 1), (4, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 1), (5, 2)))]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_texts_are_the_same(pair, name, beam, results):
    ours, theirs = pair
    options, rules, given = OPTIONS[name]
    images = 4 * torch.randn(6, 3, 24, 24)
    found = theirs.generate(
        images,
        max_new_tokens=MAX_LEN,
        num_beams=beam,
        num_return_sequences=results,
        do_sample=False,
        early_stopping="never" if beam > 1 else False,
        **{key: value for key, value in given.items() if beam > 1 or key != "length_penalty"},
    )
    truth = [ended(row) for row in found[:, 1:].tolist()]
    decoding = Decoding(beam=beam, results=results, rules=Rules(**rules), **options)
    texts = search(ours.decoder, ours.encode(images), decoding, bos_id=BOS, eos_id=EOS)
    assert [text.tokens for row in texts for text in row] == truth
    assert len(set(map(tuple, truth))) > 4


@torch.no_grad()
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_early_stopping_is_theirs(pair, early_stopping, length_penalty):
    ours, theirs = pair
    images = 4 * torch.randn(12, 3, 24, 24)
    end = theirs.generate(images, max_new_tokens=9)[:, 3:].flatten().mode().values.item()  # a token that comes often
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    found = theirs.generate(
        images, max_new_tokens=9, num_beams=4, num_return_sequences=2, eos_token_id=end, pad_token_id=0, **options
    )
    decoding = Decoding(beam=4, results=2, max_tokens=9, end_counts=True, **options)
    texts = search(ours.decoder, ours.encode(images), decoding, bos_id=BOS, eos_id=end)
    truth = [row[: row.index(end) + 1] if end in row else row for row in found[:, 1:].tolist()]
    assert [text.tokens for row in texts for text in row] == truth
    assert len({len(row) for row in truth}) > 1


@torch.no_grad()
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_length_with_the_end_counted_is_theirs(pair, beam, forced):
    """With the end token forced at the end, and common tokens banned, too."""
    ours, theirs = pair
    images = 4 * torch.randn(12, 3, 24, 24)
    options, more = {"early_stopping": "never" if beam > 1 else False}, {}
    if forced:
        never = theirs.generate(images, max_new_tokens=4)[:, 1:].unique()[-4:].tolist()
        options |= {"bad_words_ids": [[one] for one in never], "renormalize_logits": True, "forced_eos_token_id": EOS}
        more = {"never": tuple(never), "forced_end": True}
    found = theirs.generate(images, max_length=7, num_beams=beam, **options)
    assert not forced or ((found == EOS).any(1).all() and (found[:, -1] == EOS).any())
    decoding = Decoding(beam=beam, max_tokens=6, end_counts=True, **more)
    texts = search(ours.decoder, ours.encode(images), decoding, bos_id=BOS, eos_id=EOS)
    assert [text.tokens for row in texts for text in row] == [ended(row) for row in found[:, 1:].tolist()]


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_a_prefix_is_theirs(pair, beam):
    ours, theirs = pair
    images, prefix = 4 * torch.randn(4, 3, 24, 24), (6, 11)
    given = torch.tensor([[BOS, *prefix]] * 4)
    found = theirs.generate(
        images, decoder_input_ids=given, max_new_tokens=8, num_beams=beam, early_stopping="never" if beam > 1 else False
    )
    decoding = Decoding(beam=beam, max_tokens=10, end_counts=True, rules=Rules(prefix=prefix))
    texts = search(ours.decoder, ours.encode(images), decoding, bos_id=BOS, eos_id=EOS)
    truth = [ended(row) for row in found[:, 3:].tolist()]
    assert [text.tokens for row in texts for text in row] == truth


@torch.no_grad()
def test_scores_and_log_probabilities_are_theirs(pair):
    ours, theirs = pair
    images = 4 * torch.randn(4, 3, 24, 24)
    found = theirs.generate(
        images,
        max_new_tokens=MAX_LEN,
        num_beams=4,
        early_stopping="never",
        output_scores=True,
        return_dict_in_generate=True,
    )
    texts = search(ours.decoder, ours.encode(images), Decoding(beam=4), bos_id=BOS, eos_id=EOS)
    assert [row[0].score for row in texts] == pytest.approx(found.sequences_scores.tolist(), abs=1e-5)
    for row in texts:
        assert row[0].score == pytest.approx(sum(row[0].logprobs) / len(row[0].tokens), abs=1e-5)
