"""A translator that config alone makes of two BERTs, against Hugging Face's with copied random weights."""

import pytest
import torch
from bert import copy_weights, writer_copied
from hugging import wide
from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

from vlm.config.compose import compose
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.training.run.build import build_model

V, D, MAX_LEN, BOS, EOS = 31, 24, 16, 1, 2
SIZES = {"dim": D, "num_heads": 3, "encoder_depth": 2, "decoder_depth": 2}
LENGTHS = torch.tensor([9, 4, 7, 2, 8, 5])


@pytest.fixture
def texts():
    tokens = torch.randint(3, V, (6, 9))
    return tokens.where(torch.arange(9) < LENGTHS[:, None], 0)


@pytest.fixture
def pair():
    sizes = {"vocab_size": V, "max_position_embeddings": MAX_LEN, "hidden_size": D, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "intermediate_size": 4 * D}
    reader = wide(BertModel(BertConfig(**sizes), add_pooling_layer=False))
    writer = wide(BertLMHeadModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True)))
    for model in (reader, writer.bert):
        model.embeddings.position_embeddings.weight.data *= 4  # so that texts differ
    writer.cls.predictions.bias.data[EOS] += 0.2  # some texts end
    theirs = EncoderDecoderModel(encoder=reader, decoder=writer).eval()
    special = {"decoder_start_token_id": BOS, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
    theirs.generation_config.update(**special)
    options = [f"model.size.{name}={value}" for name, value in SIZES.items()]
    config = compose(["task=translation", "model=translator_bert", f"data.max_len={MAX_LEN}", *options])
    ours, _ = build_model(config, {"vocab_size": V})
    copy_weights(ours.encoder, reader)
    writer_copied(ours.decoder, writer)
    return ours.eval(), theirs


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 4])
def test_logits_and_translations_are_the_same(pair, texts, beam):
    ours, theirs = pair
    tokens, seen = torch.randint(V, (6, 7)), (texts > 0).long()
    truth = theirs(texts, attention_mask=seen, decoder_input_ids=tokens).logits
    torch.testing.assert_close(ours.head(ours(texts, tokens, None, seen)), truth, rtol=0, atol=1e-5)
    options = {"num_beams": beam, "early_stopping": "never" if beam > 1 else False}
    found = theirs.generate(texts, attention_mask=seen, max_new_tokens=MAX_LEN, do_sample=False, **options)
    truth = [row[: row.index(EOS) + 1] if EOS in row else row for row in found[:, 1:].tolist()]
    written = decode_batch(ours.decoder, ours.encode(texts, seen), Decoding(beam=beam), bos_id=BOS, eos_id=EOS)
    assert [text[0].tokens for text in written] == truth
    assert len(set(map(tuple, truth))) == 6 and any(row[-1] == EOS for row in truth)
