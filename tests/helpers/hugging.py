"""Small random models of Hugging Face with their tokenizers and processors, in folders that it saves itself."""

import io
import json
import string
from functools import partial
from pathlib import Path

import sentencepiece
import torch
import transformers as t
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
TEXTS = [
    "a man in a red shirt climbs a rock .",
    "two dogs run over the green grass ,",
    "the children don't play in the blue water!",
    "a big brown cat is sitting on the table with a small bird",
] * 3
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}


def wide(model, std=0.2, norms=None):
    """Weights drawn wide enough that logits do not tie; those of norms around 1, so that inputs make a difference.

    Args:
        norms: How the names of norms end that are none of torch's.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
        for layer in model.modules():
            if isinstance(layer, torch.nn.LayerNorm) or (norms and type(layer).__name__.endswith(norms)):
                layer.weight.add_(1)
    return model.eval()


def byte_pairs(vocab_size=300, texts=TEXTS):
    """GPT-2's tokenizer, learned from a few texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": [END], "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return t.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END, unk_token=END)


def gpt2(vocab_size, end, **changes):
    sizes = {"vocab_size": vocab_size, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}
    model = wide(t.GPT2LMHeadModel(t.GPT2Config(**sizes | changes, bos_token_id=end, eos_token_id=end)))
    model.transformer.wpe.weight.data *= 4  # or a random model with tied embeddings repeats one token
    return model


def deit(side=24):
    return wide(t.DeiTModel(t.DeiTConfig(image_size=side, patch_size=8, **SIZES), add_pooling_layer=False))


def saved_captioner(folder, *, side=24, generation=None, processor=None, encoder=None, **options):
    """A ViT with a GPT-2, as nlpconnect/vit-gpt2-image-captioning is laid out."""
    tokenizer = byte_pairs()
    end = tokenizer.eos_token_id
    vit = t.ViTModel(t.ViTConfig(image_size=side, patch_size=8, **SIZES), add_pooling_layer=False)
    decoder = gpt2(len(tokenizer), end, add_cross_attention=True, is_decoder=True)
    model = t.VisionEncoderDecoderModel(encoder=encoder or wide(vit), decoder=decoder).eval()
    special = {"decoder_start_token_id": end, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model.generation_config.update(**special, **(generation or {}))
    processor = processor or t.ViTImageProcessor(size=square(side))
    model.save_pretrained(folder, **options)
    return model, *save_parts(folder, (tokenizer, processor))


def saved_gpt2(folder, **options):
    tokenizer = byte_pairs()
    model = gpt2(len(tokenizer), tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, **options)
    return model, tokenizer


def word_pieces(**options):
    """BERT's tokenizer, of a few words and all letters."""
    words = sorted({word for text in TEXTS for word in text.replace("!", " !").split() if word.isalpha()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,!?'-", *string.ascii_letters, *"0123456789"]
    pieces += [*(word for word in words if len(word) > 1), *"\u4e1c\u4eac\u00e9\u00fc"]
    pieces += [f"##{piece}" for piece in [*string.ascii_letters, "ing", "ed", "\u00e9", "\u4eac", "."]]
    return t.BertTokenizer(vocab={piece: id for id, piece in enumerate(pieces)}, **options)


def saved_bert(folder, kind, tokenizer=None, **options):
    """BERT with one of its heads."""
    tokenizer = tokenizer or word_pieces()
    config = t.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SIZES, **options)
    return save_parts(folder, (wide(kind(config)), tokenizer))


def saved_reader(folder, kind, **options):
    """BERT, DistilBERT, RoBERTa or XLM-RoBERTa with one of its heads, and its tokenizer."""
    if kind.__name__.startswith("Bert"):
        return saved_bert(folder, kind, **options)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if kind.__name__.startswith("Distil"):
        tokenizer, heads = word_pieces(), SIZES["num_attention_heads"]
        sizes = {"dim": SIZES["hidden_size"], "hidden_dim": SIZES["intermediate_size"]}
        sizes |= {"n_layers": SIZES["num_hidden_layers"], "n_heads": heads, "max_position_embeddings": 64}
    else:
        spaced = kind.__name__.endswith("TokenClassification")  # words come one by one
        roberta = not kind.__name__.startswith("XLM")
        tokenizer = _roberta_tokenizer(folder, add_prefix_space=spaced) if roberta else _xlm_tokenizer(folder)
        sizes = {**SIZES, "max_position_embeddings": 66, "type_vocab_size": 1}
        sizes |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    model = wide(kind(kind.config_class(vocab_size=len(tokenizer), **sizes, **options)))
    return save_parts(folder, (model, tokenizer))


def square(side):
    return {"height": side, "width": side}


def saved_blip(folder, *, side=24, **options):
    """BLIP's captioner: its tokenizer lacks the two pieces that its own code adds."""
    tokenizer, processor = word_pieces(), t.BlipImageProcessor(size=square(side))
    ids = {"bos_token_id": len(tokenizer), "sep_token_id": tokenizer.sep_token_id, "pad_token_id": 0}
    text = {"vocab_size": len(tokenizer) + 2, "max_position_embeddings": 32, "encoder_hidden_size": 24, **ids}
    config = t.BlipConfig(text_config={**SIZES, **text}, vision_config={**SIZES, "image_size": side, "patch_size": 8})
    model = wide(t.BlipForConditionalGeneration(config))
    model.text_decoder.bert.embeddings.position_embeddings.weight.data *= 4
    model.save_pretrained(folder, **options)
    return model, *save_parts(folder, (tokenizer, processor))


def saved_git(folder, *, side=24, tied=False, **options):
    """GIT."""
    tokenizer = word_pieces()
    processor = t.CLIPImageProcessor(size={"shortest_edge": side + 3}, crop_size=square(side))
    ids = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id, "pad_token_id": 0}
    vision = {**SIZES, "image_size": side, "patch_size": 8}
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 32, "tie_word_embeddings": tied}
    model = wide(t.GitForCausalLM(t.GitConfig(vision_config=vision, **sizes, **ids)))
    model.git.embeddings.position_embeddings.weight.data *= 4
    model.save_pretrained(folder, **options)
    return model, *save_parts(folder, (tokenizer, processor))


def saved_trocr(folder, *, side=24, small=False, **options):
    """TrOCR as microsoft/trocr-base-handwritten is laid out or, small, as trocr-small-stage1: each in its own ways."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _xlm_tokenizer(folder) if small else _roberta_tokenizer(folder)
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    sizes |= {"vocab_size": len(tokenizer) + 3 * small, "max_position_embeddings": 32}
    if small:
        sinusoids = {"use_learned_position_embeddings": False, "layernorm_embedding": False, "scale_embedding": True}
        sizes |= sinusoids | {"tie_word_embeddings": False, "activation_function": "relu"}
    else:
        sizes["cross_attention_hidden_size"] = SIZES["hidden_size"]
    decoder = t.TrOCRForCausalLM(t.TrOCRConfig(**sizes))
    vit = t.ViTModel(t.ViTConfig(image_size=side, patch_size=8, qkv_bias=False, **SIZES), add_pooling_layer=False)
    model = t.VisionEncoderDecoderModel(encoder=deit(side) if small else vit, decoder=decoder).eval()
    wide(model)
    if not small:
        decoder.model.decoder.embed_positions.weight.data *= 4
    special = {"decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    # Trained models never write padding, whose positions differ between versions of transformers.
    model.generation_config.update(**special, bad_words_ids=[[1]], renormalize_logits=True)
    model.save_pretrained(folder, **options)
    return model, *save_parts(folder, (tokenizer, t.ViTImageProcessor(size=square(side))))


def _roberta_tokenizer(folder, **options):
    made = byte_pairs(texts=TEXTS).backend_tokenizer
    merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece in sorted(made.get_vocab()) if piece != END), "<mask>"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]))
    # The published ones say that a gap takes the space before it.
    mask = t.AddedToken("<mask>", lstrip=True, special=True)
    return t.RobertaTokenizer(vocab=vocab, merges=merges, mask_token=mask, **options)


def _xlm_tokenizer(folder):
    model = sentencepieces(TEXTS, vocab_size=80)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    return t.XLMRobertaTokenizer.from_pretrained(folder)


def sentencepieces(texts, **options):
    """The bytes of a SentencePiece model that is learned from a few texts."""
    model = io.BytesIO()
    options = {"vocab_size": 90, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
    return model.getvalue()


CAPTIONERS = {
    "vit_gpt2": saved_captioner,
    "deit_gpt2": lambda folder, side=24, **more: saved_captioner(folder, side=side, encoder=deit(side), **more),
    **{"blip": saved_blip, "git": saved_git, "git_tied": partial(saved_git, tied=True)},
    **{"trocr": saved_trocr, "trocr_small": partial(saved_trocr, small=True)},
}


def caption_logits(model, pixels, tokens):
    """Logits of a captioner of theirs, whichever it is."""
    if isinstance(model, t.VisionEncoderDecoderModel):
        return model(pixel_values=pixels, decoder_input_ids=tokens).logits
    return model(input_ids=tokens, pixel_values=pixels).logits[:, -tokens.shape[1] :]


def write_captions(model, tokenizer, pixels, **options):
    """Texts of a captioner of theirs."""
    # With a cache, transformers before 5.18 miscounts GIT's positions.
    cached = not isinstance(model, t.GitForCausalLM)
    rows = model.generate(pixel_values=pixels, use_cache=cached, **options).tolist()
    return [tokenizer.decode([id for id in row if id < len(tokenizer)], skip_special_tokens=True) for row in rows]


def vision(kind, config, **sizes):
    return wide(kind(config(**{**SIZES, "image_size": 24, "patch_size": 8, **sizes})))


def _dinov2(kind, **options):
    """Trained on images of 40 pixels, used with 24."""
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    return wide(kind(t.Dinov2Config(**sizes, mlp_ratio=3, image_size=40, patch_size=8, **options)))


def _siglip(**options):
    vision = {**SIZES, "image_size": 24, "patch_size": 8}
    return wide(t.SiglipForImageClassification(t.SiglipConfig(vision_config=vision, **options)))


SQUARE, LARGER = square(24), square(28)
# Encoders of images with their processors; each cuts its images in a way of its own.
ENCODERS = {
    "vit": lambda: (vision(t.ViTModel, t.ViTConfig), t.ViTImageProcessor(size=SQUARE)),
    "deit": lambda: (vision(t.DeiTModel, t.DeiTConfig), t.DeiTImageProcessor(size=LARGER, crop_size=SQUARE)),
    "clip_vision": lambda: (
        vision(t.CLIPVisionModel, t.CLIPVisionConfig),
        t.CLIPImageProcessor(size={"shortest_edge": 24}, crop_size=SQUARE),
    ),
    "siglip": lambda: (vision(t.SiglipVisionModel, t.SiglipVisionConfig), t.SiglipImageProcessor(size=SQUARE)),
    "dinov2": lambda: (_dinov2(t.Dinov2Model), t.BitImageProcessor(size={"shortest_edge": 27}, crop_size=SQUARE)),
}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "a, b"}, "label2id": {"cat": 0, "dog": 1, "a, b": 2}}
TEACHER = t.DeiTForImageClassificationWithTeacher
CLASSIFIERS = {
    "vit": lambda: (vision(t.ViTForImageClassification, t.ViTConfig, **LABELS), ENCODERS["vit"]()[1]),
    "deit": lambda: (vision(t.DeiTForImageClassification, t.DeiTConfig, **LABELS), ENCODERS["deit"]()[1]),
    "deit_teacher": lambda: (vision(TEACHER, t.DeiTConfig, **LABELS), ENCODERS["deit"]()[1]),
    "siglip": lambda: (_siglip(**LABELS), ENCODERS["siglip"]()[1]),
    "dinov2": lambda: (_dinov2(t.Dinov2ForImageClassification, **LABELS), ENCODERS["dinov2"]()[1]),
}


def save_parts(folder, parts):
    """Saves all parts of a model."""
    for part in parts:
        part.save_pretrained(folder)
    return parts


def pixels_of(processor, paths):
    """What a processor of theirs makes of some files."""
    return processor([Image.open(path) for path in paths], return_tensors="pt").pixel_values


def photos(folder, count=8):
    """Pictures of mixed sizes, coloured at random in coarse patches."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(count):
        cells = torch.randint(256, (7, 9, 3), dtype=torch.uint8).numpy()
        path = folder / f"{number}.png"
        Image.fromarray(cells).resize((30 + 17 * number, 90 - 7 * number), Image.Resampling.BICUBIC).save(path)
        paths.append(str(path))
    return paths


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
TIED = {"tie_word_embeddings": True}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
# Decoders of Llama's family: class, config, options of the config.
DECODERS = {
    "llama": (t.LlamaForCausalLM, t.LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    "llama3": (t.LlamaForCausalLM, t.LlamaConfig, {"rope_parameters": LLAMA3, **TIED, "head_dim": 10}),
    "linear": (t.LlamaForCausalLM, t.LlamaConfig, {"rope_parameters": LINEAR}),
    "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config, TIED),
    "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config, {"head_dim": 16}),
    "gemma": (t.GemmaForCausalLM, t.GemmaConfig, {"head_dim": 16}),
}


def saved_decoder(folder, name, *, tokenizer=None, ends=None, old=False, dtype=None, **options):
    """A decoder of Llama's family.

    Args:
        ends: Ids that end a text.
        old: Whether its config.json is laid out as most published folders have it.
    """
    kind, config, own = DECODERS[name]
    tokenizer = tokenizer or byte_pairs()
    end = tokenizer.eos_token_id
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 64, "vocab_size": len(tokenizer)}
    stated = config(**sizes, **own, bos_token_id=end, eos_token_id=ends or end, pad_token_id=end)
    model = wide(kind(stated), std=0.3, norms=None if name == "gemma" else "RMSNorm").to(dtype or torch.float32)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, **options)
    if old:
        path = Path(folder) / "config.json"
        stated = json.loads(path.read_text())
        rope = stated.pop("rope_parameters")
        theta, kind_of = rope.pop("rope_theta"), rope.pop("rope_type")
        both = {"type": kind_of} | ({} if kind_of == "linear" else {"rope_type": kind_of})  # Llama 3's have both
        scaling = None if kind_of == "default" else {**both, **rope}
        path.write_text(json.dumps(stated | {"rope_theta": theta, "rope_scaling": scaling}))
    return model, tokenizer
