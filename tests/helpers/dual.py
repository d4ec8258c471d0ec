"""Small random CLIP and SigLIP models of Hugging Face with their tokenizers and processors."""

from pathlib import Path

import torch
import transformers as t
from hugging import TEXTS, save_parts, sentencepieces, wide
from tokenizers.pre_tokenizers import ByteLevel

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
IMAGES = SIZES | {"image_size": 24, "patch_size": 8}
START, END = "<|startoftext|>", "<|endoftext|>"
LENGTHS = {"clip": 40, "siglip": 16}


def saved_dual(name, folder):
    """Saves a model with its tokenizer and processor; returns all three."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = TOKENIZERS[name](folder)
    texts = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTHS[name]}
    texts |= {"bos_token_id": tokenizer.bos_token_id or 1, "eos_token_id": tokenizer.eos_token_id}
    texts |= {"pad_token_id": tokenizer.pad_token_id}
    if name == "clip":
        model = t.CLIPModel(t.CLIPConfig(text_config=texts, vision_config=IMAGES, projection_dim=16))
        processor = t.CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    else:
        model = t.SiglipModel(t.SiglipConfig(text_config=texts, vision_config=IMAGES))
        processor = t.SiglipImageProcessor(size={"height": 24, "width": 24})
    with torch.no_grad():
        wide(model).logit_scale.fill_(2.0)
    return save_parts(folder, (model, tokenizer, processor))


def embed_texts(model, tokenizer, texts):
    """Embeddings of texts as the model's own documentation makes them."""
    length = model.config.text_config.max_position_embeddings
    padding = "max_length" if isinstance(model, t.SiglipModel) else True
    ids = tokenizer(texts, padding=padding, truncation=True, max_length=length, return_tensors="pt")
    mask = {"attention_mask": ids["attention_mask"]} if isinstance(model, t.CLIPModel) else {}
    output = model.get_text_features(input_ids=ids["input_ids"], **mask)
    return torch.nn.functional.normalize(getattr(output, "pooler_output", output), dim=-1)


def embedded_images(model, pixels):
    output = model.get_image_features(pixel_values=pixels)
    return torch.nn.functional.normalize(getattr(output, "pooler_output", output), dim=-1)


def _clip_tokenizer(folder):
    letters = sorted(ByteLevel.alphabet())
    merges = [("d", "o"), ("do", "g</w>"), ("c", "a"), ("ca", "t</w>")]
    pieces = [*letters, *(f"{one}</w>" for one in letters), *map("".join, merges), START, END]
    return t.CLIPTokenizer(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges)


def _siglip_tokenizer(folder):
    special = {"unk_id": 2, "eos_id": 1, "pad_id": -1, "bos_id": -1}
    learned = sentencepieces([text.lower() for text in TEXTS], vocab_size=60, **special)
    (folder / "spiece.model").write_bytes(learned)
    return t.SiglipTokenizer(str(folder / "spiece.model"))


TOKENIZERS = {"clip": _clip_tokenizer, "siglip": _siglip_tokenizer}
