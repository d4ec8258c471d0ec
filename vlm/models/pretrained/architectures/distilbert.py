"""DistilBERT (Sanh et al. 2019): BERT with six layers and without token types."""

from collections.abc import Mapping

from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.models.pretrained.architecture import Architecture, Model, Spec
from vlm.models.pretrained.architectures import bert
from vlm.models.pretrained.fields import Fields, choice, integer
from vlm.models.pretrained.stack import ACTIVATIONS, Names, Part, Paths, Stack, layers, patterns_of
from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder

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
        **bert.TEXT_SIZES,
        "dim": integer("dim", 768),
        "depth": integer("n_layers", 6, high=1000),
        "num_heads": integer("n_heads", 12),
        "hidden": integer("hidden_dim", 3072),
        "activation": choice("activation", "gelu", ACTIVATIONS),
        "norm_eps": 1e-12,
    },
    names={**bert.ENTRANCE, **layers(DISTILBERT_LAYERS, "transformer.layer")},
    head={"token_embed.weight": f"distilbert.{bert.WORDS}|{bert.WORDS}|vocab_projector.weight"},
    unused=("embeddings.position_ids",),
    neutral_keys=bert.NEUTRAL_KEYS,
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)


def distilbert_classifies(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    spec = bert.bert_classifies(config, parts)
    spec["args"]["transform"] = "relu"
    return spec


DISTILBERT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DISTILBERT, config)},
    models={
        "DistilBertForMaskedLM": Model("masked_language_modeling", bert.bert_fills),
        "DistilBertForSequenceClassification": Model("text_classification", distilbert_classifies),
        "DistilBertForTokenClassification": Model("tagging", bert.tags),
        "DistilBertForQuestionAnswering": Model("span_answering", bert.answers),
    },
    heads={
        MaskedLanguageModel: lambda model: DISTILBERT_PREDICTIONS,
        SequenceClassifier: lambda model: {"transform": "pre_classifier", "head": "classifier"},
        TokenClassifier: bert.token_head,
    },
    unused=(*patterns_of(DISTILBERT_PREDICTIONS), "pre_classifier.{kind}", "classifier.{kind}", "qa_outputs.{kind}"),
)
