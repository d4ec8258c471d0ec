"""BERT (Devlin et al. 2019) and its relatives DistilBERT, RoBERTa and XLM-RoBERTa, bare or with a head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vlm.models.classifier import SequenceClassifier, TokenClassifier
from vlm.models.pretrained.architecture import Architecture, Model, Spec, class_names, count_exclusive_classes, spec_of
from vlm.models.pretrained.fields import Fields, choice, integer
from vlm.models.pretrained.stack import ACTIVATIONS, SIZES, Names, Part, Paths, Stack, Weight, layers, patterns_of
from vlm.models.text_encoder import MaskedLanguageModel, TextEncoder

BERT_LAYERS: Paths = {
    "norm1": "attention.output.LayerNorm",
    "attn.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.proj": "attention.output.dense",
    "norm2": "output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
SHORTEST = 3  # begin, one token, end
TEXT_SIZES = SIZES | {
    "pre_norm": False,
    "embed_norm": True,
    "vocab_size": integer("vocab_size", 30522),
    "max_len": integer("max_position_embeddings", 512, low=SHORTEST),
}
WORDS = "embeddings.word_embeddings.weight"
ENTRANCE: Names = {
    "token_embed.weight": WORDS,
    "positions.weight": "embeddings.position_embeddings.weight",
    "embed_norm": "embeddings.LayerNorm",
}
NEEDED = {"position_embedding_type": "absolute"}
NEUTRAL_KEYS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "sinusoidal_pos_embds", "tie_weights_"),
)
BERT_PREDICTIONS: Names = {
    "vocabulary_head.bias": "cls.predictions.bias|cls.predictions.decoder.bias",
    "vocabulary_head.dense": "cls.predictions.transform.dense",
    "vocabulary_head.norm": "cls.predictions.transform.LayerNorm",
}
TIED: Names = {"token_embed.weight": f"bert.{WORDS}|{WORDS}|cls.predictions.decoder.weight"}
BERT = Stack(
    kind=TextEncoder,
    model_type="bert",
    prefix="bert.",
    sizes=TEXT_SIZES | {"token_types": integer("type_vocab_size", 2)},
    names={
        **ENTRANCE,
        "type_embed.weight": "embeddings.token_type_embeddings.weight",
        **layers(BERT_LAYERS, "encoder.layer"),
    },
    head=TIED,
    unused=("pooler.dense.{kind}", "embeddings.position_ids"),
    needed=NEEDED | {"is_decoder": False, "add_cross_attention": False},
    neutral_keys=NEUTRAL_KEYS,
)


def class_head(model: SequenceClassifier) -> Names:
    """Names of pooler and head, if our model reads the first token through the same layer."""
    if model.pool != "class" or model.transform is None:
        return {}
    pooler = {f"transform.{kind}": f"bert.pooler.dense.{kind}|pooler.dense.{kind}" for kind in ("weight", "bias")}
    return {**pooler, "head": "classifier"}


def token_head(model: TokenClassifier) -> Names:
    return {f"head.{kind}": f"qa_outputs.{kind}|classifier.{kind}" for kind in ("weight", "bias")}


def bert_fills(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    config.require({"tie_word_embeddings": True}, "our MaskedLanguageModel")
    args = parts["encoder"]["args"]
    head = {"bias": True, "transform": args["activation"], "norm_eps": args["norm_eps"]}
    return spec_of("MaskedLanguageModel", encoder=parts["encoder"], vocab_size=args["vocab_size"], **head)


def bert_classifies(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    count = count_exclusive_classes(config)
    return spec_of("SequenceClassifier", encoder=parts["encoder"], num_classes=count, pool="class", transform=True)


def tags(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    return spec_of("TokenClassifier", encoder=parts["encoder"], num_classes=len(class_names(config)))


def answers(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    return spec_of("TokenClassifier", encoder=parts["encoder"], num_classes=2)


BERT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(BERT, config)},
    models={
        "BertForMaskedLM": Model("masked_language_modeling", bert_fills),
        "BertForPreTraining": Model("masked_language_modeling", bert_fills),
        "BertForSequenceClassification": Model("text_classification", bert_classifies),
        "BertForTokenClassification": Model("tagging", tags),
        "BertForQuestionAnswering": Model("span_answering", answers),
    },
    heads={
        MaskedLanguageModel: lambda model: BERT_PREDICTIONS,
        SequenceClassifier: class_head,
        TokenClassifier: token_head,
    },
    unused=(
        *patterns_of(BERT_PREDICTIONS),
        *("cls.seq_relationship.{kind}", "classifier.{kind}", "qa_outputs.{kind}"),
    ),
)


DISTILBERT_LAYERS: Paths = {
    "norm1": "sa_layer_norm",
    "attn.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attn.proj": "attention.out_lin",
    "norm2": "output_layer_norm",
    "mlp.fc1": "ffn.lin1",
    "mlp.fc2": "ffn.lin2",
}
DISTILBERT_PREDICTIONS: Names = {
    "vocabulary_head.bias": "vocab_projector.bias",
    "vocabulary_head.dense": "vocab_transform",
    "vocabulary_head.norm": "vocab_layer_norm",
}
DISTILBERT = Stack(
    kind=TextEncoder,
    model_type="distilbert",
    prefix="distilbert.",
    sizes={
        **TEXT_SIZES,
        "dim": integer("dim", 768),
        "depth": integer("n_layers", 6, high=1000),
        "num_heads": integer("n_heads", 12),
        "hidden": integer("hidden_dim", 3072),
        "activation": choice("activation", "gelu", ACTIVATIONS),
        "norm_eps": 1e-12,
    },
    names={**ENTRANCE, **layers(DISTILBERT_LAYERS, "transformer.layer")},
    head={"token_embed.weight": f"distilbert.{WORDS}|{WORDS}|vocab_projector.weight"},
    unused=("embeddings.position_ids",),
    neutral_keys=NEUTRAL_KEYS,
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)


def distilbert_classifies(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    spec = bert_classifies(config, parts)
    spec["args"]["transform"] = "relu"
    return spec


DISTILBERT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DISTILBERT, config)},
    models={
        "DistilBertForMaskedLM": Model("masked_language_modeling", bert_fills),
        "DistilBertForSequenceClassification": Model("text_classification", distilbert_classifies),
        "DistilBertForTokenClassification": Model("tagging", tags),
        "DistilBertForQuestionAnswering": Model("span_answering", answers),
    },
    heads={
        MaskedLanguageModel: lambda model: DISTILBERT_PREDICTIONS,
        SequenceClassifier: lambda model: {"transform": "pre_classifier", "head": "classifier"},
        TokenClassifier: token_head,
    },
    unused=(*patterns_of(DISTILBERT_PREDICTIONS), "pre_classifier.{kind}", "classifier.{kind}", "qa_outputs.{kind}"),
)


PADDING = 1  # positions start at PADDING + 1
BEFORE = PADDING + 1


def usable_positions(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    """max_len without the position embeddings that precede the first token's."""
    if sizes["max_len"] < BEFORE + SHORTEST:
        raise config.fault("max_position_embeddings", f"which leaves no text after the first {BEFORE}")
    return {"max_len": sizes["max_len"] - BEFORE}


def add_type(positions: Tensor, types: Tensor) -> Tensor:
    """Position embeddings with the embedding of the only token type added."""
    return positions[BEFORE:] + types[0]


ROBERTA = Stack(
    kind=TextEncoder,
    model_type="roberta",
    prefix="roberta.",
    sizes={**TEXT_SIZES, "vocab_size": integer("vocab_size", 50265)},
    more=usable_positions,
    names={
        **ENTRANCE,
        "positions.weight": Weight(
            ("embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"), add_type
        ),
        **layers(BERT_LAYERS, "encoder.layer"),
    },
    head={"token_embed.weight": f"roberta.{WORDS}|{WORDS}|lm_head.decoder.weight"},
    unused=BERT.unused,
    needed=NEEDED | {"is_decoder": False, "add_cross_attention": False, "pad_token_id": PADDING, "type_vocab_size": 1},
    neutral_keys=NEUTRAL_KEYS,
)


def roberta_fills(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    """As BERT's, but its head always has the exact GELU."""
    spec = bert_fills(config, parts)
    spec["args"]["transform"] = "gelu"
    return spec


ROBERTA_PREDICTIONS: Names = {
    "vocabulary_head.bias": "lm_head.bias|lm_head.decoder.bias",
    "vocabulary_head.dense": "lm_head.dense",
    "vocabulary_head.norm": "lm_head.layer_norm",
}
ROBERTA_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(ROBERTA, config)},
    models={
        "RobertaForMaskedLM": Model("masked_language_modeling", roberta_fills),
        "RobertaForSequenceClassification": Model("text_classification", bert_classifies),
        "RobertaForTokenClassification": Model("tagging", tags),
    },
    heads={
        MaskedLanguageModel: lambda model: ROBERTA_PREDICTIONS,
        SequenceClassifier: lambda model: {"transform": "classifier.dense", "head": "classifier.out_proj"},
        TokenClassifier: token_head,
    },
    unused=(
        *patterns_of(ROBERTA_PREDICTIONS),
        *("classifier.{kind}", "classifier.dense.{kind}", "classifier.out_proj.{kind}", "qa_outputs.{kind}"),
    ),
    ends={"pad": "<pad>", "bos": "<s>", "eos": "</s>"},
    pairs=False,
)


XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta")
XLM_ROBERTA_ARCHITECTURE = replace(
    ROBERTA_ARCHITECTURE,
    parts=lambda config: {"encoder": Part(XLM_ROBERTA, config)},
    models={f"XLM{name}": model for name, model in ROBERTA_ARCHITECTURE.models.items()},
)

ARCHITECTURES = {
    "bert": BERT_ARCHITECTURE,
    "distilbert": DISTILBERT_ARCHITECTURE,
    "roberta": ROBERTA_ARCHITECTURE,
    "xlm_roberta": XLM_ROBERTA_ARCHITECTURE,
}
