"""Texts equal to those of Hugging Face's `generate`, with copied weights, option by option."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

from vlm.decoding.constraints import Rules
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face
from vlm.models.vit import ViT

V, D, MAX_LEN, BOS, EOS = 31, 24, 14, 1, 2
# What each side calls an option: ours of Decoding, ours of Rules, theirs.
# Options of Decoding and Rules by their names here, and what `generate` calls them.
THEIRS = {"no_repeat_ngram": "no_repeat_ngram_size", "min_tokens": "min_new_tokens", "banned": "bad_words_ids"}
OPTIONS = {
    "plain": {},
    "length_penalty_0": {"length_penalty": 0.0},
    "length_penalty_2": {"length_penalty": 2.0},
    "length_penalty_-1": {"length_penalty": -1.0},
    "no_repeat_1": {"no_repeat_ngram": 1},
    "no_repeat_2": {"no_repeat_ngram": 2},
    "repetition": {"repetition_penalty": 1.8},
    "repetition_wanted": {"repetition_penalty": 0.7},
    "min_tokens": {"min_tokens": 6},
    "banned": {"banned": ((5,), (7, 9), (3, 3))},
    "all": {"length_penalty": 0.6, "no_repeat_ngram": 2, "repetition_penalty": 1.3, "min_tokens": 4, "banned": ((4,),)},
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


def rows(found, *, eos_id=EOS, given=1):
    """Tokens of each row up to the end token, without those that were given and the fill after it."""
    lists = found[:, given:].tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in lists]


def write_texts(ours, images, decoding, *, eos_id=EOS):
    texts = decode_batch(ours.decoder, ours.encode(images), decoding, bos_id=BOS, eos_id=eos_id)
    return [text.tokens for row in texts for text in row]


@torch.no_grad()
@pytest.mark.sample(plain=8, slow=8)
@pytest.mark.parametrize("beam, results", [(1, 1), (4, 4), (2, 1), (5, 2)])
@pytest.mark.parametrize("name", OPTIONS)
def test_texts_are_the_same(pair, name, beam, results):
    ours, theirs = pair
    rules = {key: value for key, value in OPTIONS[name].items() if key != "length_penalty"}
    given = {THEIRS.get(key, key): value for key, value in OPTIONS[name].items() if beam > 1 or key in rules}
    if "banned" in rules:
        given["bad_words_ids"] = [[*words] for words in rules["banned"]]
    images = 4 * torch.randn(6, 3, 24, 24)
    given |= {"num_beams": beam, "num_return_sequences": results, "early_stopping": "never" if beam > 1 else False}
    truth = rows(theirs.generate(images, max_new_tokens=MAX_LEN, do_sample=False, **given))
    penalty = {key: value for key, value in OPTIONS[name].items() if key not in rules}
    assert write_texts(ours, images, Decoding(beam=beam, results=results, rules=Rules(**rules), **penalty)) == truth
    assert len(set(map(tuple, truth))) > 4


@pytest.mark.sample(plain=3, slow=5)
@torch.no_grad()
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_early_stopping_is_theirs(pair, early_stopping, length_penalty):
    ours, theirs = pair
    images = 4 * torch.randn(12, 3, 24, 24)
    end = theirs.generate(images, max_new_tokens=9)[:, 3:].flatten().mode().values.item()  # a token that comes often
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    given = {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": end, "pad_token_id": 0, **options}
    truth = rows(theirs.generate(images, max_new_tokens=9, **given), eos_id=end)
    decoding = Decoding(beam=4, results=2, max_tokens=9, end_counts=True, **options)
    assert write_texts(ours, images, decoding, eos_id=end) == truth
    assert len({len(row) for row in truth}) > 1


@pytest.mark.sample(plain=3, slow=3)
@torch.no_grad()
@pytest.mark.parametrize("kind", ["length", "forced end", "prefix"])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_length_with_the_end_counted_and_a_prefix_are_theirs(pair, beam, kind):
    """With the end token forced at the end, and common tokens banned, too."""
    ours, theirs = pair
    images, given = 4 * torch.randn(12, 3, 24, 24), [BOS]
    options, more = {"early_stopping": "never" if beam > 1 else False, "max_length": 7}, {"max_tokens": 6}
    if kind == "forced end":
        never = theirs.generate(images, max_new_tokens=4)[:, 1:].unique()[-4:].tolist()
        options |= {"bad_words_ids": [[one] for one in never], "renormalize_logits": True, "forced_eos_token_id": EOS}
        more |= {"never": tuple(never), "forced_end": True}
    if kind == "prefix":
        given, options["max_length"] = [BOS, 6, 11], 11
        more = {"max_tokens": 10, "rules": Rules(prefix=(6, 11))}
    found = theirs.generate(images, decoder_input_ids=torch.tensor([given] * 12), num_beams=beam, **options)
    assert kind != "forced end" or ((found == EOS).any(1).all() and (found[:, -1] == EOS).any())
    assert write_texts(ours, images, Decoding(beam=beam, end_counts=True, **more)) == rows(found, given=len(given))


@torch.no_grad()
def test_scores_and_log_probabilities_are_theirs(pair):
    ours, theirs = pair
    images = 4 * torch.randn(4, 3, 24, 24)
    given = {"num_beams": 4, "early_stopping": "never", "output_scores": True, "return_dict_in_generate": True}
    truth = theirs.generate(images, max_new_tokens=MAX_LEN, **given).sequences_scores.tolist()
    texts = [
        row[0] for row in decode_batch(ours.decoder, ours.encode(images), Decoding(beam=4), bos_id=BOS, eos_id=EOS)
    ]
    assert [text.score for text in texts] == pytest.approx(truth, abs=1e-5)
    assert [sum(text.logprobs) / len(text.tokens) for text in texts] == pytest.approx(truth, abs=1e-5)
