"""Small random models of Hugging Face that read images inside their text, with their processors."""

import json
from pathlib import Path
from typing import Any

import transformers as t
from chats import digit_pairs
from hugging import SIZES, TEXTS, wide
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

VISION = {**SIZES, "image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 40, "max_position_embeddings": 2048}
SQUARE = {"height": 32, "width": 32}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SPECIAL += ["<|im_start|>", "<|im_end|>", *(f"<row_{n}_col_{m}>" for n in range(1, 7) for m in range(1, 7))]
USER = "{% for m in messages %}"
IMAGES = "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}"
WORDS = "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
END = "{% endfor %}"
ASKED = "{% if add_generation_prompt %}"
LINES = "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}{{ '<image>' }}{% endif %}"
COLON = "{% if m['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
# Chat templates as published folders have them, in fewer words.
TEMPLATES = {
    "llava": f"{USER}{{% if m['role'] != 'system' %}}{{{{ m['role'].upper() + ': ' }}}}{{% endif %}}"
    f"{IMAGES}{{{{ '<image>\n' }}}}{END}"
    f"{WORDS}{{{{ c['text'] + ' ' }}}}{END}{END}{ASKED}{{{{ 'ASSISTANT:' }}}}{{% endif %}}",
    "qwen": f"{USER}{{{{ '<|im_start|>' + m['role'] + ' ' }}}}{IMAGES}{{{{ '<image>' }}}}{END}"
    f"{WORDS}{{{{ '\\n' + c['text'] }}}}{END}{{{{'<|im_end|>'}}}}{END}"
    f"{ASKED}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}",
    "interleave": f"{USER}{{{{ '<|im_start|>' + m['role'] + ' ' }}}}{IMAGES}{{{{ '<image>\n' }}}}{END}"
    f"{WORDS}{{{{ c['text'] }}}}{END}{{{{'<|im_end|>'}}}}{END}"
    f"{ASKED}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}",
    "smolvlm": f"<|im_start|>{USER}{{{{ m['role'] | capitalize }}}}{COLON}{LINES}{END}<end_of_utterance>\n{END}"
    f"{ASKED}{{{{ 'Assistant:' }}}}{{% endif %}}",
}


def byte_pairs() -> t.PreTrainedTokenizerFast:
    return _tokenizer(digit_pairs(SPECIAL))


def pieces() -> t.PreTrainedTokenizerFast:
    """Pairs over SentencePiece's marks of spaces, one before each stretch of text, as Llama 2 has them."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=["<unk>", *SPECIAL, *raw], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in raw]
    made = Tokenizer.from_str(json.dumps(content))
    bos = made.token_to_id("<bos>")
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return _tokenizer(made)


def _tokenizer(made: Tokenizer) -> t.PreTrainedTokenizerFast:
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return t.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def _ids(tokenizer: Any) -> dict[str, int]:
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def _llava(vision: Any, text: Any, tokenizer: Any, template: str, **options: Any) -> list[Any]:
    image, clip = t.SiglipImageProcessor(size=SQUARE), isinstance(vision, t.CLIPVisionConfig)
    image = t.CLIPImageProcessor(size={"shortest_edge": 35}, crop_size=SQUARE) if clip else image
    config = t.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>"), **options
    )
    own = {"patch_size": 8, "chat_template": TEMPLATES[template], "num_additional_image_tokens": int(clip)}
    own["vision_feature_select_strategy"] = config.vision_feature_select_strategy
    return [t.LlavaForConditionalGeneration(config), t.LlavaProcessor(image, tokenizer, **own)]


def llava_clip(**options: Any) -> list[Any]:
    tokenizer = pieces()
    text = t.LlamaConfig(**TEXT, vocab_size=len(tokenizer) + 6, **_ids(tokenizer))
    return _llava(t.CLIPVisionConfig(**VISION), text, tokenizer, "llava", **options)


def llava_siglip(template: str = "qwen") -> list[Any]:
    tokenizer = byte_pairs()
    text = t.Qwen2Config(**TEXT, vocab_size=len(tokenizer), tie_word_embeddings=True, **_ids(tokenizer))
    options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "relu"}
    return _llava(t.SiglipVisionConfig(**VISION), text, tokenizer, template, **options)


def idefics3(*, smol: bool = False, tiles: bool = False) -> list[Any]:
    tokenizer = byte_pairs()
    kind, config = t.Idefics3ForConditionalGeneration, t.Idefics3Config
    image: Any = Idefics3ImageProcessorPil
    if smol:
        kind, config, image = t.SmolVLMForConditionalGeneration, t.SmolVLMConfig, SmolVLMImageProcessorPil
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    made = image(**sizes, do_image_splitting=tiles)
    text = t.LlamaConfig(**TEXT, vocab_size=len(tokenizer), **_ids(tokenizer))
    vision = VISION | {"image_size": 56, "patch_size": 4}  # 14 patches a side, of which rounding moves some
    own = {"scale_factor": 7 if smol else 2, "tie_word_embeddings": smol}
    own["image_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
    model = kind(config(vision_config=vision, text_config=text, **own))
    model.generation_config.update(**_ids(tokenizer))
    number = (14 // (7 if smol else 2)) ** 2
    return [model, t.Idefics3Processor(made, tokenizer, image_seq_len=number, chat_template=TEMPLATES["smolvlm"])]


def paligemma() -> list[Any]:
    tokenizer = pieces()
    image = t.SiglipImageProcessor(size=SQUARE)
    image.image_seq_length = 16
    processor = t.PaliGemmaProcessor(image, tokenizer)
    ids = _ids(tokenizer)
    text = t.GemmaConfig(**TEXT, head_dim=16, vocab_size=len(tokenizer), **ids)
    vision, image_id = t.SiglipVisionConfig(**VISION, vision_use_head=False), tokenizer.convert_tokens_to_ids("<image>")
    own = {"image_token_index": image_id, "projection_dim": 24, "hidden_size": 24}
    config = t.PaliGemmaConfig(vision_config=vision, text_config=text, **own)
    model = t.PaliGemmaForConditionalGeneration(config)
    model.generation_config.update(**ids)
    return [model, processor]


MODELS = {
    "llava_clip": llava_clip,
    "llava_full": lambda: llava_clip(vision_feature_layer=-1, vision_feature_select_strategy="full"),
    "llava_siglip": llava_siglip,
    "llava_interleave": lambda: llava_siglip("interleave"),
    "idefics3": idefics3,
    "smolvlm": lambda: idefics3(smol=True),
    "smolvlm_tiles": lambda: idefics3(smol=True, tiles=True),
    "paligemma": paligemma,
}


def saved_image_text(folder: Any, name: str, *, old: bool = False) -> tuple[Any, Any]:
    """A model with its processor in a folder.

    Args:
        old: Whether it is laid out as most published folders are.
    """
    model, processor = MODELS[name]()
    model = wide(model, std=0.3, norms=None if name == "paligemma" else "RMSNorm")
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    if old:
        _as_published(Path(folder), name)
    return model, processor


def _as_published(folder: Path, name: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if name.startswith(("llava", "pali")):
        longer = lambda one: one.replace("vision_tower.", "vision_tower.vision_model.")  # noqa: E731
        tensors = {longer(one): tensor for one, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    stated = json.loads(config.read_text())
    rope = stated["text_config"].pop("rope_parameters")
    stated["text_config"] |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    config.write_text(json.dumps(stated))
    whole = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(whole.pop("image_processor")))
    (folder / "processor_config.json").write_text(json.dumps(whole))
    if (template := folder / "chat_template.jinja").is_file():
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
        template.unlink()
