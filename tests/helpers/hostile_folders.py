"""Folders of Hugging Face that are wrong or made to do harm: who makes each of a good one, and words of the refusal."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dual import saved_dual
from hugging import CAPTIONERS, CLASSIFIERS, LABELS, save_parts, saved_bert, saved_decoder, saved_gpt2, saved_reader
from image_text import saved_image_text
from safetensors.torch import load_file, save_file
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertForTokenClassification,
    RobertaForSequenceClassification,
)
from translators import saved_marian, saved_t5


class Kind(NamedTuple):
    """A kind of folder, and where its files say what.

    Args:
        save: Saves one.
        image, text: The parts of config.json that describe its stack of images, and that of texts; None for none.
        inner: Name of the width of an MLP of the stack of texts, or of images where that is all.
        depth: Name of its number of layers.
        weight: A tensor.
        generation: The file with its options of decoding, and the part of it; None for none.
        end: Name of the id that ends a text.
    """

    save: Callable[[Path], Any]
    image: tuple[str, ...] | None
    text: tuple[str, ...] | None
    weight: str
    inner: str = "intermediate_size"
    depth: str = "num_hidden_layers"
    generation: tuple[str, ...] | None = None
    end: str = "eos_token_id"


GENERATION = ("generation_config.json",)
GPT2: dict[str, Any] = {"inner": "n_inner", "depth": "n_layer", "generation": GENERATION}


def decoder(name):
    return lambda folder: saved_decoder(folder, name)


KINDS = {
    "vit_gpt2": Kind(CAPTIONERS["vit_gpt2"], ("encoder",), ("decoder",), "decoder.transformer.wte.weight", **GPT2),
    "deit_gpt2": Kind(CAPTIONERS["deit_gpt2"], ("encoder",), ("decoder",), "encoder.embeddings.cls_token", **GPT2),
    "blip": Kind(
        *(CAPTIONERS["blip"], ("vision_config",), ("text_config",), "text_decoder.cls.predictions.bias"),
        generation=("config.json", "text_config"),
        end="sep_token_id",
    ),
    "git": Kind(CAPTIONERS["git"], ("vision_config",), (), "output.bias", generation=GENERATION),
    "llama": Kind(decoder("llama"), None, (), "model.layers.1.self_attn.q_proj.weight", generation=GENERATION),
    "bert": Kind(lambda folder: saved_bert(folder, BertForMaskedLM), None, (), "cls.predictions.bias"),
    "deit": Kind(lambda folder: save_parts(folder, CLASSIFIERS["deit_teacher"]()), (), None, "cls_classifier.weight"),
    "dinov2": Kind(
        *(lambda folder: save_parts(folder, CLASSIFIERS["dinov2"]()), (), None),
        "dinov2.encoder.layer.0.layer_scale1.lambda1",
        inner="mlp_ratio",
    ),
}
# Kinds of which only a few things can be wrong that are not with those.
OTHERS = {
    **{name: decoder(name) for name in ("qwen2", "qwen3", "gemma")},
    **{name: partial(saved_image_text, name=name) for name in ("llava_clip", "idefics3", "paligemma")},
    "classes": lambda folder: saved_bert(folder, BertForSequenceClassification, **LABELS),
    "roberta": lambda folder: saved_reader(folder, RobertaForSequenceClassification),
    **{name: partial(saved_dual, name) for name in ("clip", "siglip")},
    "marian": saved_marian,
    "t5": saved_t5,
    "gpt2": saved_gpt2,
    "distilbert": lambda folder: saved_reader(folder, DistilBertForTokenClassification),
    "siglip_classes": lambda folder: save_parts(folder, CLASSIFIERS["siglip"]()),
}


def changing(name, *path, **changes):
    """Changes values of a JSON file, or of a part of it."""

    def change(folder):
        part = content = json.loads((folder / name).read_text())
        for key in path:
            part = part[key]
        part.update(changes)
        (folder / name).write_text(json.dumps(content))

    return change


def remove_file(name):
    return lambda folder: (folder / name).unlink()


def holding(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def link_outside(name):
    """Moves a file out of the folder and puts a link in its place."""

    def change(folder):
        outside = shutil.move(folder / name, folder.parent / f"outside_{name}")
        (folder / name).symlink_to(outside)

    return change


def edit_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def other_vocabulary(folder):
    vocab = json.loads((folder / TOKENS).read_text())["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocab | {"a": 90}))


def piece_twice(folder):
    content = json.loads((folder / TOKENS).read_text())
    vocab = content["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 5
    (folder / TOKENS).write_text(json.dumps(content))


def shard_away(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../../outside.safetensors"}}
    shutil.move(folder / WEIGHTS, folder / "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps(index))


def write_index(content):
    """An index of shards in place of the weights."""

    def change(folder):
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_bytes(content)

    return change


CONFIG, IMAGES, TOKENS, WEIGHTS = "config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
config, generation = partial(changing, CONFIG), partial(changing, "generation_config.json")
FolderCases = dict[str, tuple[Callable[[Path], Any], str]]  # a change of a good folder, and words


def follows(activation):
    """What newer folders of T5 state besides a gated feed_forward_proj."""
    return {"dense_act_fn": activation, "is_gated_act": True}


OF_ALL: FolderCases = {
    "auto_map": (config(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "other kind": (config(model_type="../vit"), "model_type '../vit'"),
    "cut weights": (holding(WEIGHTS, b"\xff" * 100), "cannot be read"),
    "no weights": (remove_file(WEIGHTS), "has no model.safetensors"),
    "missing shard": (shard_away, "outside.safetensors cannot be read"),
    "a deep file": (holding(CONFIG, b"[" * 10**5), "cannot be read"),
    "link config": (link_outside(CONFIG), "link out of the folder"),
    "link weights": (link_outside(WEIGHTS), "link out of the folder"),
}


def of_layers(kind: Kind) -> FolderCases:
    """Sizes of a stack that are not those of its weights, or of none."""
    part = kind.image if kind.text is None else kind.text
    assert part is not None
    return {
        "shape": (config(*part, **{kind.inner: 80}), "fc1"),
        "depth": (config(*part, **{kind.depth: 3}), "has no .*[.]2[.]"),
        "million layers": (config(*part, **{kind.depth: 10**6}), "is 1000000, not an integer from 1 to 1000"),
        "no number": (config(*part, **{kind.depth: "os.system"}), "is 'os.system', not"),
        "no weight": (lambda f: edit_tensors(f, lambda t: t.pop(kind.weight)), f"{kind.weight}|has no weights for"),
    }


def of_images(kind: Kind) -> FolderCases:
    part, size = kind.image, {"height": 30, "width": 30}
    assert part is not None
    other, oblong = (
        "images of 30 pixels, the model reads 24|not divide",
        r"24 pixels out of \[24, 30\]|images of \[24, 30\]",
    )
    return {
        "giant width": (config(*part, hidden_size=3 * 10**9), "hidden_size is 3000000000, not"),
        "no preprocessing": (remove_file(IMAGES), "has no preprocessor_config.json"),
        "other images": (changing(IMAGES, size=size, crop_size=size), other),
        "oblong images": (changing(IMAGES, size={"height": 24, "width": 30}), f"{oblong}|not divide"),
        "giant resize": (changing(IMAGES, size={"shortest_edge": 10**9}, do_center_crop=True), "is 1000000000, not"),
        "link images": (link_outside(IMAGES), "link out of the folder"),
    }


def of_texts(kind: Kind) -> FolderCases:
    part = kind.text
    assert part is not None
    return {
        "giant vocabulary": (config(*part, vocab_size=10**12), "vocab_size is 1000000000000"),
        "smaller tokenizer": (config(*part, vocab_size=99), "weights have 99"),
        "tokenizer code": (changing("tokenizer_config.json", auto_map={"A": "evil.T"}), "auto_map"),
        "no tokenizer": (remove_file(TOKENS), "there is no tokenizer.json"),
        "vocabularies differ": (other_vocabulary, "disagree on the id of 'a'"),
        "an id twice": (piece_twice, "not unique"),
        "other tokenizer": (changing(TOKENS, "model", type="Unigram"), "tokenizer in .* cannot be used"),
        "link tokenizer": (link_outside(TOKENS), "link out of the folder"),
    }


def of_writing(kind: Kind) -> FolderCases:
    assert kind.generation is not None
    options = partial(changing, *kind.generation)
    return {
        "special out of range": (options(**{kind.end: 900}), "outside the vocabulary"),
        "an end of many": (options(**{kind.end: [1, 900]}), "outside the vocabulary"),
        "no end": (options(**{kind.end: "end"}), "not 1 to 64 token ids"),
        "strange decoding": (options(forced_bos_token_id=3), "forced_bos_token_id"),
        "giant beam": (options(num_beams=10**9), "num_beams"),
    }


def narrow_grid(folder):
    name = "dinov2.embeddings.position_embeddings"
    edit_tensors(folder, lambda t: t.update({name: t[name][:, :-1].clone()}))


def old_tokenizer(folder):
    """That of CLIP, which is not read, in place of its tokenizer.json."""
    (folder / TOKENS).unlink()
    (folder / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0}))
    (folder / "merges.txt").write_text("")


PATTERN = {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False}
YARN, TWO = {"rope_type": "yarn", "rope_theta": 1e4}, ["full_attention", "sliding_attention"]
MORE = [
    *(("gpt2", holding(WEIGHTS, content), "cannot be read") for content in (b"", b"no weights")),
    ("gpt2", lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), "cannot be read"),
    *(("gpt2", write_index(content), "cannot be read|has no weight_map") for content in (b"", b"[]", b"{}")),
    ("gpt2", write_index(b'{"weight_map": {"a": 3}}'), "weight_map does not list files"),
    *(("gpt2", holding(CONFIG, content), "cannot be read|model_type") for content in (b"", b"[]", b'"gpt2"', b"{}")),
    ("gpt2", remove_file(CONFIG), "neither config.json"),
    ("gpt2", config(activation_function="mish"), "activation_function is 'mish'"),
    ("gpt2", config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", config(scale_attn_weights=False), "scale_attn_weights is False"),
    *(("gpt2", config(**{key: 7}), f"{key} is 7") for key in ("n_ctx", "sliding_window", "logit_scale")),
    *(("gpt2", config(model_type=kind), "is not supported") for kind in ("swin", "__init__", None, ["vit"])),
    ("vit_gpt2", config("encoder", model_type="swin"), "encoder.model_type is 'swin', where vlm supports vit or deit"),
    ("dinov2", config(id2label={"0": "a", "1": "b"}), "id2label has 2 classes, the weights of the head have 3"),
    ("vit_gpt2", config("encoder", image_size=8 * 10**6), "image_size is 8000000"),
    ("vit_gpt2", config("decoder", model_type="xlnet"), "'xlnet', where vlm supports gpt2"),
    ("vit_gpt2", changing(TOKENS, pre_tokenizer=PATTERN), "unsupported pattern '.a.a...'"),
    ("git", config(num_image_with_embedding=6), "num_image_with_embedding is 6"),
    ("dinov2", narrow_grid, "positions.weight is"),
    ("dinov2", config(use_swiglu_ffn=True), "use_swiglu_ffn is True"),
    ("llama", config(attention_bias=True), "attention_bias is True, which our Decoder does not support"),
    ("llama", config(rope_parameters=YARN), "rope_type is 'yarn', not one of"),
    ("llama", config(rope_parameters={"rope_theta": "many"}), "rope_parameters.rope_theta is 'many', not a number"),
    ("llama", config(num_key_value_heads=3), "num_key_value_heads is 3, which does not divide 4"),
    ("qwen2", config(use_sliding_window=True), "use_sliding_window is True"),
    ("qwen3", config(layer_types=TWO), "layer_types is .* full_attention only"),
    ("gemma", config(model_type="gemma2"), "model_type 'gemma2' is not supported; supported are bert, .*gemma"),
    ("llava_clip", config(vision_feature_layer=[-2, -1]), "vision_feature_layer is .*, not an integer"),
    ("llava_clip", config(vision_feature_layer=3), "num_hidden_layers is 2, but vision_feature_layer is 3"),
    ("llava_clip", config("text_config", model_type="mistral"), "'mistral', where vlm supports llama or qwen2"),
    ("llava_clip", config(image_token_index=7), "image_token_index is 7, which is not the <image> of its tokenizer"),
    ("idefics3", config(scale_factor=3), "scale_factor is 3, .*14 patches a side"),
    ("paligemma", config("text_config", model_type="gemma2"), "'gemma2', where vlm supports gemma"),
    ("paligemma", config("text_config", use_bidirectional_attention=False), "use_bidirectional_attention is False"),
    ("roberta", config(pad_token_id=0), "pad_token_id is 0"),
    ("roberta", config(max_position_embeddings=4), "leaves no text"),
    ("classes", config(is_decoder=True), "is_decoder is True"),
    ("classes", config(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
    ("classes", config(problem_type="multi_label_classification"), "problem_type is 'multi_label_classification'"),
    ("classes", config(id2label={"0": "score"}), "a single output, which means regression"),
    ("dinov2", config(problem_type="multi_label_classification"), "problem_type is .multi_label_classification."),
    ("classes", config(hidden_act="mish"), "hidden_act is 'mish', not one of"),
    ("classes", config(id2label={"0": "a", "2": "b"}), "does not number the classes"),
    ("classes", config(type_vocab_size=3), "type_embed.weight"),
    ("clip", old_tokenizer, "there is no tokenizer.json"),
    ("siglip", remove_file("spiece.model"), "there is no spiece.model"),
    ("marian", remove_file("target.spm"), "there is no target.spm"),
    ("marian", remove_file("vocab.json"), "there is no vocab.json"),
    ("marian", holding("target.spm", b"\x08\xff" * 9), "tokenizer in .* cannot be used"),
    ("marian", changing("vocab.json", **{"\u2581x": 3}), "is not unique"),
    ("marian", holding("target_vocab.json", b"{}"), "a vocabulary per language"),
    ("marian", config(decoder_vocab_size=7), "decoder_vocab_size is 7"),
    ("marian", config(activation_function="mish"), "activation_function is 'mish'"),
    ("marian", config(d_model=33), "which does not divide the width 33"),
    ("marian", generation(bad_words_ids=[[1, 2]]), "not a list of single tokens"),
    ("marian", generation(bad_words_ids=3), "not a list of single tokens"),
    ("marian", generation(bad_words_ids=[[10**6]]), "outside the vocabulary"),
    ("marian", generation(forced_eos_token_id=5), "not the end token"),
    ("t5", config(relative_attention_num_buckets=30), "not a multiple of 4"),
    ("t5", config(relative_attention_max_distance=8), "not more than half of the 32 buckets"),
    ("t5", config(feed_forward_proj="gated-mish", **follows("mish")), "feed_forward_proj is 'gated-mish'"),
    ("t5", config(d_kv=-1), "d_kv is -1"),
    ("t5", config(num_decoder_layers="two"), "num_layers is 'two'"),
    ("t5", config(scale_decoder_outputs="no"), "scale_decoder_outputs is 'no'"),
    ("t5", config(feed_forward_proj="gated-silu"), "dense_act_fn is 'relu'|is_gated_act is False"),
    (
        "t5",
        config(feed_forward_proj="gated-gelu", **follows("gelu_new")),
        r"DenseReluDense.wi.weight in .* is not a known tensor of t5",
    ),
]


def rows() -> Iterator[tuple[str, str, Callable[[Path], Any], str]]:
    for name, kind in KINDS.items():
        found = OF_ALL | of_layers(kind)
        found |= {} if kind.image is None else of_images(kind)
        found |= {} if kind.text is None else of_texts(kind)
        found |= {} if kind.generation is None else of_writing(kind)
        yield from ((name, what, *row) for what, row in found.items())
    yield from ((name, words, change, words) for name, change, words in MORE)
