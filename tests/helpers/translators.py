"""Small random Marian and T5 models of Hugging Face with their tokenizers, in folders that it saves itself."""

import json
from pathlib import Path

import sentencepiece
import torch
from hugging import TEXTS, save_parts, sentencepieces, wide
from transformers import MarianConfig, MarianMTModel, MarianTokenizer, T5Config, T5ForConditionalGeneration, T5Tokenizer

GERMAN = [
    "ein Mann in einem roten Hemd klettert auf einen Felsen .",
    "zwei Hunde laufen über das grüne Gras ,",
    "die Kinder spielen nicht im blauen Wasser!",
    "eine große braune Katze sitzt mit einem kleinen Vogel auf dem Tisch",
] * 3
MARIAN_SIZES = {
    "d_model": 32,
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("ffn_dim", 48))},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
}
T5_SIZES = {"d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3}


def spread(model, end=4):
    """Weights that keep activations as large as they are, make texts depend on what is read, and end some."""
    wide(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.eos_token_id] *= end
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and "lm_head" not in name:
                cross = 3 if "encoder_attn" in name or "EncDecAttention" in name else 1
                layer.weight.normal_(std=cross * layer.in_features**-0.5)
            if type(layer).__name__ == "T5LayerNorm":
                layer.weight.add_(1)
            if type(layer).__name__ == "MarianSinusoidalPositionalEmbedding":
                layer.weight.copy_(layer.create_weight())
    return model


def marian_tokenizer(folder, fill=()):
    """Its tokenizer, with two models of pieces, one vocabulary, and further pieces in it."""
    models = {"source.spm": sentencepieces(TEXTS), "target.spm": sentencepieces(GERMAN)}
    pieces = ["</s>", "<unk>", ">>deu<<"]
    for name, model in models.items():
        (Path(folder) / name).write_bytes(model)
        stated = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces += [stated.id_to_piece(id) for id in range(stated.get_piece_size()) if not stated.is_control(id)]
    vocab = {piece: id for id, piece in enumerate([*dict.fromkeys([*pieces, *fill]), "<pad>"])}
    (Path(folder) / "vocab.json").write_text(json.dumps(vocab))
    return MarianTokenizer(*(str(Path(folder) / name) for name in (*models, "vocab.json")))


def marian(tokenizer, **sizes):
    """A model that scales embeddings and begins with the fill, as published ones do."""
    pad = tokenizer.pad_token_id
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    sizes = {"activation_function": "swish", "scale_embedding": True, "vocab_size": len(tokenizer), **sizes}
    model = spread(MarianMTModel(MarianConfig(**sizes, **ids)))
    model.final_logits_bias.normal_(std=0.5)
    model.generation_config.update(**ids, bad_words_ids=[[pad]], renormalize_logits=True, max_length=24, num_beams=4)
    return model


def saved_marian(folder, **options):
    """As Helsinki-NLP/opus-mt-en-de is laid out."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer = marian_tokenizer(folder)
    return save_parts(folder, (marian(tokenizer, **MARIAN_SIZES, **options), tokenizer))


def t5_tokenizer(folder):
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    (Path(folder) / "spiece.model").write_bytes(sentencepieces([*TEXTS, *GERMAN], vocab_size=120, **special))
    return T5Tokenizer.from_pretrained(folder)


def saved_t5(folder, **options):
    """As google-t5/t5-small is laid out or, with feed_forward_proj="gated-gelu", as google/flan-t5-small."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer = t5_tokenizer(folder)
    config = T5Config(vocab_size=128 + len(tokenizer), decoder_start_token_id=0, **T5_SIZES | options)
    model = spread(T5ForConditionalGeneration(config), end=1 if options else 4)
    model.generation_config.update(max_length=24)
    return save_parts(folder, (model, tokenizer))
