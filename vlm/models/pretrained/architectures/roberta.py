"""RoBERTa (Liu et al. 2019): BERT with byte-level BPE; its positions start after the padding index."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.models.pretrained.architecture import Architecture, Model, Spec
from vlm.models.pretrained.architectures import bert
from vlm.models.pretrained.fields import Fields, integer
from vlm.models.pretrained.stack import Names, Part, Stack, Weight, layers, patterns_of
from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder

PADDING = 1  # positions start at PADDING + 1
BEFORE = PADDING + 1


def usable_positions(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    """max_len without the position embeddings that precede the first token's."""
    if sizes["max_len"] < BEFORE + bert.SHORTEST:
        raise config.fault("max_position_embeddings", f"which leaves no text after the first {BEFORE}")
    return {"max_len": sizes["max_len"] - BEFORE}


def add_type(positions: Tensor, types: Tensor) -> Tensor:
    """Position embeddings with the embedding of the only token type added."""
    return positions[BEFORE:] + types[0]


ROBERTA = Stack(
    kind=TextEncoder,
    model_type="roberta",
    prefix="roberta.",
    sizes={**bert.TEXT_SIZES, "vocab_size": integer("vocab_size", 50265)},
    more=usable_positions,
    names={
        **bert.ENTRANCE,
        "positions.weight": Weight(
            ("embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"), add_type
        ),
        **layers(bert.BERT_LAYERS, "encoder.layer"),
    },
    head={"token_embed.weight": f"roberta.{bert.WORDS}|{bert.WORDS}|lm_head.decoder.weight"},
    unused=bert.BERT.unused,
    needed=bert.NEEDED
    | {"is_decoder": False, "add_cross_attention": False, "pad_token_id": PADDING, "type_vocab_size": 1},
    neutral_keys=bert.NEUTRAL_KEYS,
)


def roberta_fills(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    """As BERT's, but its head always has the exact GELU."""
    spec = bert.bert_fills(config, parts)
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
        "RobertaForSequenceClassification": Model("text_classification", bert.bert_classifies),
        "RobertaForTokenClassification": Model("tagging", bert.tags),
    },
    heads={
        MaskedLanguageModel: lambda model: ROBERTA_PREDICTIONS,
        SequenceClassifier: lambda model: {"transform": "classifier.dense", "head": "classifier.out_proj"},
        TokenClassifier: bert.token_head,
    },
    unused=(
        *patterns_of(ROBERTA_PREDICTIONS),
        *("classifier.{kind}", "classifier.dense.{kind}", "classifier.out_proj.{kind}", "qa_outputs.{kind}"),
    ),
    ends={"pad": "<pad>", "bos": "<s>", "eos": "</s>"},
    pairs=False,
)
