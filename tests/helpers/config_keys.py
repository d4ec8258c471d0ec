"""Configs of Hugging Face's classes with generated values of their keys, and models that transformers makes of them."""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as t
from hugging import caption_logits, wide

from vlm.checkpoint.rebuild import rebuild
from vlm.models.context import PLACE, interleave_states
from vlm.models.pretrained.folder import Folder, specify
from vlm.models.pretrained.load import convert_hugging_face

Values = dict[str, Any]
Result = tuple[torch.Tensor, Callable[[Any], torch.Tensor]]  # what theirs computes, and a function of our model
MISSING = "(removed)"  # the value of a key that is removed
ACTIVATIONS = [
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "gelu_python",
    "gelu_accurate",
    "quick_gelu",
    "relu",
]
ACTIVATIONS += ["relu2", "silu", "swish", "tanh", "mish", "linear", "gelu_10", "relu6"]
EPSILONS = [1e-12, 1e-6, 1e-5, 1e-3, 0.1, MISSING]
FLAGS = [True, False, MISSING]
RATES = [0.0, 0.5, None, MISSING]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Forms of rotary positions, old and new; each sets several keys.
ROPES: list[Values] = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 200.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 200.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {}, "rope_theta": 50.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 16, "rope_theta": 9.0, **LLAMA3}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
    {"rope_theta": 100},
    {"rope_theta": 100.0, "rope_scaling": None},
    {"rope_theta": 100.0, "rope_scaling": {}},
    {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 100.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
    {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4}},
    {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 7.0}},
    {"rope_theta": 100.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    {"rope_theta": 100.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8, **LLAMA3}},
    {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 8},
    {"rope_theta": 100.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_theta": 100.0, "rope_scaling": {"rope_type": "default", "factor": 4.0}},
    {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 3}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 1.0},
    {"partial_rotary_factor": 0.5, "rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
]
# Values of keys by name, for every class that has them; other keys get values by the type of their default.
VALUES: dict[str, list[Any]] = {
    "activation_function": [*ACTIVATIONS, MISSING],
    "activation": [*ACTIVATIONS, MISSING],
    "hidden_act": [*ACTIVATIONS, MISSING],
    "pooler_act": ["tanh", "relu"],
    "projector_hidden_act": [*ACTIVATIONS, MISSING],
    "summary_activation": [None, "tanh"],
    "summary_type": ["cls_index", "last", "mean"],
    "feed_forward_proj": [*ACTIVATIONS, *(f"gated-{one}" for one in ACTIVATIONS), MISSING],
    "hidden_size": [12, 36, 48],
    "d_model": [12, 36, 48],
    "n_embd": [12, 36, 48],
    "dim": [12, 36, 48],
    "hidden_dim": [13, 48],
    "intermediate_size": [13, 40, 96],
    "d_ff": [13, 40, 96],
    "encoder_ffn_dim": [13, 40],
    "decoder_ffn_dim": [13, 40],
    "n_inner": [None, 13, 40],
    "mlp_ratio": [1, 2, 2.6, 3.99],
    "num_attention_heads": [1, 2, 6, 12],
    "num_heads": [1, 2, 6, 12],
    "n_head": [1, 2, 6],
    "n_heads": [1, 2, 6],
    "encoder_attention_heads": [1, 2, 6],
    "decoder_attention_heads": [1, 2, 6],
    "num_key_value_heads": [1, 2, 4, None, MISSING],
    "head_dim": [2, 6, 8, 10, None, MISSING],
    "d_kv": [2, 7, 16],
    "num_hidden_layers": [1, 3],
    "num_layers": [1, 3],
    "num_decoder_layers": [None, 1, 3],
    "encoder_layers": [1, 3],
    "decoder_layers": [1, 3],
    "n_layer": [1, 3],
    "n_layers": [1, 3],
    "vocab_size": [61, 100],
    "decoder_vocab_size": [None, 70, 61],
    "max_position_embeddings": [24, 64, MISSING],
    "n_positions": [24, 64, MISSING],
    "type_vocab_size": [1, 2, 3, MISSING],
    "image_size": [16, 32, [24, 24], [16, 24]],
    "patch_size": [4, 8, [8, 8]],
    "num_channels": [1, 3, MISSING],
    "scale_factor": [1, 2, 4],
    "relative_attention_num_buckets": [8, 16, MISSING],
    "relative_attention_max_distance": [8, 20, MISSING],
    "vision_feature_layer": [-1, -2, 1, 0, 2, [-1, -2], MISSING],
    "vision_feature_select_strategy": ["default", "full", MISSING],
    "projection_dim": [16, 24],
    "projection_size": [None, 24, 16],
    "use_bidirectional_attention": [None, True, False],
    "sliding_window": [None, 4, 4096, MISSING],
    "max_window_layers": [0, 1, 28, MISSING],
    "layer_types": [None, ["full_attention"] * 2, ["full_attention", "sliding_attention"], ["full_attention"], MISSING],
    "num_image_with_embedding": [None, 1, 3],
    "cross_attention_hidden_size": [None, 24],
    "logit_scale_init_value": [1.0, 3.0],
    "_out_features": [None],
    "_out_indices": [None],
    "pad_token_id": [None, 0, 1, 3, MISSING],
    "bos_token_id": [None, 0, 2, MISSING],
    "eos_token_id": [None, 1, 2, [1, 2], MISSING],
    "sep_token_id": [5],
    "decoder_start_token_id": [0, 3],
    "forced_eos_token_id": [None, 0, 1],
    "problem_type": [None, "single_label_classification", "multi_label_classification", "regression"],
    "id2label": [{"0": "a", "1": "b", "2": "c"}, {"0": "a"}, {"0": "a", "1": "b"}, None],
    "dtype": ["float32", None],
    "chunk_size_feed_forward": [0, 5],
    "output_hidden_states": [True, False],
    "return_dict": [True],
    "is_encoder_decoder": [True, False],
    "label2id": [{"a": 0}],
    "architectures": [],  # selects the class
    "transformers_version": ["4.20.1", "5.24.0", None],
    # Keys that classes of earlier versions, or the base class, had.
    "num_labels": [1, 2, 4],
    "tie_word_embeddings": [True, False, MISSING],
    "tie_encoder_decoder": [True, False],
    "position_embedding_type": ["absolute", "relative_key"],
    "pruned_heads": [{}, {"0": [1]}],
    "torch_dtype": ["float32", "float16"],
    "gradient_checkpointing": [True, False],
    "output_past": [True],
    "per_layer_config": [None, {"0": {"hidden_act": "relu"}}],
    "attention_dropout": RATES[:2],
    "unknown_key": [3, None, "x", {"a": 1}, False],
    "num_beams": [1, 3],
}
BASE_KEYS = ("problem_type", "id2label", "num_labels", "chunk_size_feed_forward", "is_encoder_decoder", "dtype")
BASE_KEYS += (
    "output_hidden_states",
    "transformers_version",
    "tie_word_embeddings",
    "tie_encoder_decoder",
    "pruned_heads",
)
BASE_KEYS += ("torch_dtype", "gradient_checkpointing", "output_past", "per_layer_config", "unknown_key", "num_beams")
BASE_KEYS += ("position_embedding_type", "is_decoder", "add_cross_attention", "pad_token_id", "eos_token_id")


def values_of(name: str, default: Any) -> list[Any]:
    """Valid values of a key."""
    if name in VALUES:
        return VALUES[name]
    if type(default) is bool:
        return FLAGS
    if "eps" in name:
        return EPSILONS
    if type(default) is float or (type(default) is int and ("drop" in name or "layerdrop" in name)):
        return RATES[:2]
    if type(default) is int:
        return [default, default + 1]
    return [None]


@dataclass(frozen=True)
class Family:
    """A class of transformers with a small config.

    Args:
        kind: Name of the class of the model.
        config: The values of config.json besides model_type and architectures.
        compute: Returns what theirs computes, and a function that computes the same with ours.
        parts: Classes of the objects inside the config.
        more: Further values by the path of a key, instead of VALUES.
        sets: Values of several keys at once, by the path of the object that has them.
        norms: How the names of norms end that are none of torch's; None for norms by 1 + w.
        name: Name of the family, if it is not that of the class.
    """

    kind: str
    config: Values
    compute: Callable[[Any, Values], Result]
    parts: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, list[Any]] = field(default_factory=dict)
    sets: Mapping[str, list[Values]] = field(default_factory=dict)
    norms: str | None = "RMSNorm"
    name: str = ""

    @property
    def theirs(self) -> Any:
        return getattr(t, self.kind)

    def changes(self) -> list[tuple[Values, str]]:
        """All changes of a single key, or a set of keys: values by path, and the last part of the paths."""
        found: list[Values] = []
        for within, config_class in {
            "": self.theirs.config_class,
            **{k: config_of(v) for k, v in self.parts.items()},
        }.items():
            prefix = f"{within}." if within else ""
            keys = {one.name: one.default for one in dataclasses.fields(config_class) if one.name not in self.parts}
            for name in dict.fromkeys([*keys, *BASE_KEYS, *config_class.attribute_map]):
                path = f"{prefix}{name}"
                for value in self.more.get(path, values_of(name, keys.get(name))):
                    found.append({path: value})
        found += [{path: value} for path, values in self.more.items() for value in values if {path: value} not in found]
        for within, sets in self.sets.items():
            found += [{f"{within}.{name}" if within else name: value for name, value in one.items()} for one in sets]
        return found


def config_of(name: str) -> Any:
    if hasattr(t, name):
        return getattr(t, name)
    module = {"GitVisionConfig": "git", "Idefics3VisionConfig": "idefics3", "SmolVLMVisionConfig": "smolvlm"}[name]
    return getattr(__import__(f"transformers.models.{module}.configuration_{module}", fromlist=[name]), name)


def change_config(config: Values, changes: Values) -> Values:
    """A copy of a config with some values replaced or removed, by their paths."""
    made = json.loads(json.dumps(config))
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = made
        for one in outer:
            inner = inner[one]
        if value is MISSING:
            inner.pop(last, None)
        else:
            inner[last] = value
    return made


def cases(family: Family, seed: int, count: int) -> Iterator[tuple[int, Values]]:
    """Numbered changes: none, then one after the other in a random order, then pairs of them."""
    draw = random.Random(f"{family.kind} {seed}")
    single = family.changes()
    draw.shuffle(single)
    yield 0, {}
    for number in range(1, count):
        yield number, single[number - 1] if number <= len(single) else {**draw.choice(single), **draw.choice(single)}


def save_family(folder: Path, family: Family, changes: Values, seed: int) -> Any:
    """Writes a random model with a changed config.json; returns the model that transformers reads from it.

    Raises:
        Exception: transformers refuses the config.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stated = {"model_type": family.theirs.config_class.model_type, "architectures": [family.kind]}
    content = json.dumps(change_config(stated | family.config, changes))
    (folder / "config.json").write_text(content)
    torch.manual_seed(seed)
    config = family.theirs.config_class.from_pretrained(folder)
    model = wide(family.theirs(config), std=0.2, norms=family.norms)
    model.float().save_pretrained(folder)
    (folder / "config.json").write_text(content)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return family.theirs.from_pretrained(folder, dtype=torch.float32).eval()


def load_folder(folder: Path) -> Any:
    """Our model of a folder without tokenizer and preprocessing."""
    opened = Folder(folder)
    specified = specify(opened)
    model = rebuild(specified.model or next(iter(specified.parts.values()))).eval()
    state, _ = convert_hugging_face(model, opened)
    model.load_state_dict(state)
    return model


def tokens_of(config: Values, key: str = "vocab_size", length: int = 20) -> torch.Tensor:
    size = min(config.get(key, 60), 60)
    return torch.randint(6, size, (2, length), generator=torch.Generator().manual_seed(1))


def pixels_of(config: Values) -> torch.Tensor:
    size = config.get("image_size", 24)
    height, width = size if isinstance(size, list) else (size, size)
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(2))


def logits(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    return theirs(tokens).logits, lambda ours: ours.head(ours(tokens))


def text_states(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    return theirs(tokens).last_hidden_state, lambda ours: ours(tokens).states


def gaps(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    output = theirs(tokens)
    truth = output.prediction_logits if "prediction_logits" in output else output.logits
    every = torch.arange(tokens.numel())
    return truth, lambda ours: ours.head.logits(ours(tokens, None, None, every)).view(*tokens.shape, -1)


def text_classes(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    return theirs(tokens).logits, lambda ours: ours(tokens)


def spans(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    output = theirs(tokens)
    truth = torch.stack([output.start_logits, output.end_logits], -1)
    return truth, lambda ours: ours(tokens).view(*tokens.shape, -1)


def tags(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    return theirs(tokens).logits, lambda ours: ours(tokens).view(*tokens.shape, -1)


def image_states(theirs: Any, config: Values) -> Result:
    pixels = pixels_of(config)
    states = theirs(pixel_values=pixels).last_hidden_state
    truth = theirs.post_layernorm(states) if hasattr(theirs, "pre_layrnorm") else states
    return truth, lambda ours: ours(pixels).states


def image_classes(theirs: Any, config: Values) -> Result:
    pixels = pixels_of(config.get("vision_config", config))
    return theirs(pixel_values=pixels).logits, lambda ours: ours(pixels)


def vectors(theirs: Any, config: Values) -> Result:
    """Embeddings of images and texts, one after the other, and the likelihoods of their pairs."""
    pixels, texts, clip = pixels_of(config["vision_config"]), config["text_config"], isinstance(theirs, t.CLIPModel)
    tokens = tokens_of(texts, length=texts.get("max_position_embeddings", 77 if clip else 64))
    tokens[:, -1] = texts["vocab_size"] - 1  # the end
    output = theirs(input_ids=tokens, pixel_values=pixels)
    likelihoods = output.logits_per_image.softmax(-1) if clip else output.logits_per_image.sigmoid()
    truth = torch.cat([one.flatten() for one in (output.image_embeds, output.text_embeds, likelihoods)])
    rows = tokens if clip else torch.cat([tokens[:, :1], tokens], 1)  # a begin, which our SigLIP leaves out

    def embed(ours: Any) -> torch.Tensor:
        places = torch.arange(len(rows)) * rows.shape[1]
        images, written = ours.embed_images(pixels), ours.embed_texts(rows, torch.ones_like(rows), places)
        return torch.cat([one.flatten() for one in (images, written, ours.likelihoods(images, written))])

    return truth, embed


def captions(theirs: Any, config: Values) -> Result:
    pixels = pixels_of(config.get("vision_config") or config.get("encoder", {}))
    tokens = tokens_of(config.get("text_config") or config.get("decoder") or config, length=10)
    return caption_logits(theirs, pixels, tokens), lambda ours: ours.head(ours(pixels, tokens))


def translations(theirs: Any, config: Values) -> Result:
    tokens = tokens_of(config)
    truth = theirs(input_ids=tokens, decoder_input_ids=tokens.flip(1)).logits
    return truth, lambda ours: ours.head(ours(tokens, tokens.flip(1)))


def image_texts(theirs: Any, config: Values) -> Result:
    """Logits of the last of a prompt of two tokens, an image and three tokens, and of four tokens after it."""
    pixels, before, after, text = pixels_of(config["vision_config"])[:1], [7, 8], [9, 10, 11], [12, 13, 14, 15]
    tiles = type(theirs).__name__.startswith(("Idefics3", "SmolVLM"))
    given = {"pixel_values": pixels[:, None] if tiles else pixels}
    states = theirs.get_image_features(**given).pooler_output  # a tensor, or one for each image
    places = sum(part.numel() for part in states) // theirs.config.text_config.hidden_size
    image_id = theirs.config.image_token_id
    ids = torch.tensor([[*before, *[image_id] * places, *after, *text]])
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(theirs, t.PaliGemmaForConditionalGeneration):
        given["token_type_ids"] = torch.tensor([[0] * (ids.shape[1] - len(text)) + [1] * len(text)])

    def read(ours: Any) -> torch.Tensor:
        states = ours.encode(pixels).states
        context = interleave_states([[*before, *[PLACE] * states.shape[1], *after]], states.flatten(0, 1))
        return ours.head(ours.decoder(torch.tensor([[after[-1], *text]]), None, context))

    return theirs(**given).logits[:, -1 - len(text) :], read


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
IMAGES = SIZES | {"image_size": 24, "patch_size": 8}
TEXTS = SIZES | {"vocab_size": 61, "max_position_embeddings": 40}
BERT = TEXTS | {"pad_token_id": 0}
BERT_LEGACY = {
    "directionality": ["bidi"],
    "pooler_type": ["first_token_transform"],
    "output_past": [True],
    "gradient_checkpointing": [False, True],
    "classifier_dropout": [None, 0.1],
}
ROBERTA = TEXTS | {"pad_token_id": 1, "type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2}
DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "vocab_size": 61, "max_position_embeddings": 40}
DINO = {name: value for name, value in IMAGES.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
DECODER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODER |= {"intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 64, "head_dim": 6}
DECODER_LEGACY: dict[str, list[Any]] = {
    "pretraining_tp": [1, 2],
    "rope_interleaved": [False, True],
    "is_llama_config": [True],
    "max_sequence_length": [2048],
    "sliding_window": [None, 8],
    "attention_bias": [True, False, MISSING],
    "logit_scale": [0.5],
    "transformers.js_config": [{"dtype": "q4"}],
    "attention_multiplier": [0.25],
    "num_experts": [4],
}
QWEN_SETS: list[Values] = [
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    {"use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    {"use_sliding_window": True, "layer_types": ["full_attention"] * 2, "sliding_window": 4},
]
GEMMA_SETS: list[Values] = [
    {"hidden_act": act, "hidden_activation": activation}
    for act in ("gelu", "gelu_pytorch_tanh", "silu", "gelu_new")
    for activation in (None, "gelu", "gelu_pytorch_tanh", "silu")
]
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 61, "n_positions": 40}
MARIAN = {"d_model": 24, "vocab_size": 61, "max_position_embeddings": 40, "pad_token_id": 60}
MARIAN |= {
    f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("ffn_dim", 40))
}
MARIAN |= {"encoder_attention_heads": 3, "decoder_attention_heads": 4, "decoder_start_token_id": 60, "eos_token_id": 0}
T5 = {"d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3, "vocab_size": 61}
TROCR = {"d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "vocab_size": 61}
TROCR |= {"max_position_embeddings": 40}
CLIP_TEXT = TEXTS | {"eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}
SIGLIP_TEXT = TEXTS | {"max_position_embeddings": 16, "pad_token_id": 1}
TEXT_PART = {name: value for name, value in DECODER.items() if name != "head_dim"} | {"model_type": "llama"}
CLIP_EOS = {"text_config.eos_token_id": [2], "text_config.pad_token_id": [None, 0, 1]}


def _ved(encoder: Values, decoder: Values) -> Values:
    return {"encoder": encoder, "decoder": decoder, "is_encoder_decoder": True}


VIT_PART = IMAGES | {"model_type": "vit"}
GPT2_PART = GPT2 | {"model_type": "gpt2", "add_cross_attention": True, "is_decoder": True}
TROCR_PART = TROCR | {"model_type": "trocr", "is_decoder": True, "add_cross_attention": True}
READERS = {
    "ForMaskedLM": gaps,
    "ForSequenceClassification": text_classes,
    "ForTokenClassification": tags,
    "Model": text_states,
}
_VISION = {"vision_config": "CLIPVisionConfig"}
FAMILIES = {
    family.name or family.kind: family
    for family in [
        *(Family(f"Bert{head}", BERT, how, more=BERT_LEGACY) for head, how in READERS.items()),
        Family("BertForPreTraining", BERT, gaps),
        Family("BertForQuestionAnswering", BERT, spans),
        *(Family(f"DistilBert{head}", DISTIL, how) for head, how in READERS.items()),
        Family("DistilBertForQuestionAnswering", DISTIL, spans),
        *(Family(f"Roberta{head}", ROBERTA, how, more=BERT_LEGACY) for head, how in READERS.items()),
        *(Family(f"XLMRoberta{head}", ROBERTA, how) for head, how in READERS.items()),
        Family("ViTModel", IMAGES, image_states),
        Family("ViTForImageClassification", IMAGES, image_classes),
        Family("DeiTModel", IMAGES, image_states),
        Family("DeiTForImageClassification", IMAGES, image_classes),
        Family("DeiTForImageClassificationWithTeacher", IMAGES, image_classes),
        Family("Dinov2Model", DINO, image_states),
        Family("Dinov2ForImageClassification", DINO, image_classes),
        Family("CLIPVisionModel", IMAGES, image_states),
        Family("SiglipVisionModel", IMAGES, image_states),
        Family(
            "CLIPModel",
            {"vision_config": IMAGES, "text_config": CLIP_TEXT, "projection_dim": 16},
            vectors,
            parts={**_VISION, "text_config": "CLIPTextConfig"},
            more={
                **CLIP_EOS,
                "text_config_dict": [None, CLIP_TEXT, CLIP_TEXT | {"hidden_act": "gelu"}, {"hidden_size": 24}],
                "vision_config_dict": [None, IMAGES, IMAGES | {"layer_norm_eps": 0.1}],
            },
        ),
        Family(
            "SiglipModel",
            {"vision_config": IMAGES, "text_config": SIGLIP_TEXT},
            vectors,
            parts={"vision_config": "SiglipVisionConfig", "text_config": "SiglipTextConfig"},
            more={"text_config_dict": [None, SIGLIP_TEXT], "text_config.max_position_embeddings": [16, 8, MISSING]},
        ),
        Family(
            "SiglipForImageClassification",
            {"vision_config": IMAGES},
            image_classes,
            parts={"vision_config": "SiglipVisionConfig"},
        ),
        Family(
            "BlipForConditionalGeneration",
            {"vision_config": IMAGES, "text_config": TEXTS | {"encoder_hidden_size": 24}},
            captions,
            parts={"vision_config": "BlipVisionConfig", "text_config": "BlipTextConfig"},
        ),
        Family(
            "GitForCausalLM",
            {"vision_config": IMAGES, **BERT},
            captions,
            parts={"vision_config": "GitVisionConfig"},
        ),
        Family(
            "VisionEncoderDecoderModel",
            _ved(VIT_PART, GPT2_PART),
            captions,
            parts={"encoder": "ViTConfig", "decoder": "GPT2Config"},
            name="vit_gpt2",
        ),
        Family(
            "VisionEncoderDecoderModel",
            _ved(VIT_PART | {"model_type": "deit"}, TROCR_PART),
            captions,
            parts={"encoder": "DeiTConfig", "decoder": "TrOCRConfig"},
            name="deit_trocr",
        ),
        Family(
            "VisionEncoderDecoderModel",
            _ved(IMAGES | {"model_type": "siglip_vision_model", "vision_use_head": False}, GPT2_PART),
            captions,
            parts={"encoder": "SiglipVisionConfig", "decoder": "GPT2Config"},
            name="siglip_gpt2",
        ),
        Family("GPT2LMHeadModel", GPT2, logits, more={"n_ctx": [40, 8, 1024]}),
        Family("TrOCRForCausalLM", TROCR, logits),
        Family(
            "MarianMTModel",
            MARIAN,
            translations,
            more={
                "normalize_before": [False, True],
                "normalize_embedding": [False, True],
                "static_position_embeddings": [True],
                "add_bias_logits": [False],
                "add_final_layer_norm": [False, True],
                "extra_pos_embeddings": [2],
                "force_bos_token_to_be_generated": [False],
                "num_hidden_layers": [2, 3],
            },
        ),
        Family(
            "T5ForConditionalGeneration",
            T5,
            translations,
            norms="LayerNorm",
            more={
                "n_positions": [512, 40],
                "dense_act_fn": ["relu", "gelu_new"],
                "is_gated_act": [False, True],
                "scale_decoder_outputs": [True, False],
            },
            sets={"": [{"feed_forward_proj": "gated-gelu", "dense_act_fn": act} for act in ("gelu", "gelu_new")]},
        ),
        Family("LlamaForCausalLM", DECODER, logits, more=DECODER_LEGACY, sets={"": ROPES}),
        Family(
            "Qwen2ForCausalLM",
            {name: value for name, value in DECODER.items() if name != "head_dim"},
            logits,
            more=DECODER_LEGACY
            | {"head_dim": [6, 8], "use_mrope": [False, True], "sliding_window": VALUES["sliding_window"]},
            sets={"": [*ROPES, *QWEN_SETS]},
        ),
        Family("Qwen3ForCausalLM", DECODER, logits, more=DECODER_LEGACY, sets={"": [*ROPES, *QWEN_SETS]}),
        Family("GemmaForCausalLM", DECODER, logits, more=DECODER_LEGACY, sets={"": [*ROPES, *GEMMA_SETS]}, norms=None),
        Family(
            "LlavaForConditionalGeneration",
            {
                "vision_config": IMAGES | {"model_type": "clip_vision_model"},
                "text_config": TEXT_PART,
                "image_token_index": 60,
                "image_seq_length": 9,
            },
            image_texts,
            parts={"vision_config": "CLIPVisionConfig", "text_config": "LlamaConfig"},
            sets={"text_config": ROPES},
            name="llava_clip",
        ),
        Family(
            "LlavaForConditionalGeneration",
            {
                "vision_config": IMAGES | {"model_type": "siglip_vision_model"},
                "text_config": TEXT_PART | {"model_type": "qwen2"},
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
                "image_token_index": 60,
            },
            image_texts,
            parts={"vision_config": "SiglipVisionConfig", "text_config": "Qwen2Config"},
            sets={"text_config": [*ROPES, *QWEN_SETS]},
            name="llava_siglip",
        ),
        *(
            Family(
                f"{name}ForConditionalGeneration",
                {
                    "vision_config": IMAGES | {"image_size": 32},
                    "text_config": TEXT_PART,
                    "image_token_id": 60,
                    "scale_factor": 2,
                },
                image_texts,
                parts={"vision_config": f"{name}VisionConfig", "text_config": "LlamaConfig"},
                more={"vision_config.image_size": [16, 32, 48], "vision_config.patch_size": [4, 8]},
                sets={"text_config": ROPES},
            )
            for name in ("Idefics3", "SmolVLM")
        ),
        Family(
            "PaliGemmaForConditionalGeneration",
            {
                "vision_config": IMAGES | {"model_type": "siglip_vision_model", "vision_use_head": False},
                "text_config": DECODER | {"model_type": "gemma"},
                "image_token_index": 60,
                "projection_dim": 24,
                "hidden_size": 24,
            },
            image_texts,
            parts={"vision_config": "SiglipVisionConfig", "text_config": "GemmaConfig"},
            sets={"text_config": [*ROPES, *GEMMA_SETS]},
            norms=None,
        ),
    ]
}
