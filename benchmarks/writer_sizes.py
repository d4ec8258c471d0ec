"""Translators and text recognisers at published sizes with random weights, for `pretrained_equality.py`."""

import sys
import tempfile
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
import transformers as t
from decoder_sizes import byte_pairs
from hugging import wide
from translators import marian, marian_tokenizer, spread, t5_tokenizer

SIDE = {"height": 384, "width": 384}


def marian_base() -> list[Any]:
    """Helsinki-NLP/opus-mt-en-de."""
    fill = islice(("\u2581" + "".join(letters) for letters in product(ascii_lowercase, repeat=4)), 58101)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = marian_tokenizer(folder, list(fill)[:57900])
    sizes = {"layers": 6, "ffn_dim": 2048, "attention_heads": 8}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return [marian(tokenizer, d_model=512, max_position_embeddings=512, **both), tokenizer]


def t5(**sizes: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = t5_tokenizer(folder)
    return [spread(t.T5ForConditionalGeneration(t.T5Config(decoder_start_token_id=0, **sizes)), end=1), tokenizer]


def t5_small() -> list[Any]:
    return t5()


def flan_t5_small() -> list[Any]:
    sizes = {"num_layers": 8, "num_heads": 6, "d_ff": 1024}
    return t5(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def trocr(encoder: Any, decoder: t.TrOCRConfig) -> list[Any]:
    model = wide(t.VisionEncoderDecoderModel(encoder=encoder, decoder=t.TrOCRForCausalLM(decoder)))
    tokenizer = byte_pairs(decoder.vocab_size)
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config.update(**dict.fromkeys(names, tokenizer.eos_token_id))
    return [model, tokenizer, t.ViTImageProcessor(size=SIDE)]


def trocr_small() -> list[Any]:
    """microsoft/trocr-small-handwritten."""
    small = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    sizes = {"d_model": 256, "decoder_layers": 6, "decoder_attention_heads": 8, "decoder_ffn_dim": 1024}
    more = {"activation_function": "relu", "scale_embedding": True, "cross_attention_hidden_size": 384}
    encoder = t.DeiTModel(t.DeiTConfig(image_size=384, **small), add_pooling_layer=False)
    return trocr(encoder, t.TrOCRConfig(vocab_size=64044, **sizes, **more))


def trocr_base() -> list[Any]:
    """microsoft/trocr-base-handwritten."""
    encoder = t.ViTModel(t.ViTConfig(image_size=384, qkv_bias=False), add_pooling_layer=False)
    return trocr(encoder, t.TrOCRConfig(cross_attention_hidden_size=768))


def their_tokens(model: Any, tokenizer: Any, texts: list[str], beams: int, tokens: int) -> list[list[int]]:
    """Returns the tokens that a translator of theirs writes, without begin, end and padding."""
    read = tokenizer(texts, return_tensors="pt", padding=True)
    rows = model.generate(**read, num_beams=beams, max_length=tokens)
    ends = torch.tensor([tokenizer.pad_token_id, tokenizer.eos_token_id])
    return [row[~torch.isin(row, ends)].tolist() for row in rows]


def our_tokens(translator: Any, texts: list[str], beams: int, tokens: int) -> list[list[int]]:
    """Returns the tokens that a translator of ours writes."""
    options = translator.options(beam=beams, max_tokens=tokens - 1, batch_size=len(texts))
    found = dict(translator.results([texts], options))
    return [found[place][0].tokens for place in range(len(texts))]


def translator_logits(translator: Any, texts: list[str], known: dict[str, Any]) -> torch.Tensor:
    """Returns logits of a translator of ours for given tokens."""
    return translator.model.head(translator.model.decoder(known["tokens"], None, translator.encode(texts)))


TRANSLATORS = {"marian_base": marian_base, "t5_small": t5_small, "flan_t5_small": flan_t5_small}
LINE_READERS = {"trocr_small": trocr_small, "trocr_base": trocr_base}
