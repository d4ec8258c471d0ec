"""Small random models that benchmarks/references/llama_cpp_files.py runs in llama.cpp, and what vlm computes."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from gguf_files import LLAMA3
from hugging import TEXTS, byte_pairs, gpt2, wide
from image_text import SPECIAL, SQUARE, TEMPLATES, TEXT, VISION
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import gelu
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from vlm.checkpoint.export import export
from vlm.checkpoint.load import load_model, read
from vlm.data.text.tokenizer import tokenizer_from_state

PLAIN = {"rope_type": "default", "rope_theta": 1e5}  # configs that share one change it
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 128}
LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 24, "rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {"head_dim": 24, "rope_parameters": PLAIN}),
    "gpt2": ("GPT2", {}),
    "llama2": ("Llama", {"rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "gemma_pieces": ("Gemma", {"head_dim": 24, "rope_parameters": PLAIN}),
}
PIECES = {"llama2": True, "gemma_pieces": False}  # with SentencePiece's tokenizer: whether a space precedes texts
IMAGE_MODELS = ("llava_siglip", "llava_clip", "smolvlm")
NAMES = [*LANGUAGE_MODELS, *IMAGE_MODELS]
WORDS = sorted({word for text in TEXTS for word in text.split()})
LINES = [*TEXTS[:4], "  two  spaces\ttab\r\n\n lines   12 and 3456 7", "Zürich 東京 \U0001f642 don't", "a <tool> b", ""]
PROMPTS = [f"{WORDS[n]} {WORDS[-2 * n]} {n} {WORDS[-n]}'s" for n in range(16)]
LENGTH = 16


def sentence_pieces(folder: Path, *, prefix: bool = True) -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    """A tokenizer of SentencePiece's byte pairs, as a model and as transformers converts it.

    Args:
        prefix: Whether a space precedes each text, as in Llama 2; else the tokenizer has the form of Gemma's.
    """
    text = folder / "texts.txt"
    text.write_text("\n".join([*TEXTS, *LINES[:6]]))
    options = {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "character_coverage": 1.0}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    options |= {"add_dummy_prefix": prefix}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(folder / "tokenizer"), **options)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    pieces = [model.id_to_piece(id) for id in range(model.get_piece_size())]
    ids = {piece: id for id, piece in enumerate(pieces)}
    halves = {piece: [(piece[:at], piece[at:]) for at in range(1, len(piece))] for piece in pieces}
    usual = [piece for piece in pieces if not model.is_byte(ids[piece]) and not model.is_control(ids[piece])]
    usual.sort(key=lambda piece: -model.get_score(ids[piece]))
    merges = [pair for piece in usual for pair in halves[piece] if pair[0] in ids and pair[1] in ids]
    made = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def save_language_model(name: str, folder: Path) -> None:
    """Saves a model whose weights depend on its name only, and its tokenizer."""
    kind, own = LANGUAGE_MODELS[name]
    folder.mkdir(parents=True)
    tokenizer = sentence_pieces(folder, prefix=PIECES[name])[1] if name in PIECES else byte_pairs(320)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if kind == "GPT2":
        torch.manual_seed(7)
        model = gpt2(len(tokenizer), end, n_embd=64, n_head=4)  # Q8_0 has blocks of 32 numbers
    else:
        config = getattr(transformers, f"{kind}Config")(
            **SIZES | deepcopy(own), vocab_size=len(tokenizer), bos_token_id=begin, eos_token_id=end
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        torch.manual_seed(7)
        model = wide(model, std=0.15, norms="RMSNorm")
    # Random bytes are no text, and SentencePiece writes the unknown token as a text of its own.
    unwritten = [id for piece, id in tokenizer.get_vocab().items() if piece == "<unk>" or piece.startswith("<0x")]
    model.get_output_embeddings().weight.data[unwritten] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name in PIECES:
        (folder / ("tokenizer.json" if name == "llama2" else "tokenizer.model")).unlink()


@torch.no_grad()
def generate(model: Any, tokens: list[int], ends: set[int]) -> list[int]:
    """The greedy tokens after a prompt, without a cache."""
    generated: list[int] = []
    while len(generated) < LENGTH and not ends & {*generated}:
        logits = model.head(model(torch.tensor([tokens + generated]))[:, -1])
        generated.append(int(logits.argmax()))
    return generated


def round_inputs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product as llama.cpp computes it for weights in Q8_0: its inputs are rounded to blocks of 8-bit numbers."""
    kind = gguf.GGMLQuantizationType.Q8_0
    rounded = torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), kind), kind))
    return rounded @ weight.T + (0 if bias is None else bias)


def tabulated_gelu(x: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """GELU as llama.cpp reads it from a table of 16-bit numbers."""
    return gelu(x.half().float(), approximate=approximate).half().float()


@contextmanager
def rounding_of_llama_cpp() -> Iterator[None]:
    """Computes products and GELU as llama.cpp does with weights in Q8_0."""
    with patch("torch.nn.functional.linear", round_inputs), patch("torch.nn.functional.gelu", tabulated_gelu):
        yield


@torch.no_grad()
def run_language_model(place: Path) -> dict[str, Any]:
    """What vlm computes with a model: the ids of texts and prompts, greedy ids and texts, and logits."""
    loaded = read(place)
    model, tokenizer = load_model(loaded), tokenizer_from_state(loaded["vlm"]["tokenizer"])
    prompts = [[*tokenizer.starts, *tokenizer.encode(text)] for text in PROMPTS]
    generated = [generate(model, prompt, {tokenizer.eos_id}) for prompt in prompts]
    return {
        "lines": [(line, [*tokenizer.starts, *tokenizer.encode(line)]) for line in LINES if line],
        "texts": PROMPTS,
        "prompts": prompts,
        "generated": generated,
        "decoded": [tokenizer.decode(tokens + more) for tokens, more in zip(prompts, generated, strict=True)],
        "logits": model.head(model(torch.tensor([prompts[0]]))[0, -1]).tolist(),
    }


def line_pairs() -> transformers.PreTrainedTokenizerFast:
    """The tokenizer of `image_text`, with one and two line feeds as pieces, which SmolVLM's prompts contain."""
    pairs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([digits, pairs]), decoders.ByteLevel()
    options = {"initial_alphabet": pairs.alphabet(), "special_tokens": SPECIAL, "show_progress": False}
    made.train_from_iterator([*TEXTS, *["a\n\n"] * 99], trainers.BpeTrainer(vocab_size=340, **options))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def make_image_model(name: str) -> tuple[Any, Any]:
    """A model of transformers that reads images inside its text, with its processor; random weights."""
    tokenizer = line_pairs()
    ids = {f"{part}_token_id": getattr(tokenizer, f"{part}_token_id") for part in ("bos", "eos", "pad")}
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    text = {**TEXT, "vocab_size": len(tokenizer), **ids}
    if name == "smolvlm":
        sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
        image = SmolVLMImageProcessorPil(**sizes, do_image_splitting=True)
        vision = VISION | {"image_size": 56, "patch_size": 4}
        config = transformers.SmolVLMConfig(
            vision_config=vision,
            text_config=transformers.LlamaConfig(**text),
            scale_factor=7,
            tie_word_embeddings=True,
            image_token_id=image_id,
        )
        model = transformers.SmolVLMForConditionalGeneration(config)
        processor = transformers.Idefics3Processor(
            image, tokenizer, image_seq_len=4, chat_template=TEMPLATES["smolvlm"]
        )
    else:
        is_clip = name == "llava_clip"
        image = transformers.SiglipImageProcessor(size=SQUARE)
        if is_clip:
            image = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE)
        kind = transformers.CLIPVisionConfig if is_clip else transformers.SiglipVisionConfig
        strategy = "default" if is_clip else "full"
        config = transformers.LlavaConfig(
            vision_config=kind(**VISION),
            text_config=transformers.Qwen2Config(**text, tie_word_embeddings=True),
            image_token_index=image_id,
            vision_feature_layer=-2,
            vision_feature_select_strategy=strategy,
        )
        model = transformers.LlavaForConditionalGeneration(config)
        processor = transformers.LlavaProcessor(
            image,
            tokenizer,
            patch_size=8,
            chat_template=TEMPLATES["qwen"],
            num_additional_image_tokens=int(is_clip),
            vision_feature_select_strategy=strategy,
        )
    torch.manual_seed(7)
    model = wide(model, std=0.3, norms="RMSNorm")
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ("<eos>", "<end_of_utterance>", "<|im_end|>")]
    model.generation_config.update(**ids | {"eos_token_id": ends})
    return model, processor


def _append_class_token(embeddings: Any) -> None:
    """Puts CLIP's class token after the patches, but leaves the positions in order, as llama.cpp 0.3.36 does."""

    def forward(pixel_values: torch.Tensor, **options: Any) -> torch.Tensor:
        patches = embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        token = embeddings.class_embedding.expand(len(patches), 1, -1)
        return torch.cat([patches, token], 1) + embeddings.position_embedding.weight

    embeddings.forward = forward


@torch.no_grad()
def run_image_model(model: Any, processor: Any, place: Path) -> dict[str, Any]:
    """What transformers computes with prompts of one image; saves the images and their states."""
    rng = np.random.default_rng(7)
    side = 112 if type(model).__name__.startswith("SmolVLM") else 32
    images = rng.integers(256, size=(16, side // 8, side // 8, 3)).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    prompts = [f"<image>\n{prompt}" for prompt in PROMPTS]
    inner = model.model.connector if side == 112 else model.model.multi_modal_projector
    states: list[np.ndarray] = []
    hook = inner.register_forward_hook(lambda *called: states.append(called[-1].flatten(0, -2).numpy()))
    generated = []
    for image, prompt in zip(images, prompts, strict=True):
        inputs = processor(images=[Image.fromarray(image)], text=prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        generated.append(tokens[0, inputs.input_ids.shape[1] :].tolist())
    np.save(place / "images.npy", images)
    np.save(place / "states.npy", np.stack(states))
    if side == 32 and isinstance(model.config.vision_config, transformers.CLIPVisionConfig):
        states.clear()
        _append_class_token(model.model.vision_tower.embeddings)
        for image, prompt in zip(images, prompts, strict=True):
            model(**processor(images=[Image.fromarray(image)], text=prompt, return_tensors="pt"))
        np.save(place / "appended_states.npy", np.stack(states))
    hook.remove()
    return {"prompts": prompts, "generated": generated}


def digest(folder: Path) -> str:
    """A short hash of a folder's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()[-4096:]).hexdigest()[:16]


def prepare(name: str, folder: Path, *, outtypes: tuple[str, ...]) -> None:
    """Saves a model, its exports, and what vlm computes with it."""
    if name in IMAGE_MODELS:
        model, processor = make_image_model(name)
        model.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
        found = {"image": run_image_model(model, processor, folder)}
    else:
        save_language_model(name, folder / "model")
        found = {"text": run_language_model(folder / "model")}
    for outtype in outtypes:
        export(str(folder / "model"), str(folder / outtype), form="gguf", outtype=outtype)
    if "q8_0" in outtypes and "text" in found:
        found["q8_0"] = run_language_model(folder / "q8_0" / "model-Q8_0.gguf")
        with rounding_of_llama_cpp():
            found["q8_0 computed as llama.cpp does"] = run_language_model(folder / "q8_0" / "model-Q8_0.gguf")
    expected = {"digest": digest(folder / "model"), **found}
    (folder / "expected.json").write_text(json.dumps(expected))


def save_pair(path: Path) -> None:
    """Saves a small SmolVLM as two GGUF files, NAME.gguf and mmproj-NAME.gguf."""
    folder = path.with_suffix(".export")
    model, processor = make_image_model("smolvlm")
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    export(str(folder / "model"), str(folder / "gguf"), form="gguf")
    (folder / "gguf" / "model-F16.gguf").rename(path)
    (folder / "gguf" / "mmproj-model-F16.gguf").rename(path.with_name(f"mmproj-{path.name}"))
