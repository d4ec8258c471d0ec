"""BERT (Devlin et al. 2019) and its relatives DistilBERT, RoBERTa and XLM-RoBERTa, bare or with a head."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from vlm.models.classifier import SequenceClassifier, TokenClassifier
from vlm.models.pretrained.architecture import (
    Architecture,
    Model,
    Spec,
    count_exclusive_classes,
    make_spec,
    read_class_names,
)
from vlm.models.pretrained.fields import Fields, choice, integer
from vlm.models.pretrained.stack import (
    ACTIVATIONS,
    SIZES,
    Names,
    Part,
    Paths,
    Stack,
    StackArguments,
    Weight,
    expand_layers,
    list_patterns,
)
from vlm.models.text_encoder import MaskedLanguageModel, TextEncoder

BERT_LAYERS: Paths = {
    "norm1": "attention.output.LayerNorm",
    "attn.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.proj": "attention.output.dense",
    "norm2": "output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
MIN_TEXT_LEN = 3  # begin, one token, end
BERT_SIZES = SIZES | {
    "pre_norm": False,
    "embed_norm": True,
    "vocab_size": integer("vocab_size", 30522),
    "max_len": integer("max_position_embeddings", 512, low=MIN_TEXT_LEN),
}
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
BERT_EMBEDDINGS: Names = {
    "token_embed.weight": WORD_EMBEDDINGS,
    "positions.weight": "embeddings.position_embeddings.weight",
    "embed_norm": "embeddings.LayerNorm",
}
BERT_REQUIREMENTS = {"position_embedding_type": "absolute"}
BERT_NEUTRAL_KEYS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "sinusoidal_pos_embds", "tie_weights_"),
)
BERT_PREDICTIONS: Names = {
    "vocabulary_head.bias": "cls.predictions.bias|cls.predictions.decoder.bias",
    "vocabulary_head.dense": "cls.predictions.transform.dense",
    "vocabulary_head.norm": "cls.predictions.transform.LayerNorm",
}
BERT_TIED_EMBEDDING: Names = {
    "token_embed.weight": f"bert.{WORD_EMBEDDINGS}|{WORD_EMBEDDINGS}|cls.predictions.decoder.weight"
}
BERT = Stack(
    kind=TextEncoder,
    model_type="bert",
    prefix="bert.",
    sizes=BERT_SIZES | {"token_types": integer("type_vocab_size", 2)},
    names={
        **BERT_EMBEDDINGS,
        "type_embed.weight": "embeddings.token_type_embeddings.weight",
        **expand_layers(BERT_LAYERS, "encoder.layer"),
    },
    head=BERT_TIED_EMBEDDING,
    unused=("pooler.dense.{kind}", "embeddings.position_ids"),
    needed=BERT_REQUIREMENTS | {"is_decoder": False, "add_cross_attention": False},
    neutral_keys=BERT_NEUTRAL_KEYS,
)


BERT_CLASS_HEAD: Names = {
    **{f"transform.{kind}": f"bert.pooler.dense.{kind}|pooler.dense.{kind}" for kind in ("weight", "bias")},
    "head": "classifier",
}


def name_token_head(model: TokenClassifier) -> Names:
    return {f"head.{kind}": f"qa_outputs.{kind}|classifier.{kind}" for kind in ("weight", "bias")}


def specify_masked_lm(config: Fields, parts: Mapping[str, Spec], *, transform: str | None = None) -> Spec:
    """Specifies a masked language model; the activation of its head is by default that of the blocks."""
    config.require({"tie_word_embeddings": True}, "our MaskedLanguageModel")
    args = parts["encoder"]["args"]
    head = {"bias": True, "transform": transform or args["activation"], "norm_eps": args["norm_eps"]}
    return make_spec("MaskedLanguageModel", encoder=parts["encoder"], vocab_size=args["vocab_size"], **head)


def specify_bert_classifier(config: Fields, parts: Mapping[str, Spec], *, transform: bool | str = True) -> Spec:
    args = {"num_classes": count_exclusive_classes(config), "pool": "class", "transform": transform}
    return make_spec("SequenceClassifier", encoder=parts["encoder"], **args)


def specify_tagger(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    return make_spec("TokenClassifier", encoder=parts["encoder"], num_classes=len(read_class_names(config)))


def specify_span_answerer(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    return make_spec("TokenClassifier", encoder=parts["encoder"], num_classes=2)


BERT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(BERT, config)},
    models={
        "BertForMaskedLM": Model("masked_language_modeling", specify_masked_lm),
        "BertForPreTraining": Model("masked_language_modeling", specify_masked_lm),
        "BertForSequenceClassification": Model("text_classification", specify_bert_classifier),
        "BertForTokenClassification": Model("tagging", specify_tagger),
        "BertForQuestionAnswering": Model("span_answering", specify_span_answerer),
    },
    heads={
        MaskedLanguageModel: lambda model: BERT_PREDICTIONS,
        # If our model reads the first token through the same layer.
        SequenceClassifier: lambda model: BERT_CLASS_HEAD if model.pool == "class" and model.transform else {},
        TokenClassifier: name_token_head,
    },
    unused=(
        *list_patterns(BERT_PREDICTIONS),
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
        **BERT_SIZES,
        "dim": integer("dim", 768),
        "depth": integer("n_layers", 6, high=1000),
        "num_heads": integer("n_heads", 12),
        "hidden": integer("hidden_dim", 3072),
        "activation": choice("activation", "gelu", ACTIVATIONS),
        "norm_eps": 1e-12,
    },
    names={**BERT_EMBEDDINGS, **expand_layers(DISTILBERT_LAYERS, "transformer.layer")},
    head={"token_embed.weight": f"distilbert.{WORD_EMBEDDINGS}|{WORD_EMBEDDINGS}|vocab_projector.weight"},
    unused=("embeddings.position_ids",),
    neutral_keys=BERT_NEUTRAL_KEYS,
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)


DISTILBERT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DISTILBERT, config)},
    models={
        "DistilBertForMaskedLM": Model("masked_language_modeling", specify_masked_lm),
        "DistilBertForSequenceClassification": Model(
            "text_classification", partial(specify_bert_classifier, transform="relu")
        ),
        "DistilBertForTokenClassification": Model("tagging", specify_tagger),
        "DistilBertForQuestionAnswering": Model("span_answering", specify_span_answerer),
    },
    heads={
        MaskedLanguageModel: lambda model: DISTILBERT_PREDICTIONS,
        SequenceClassifier: lambda model: {"transform": "pre_classifier", "head": "classifier"},
        TokenClassifier: name_token_head,
    },
    unused=(*list_patterns(DISTILBERT_PREDICTIONS), "pre_classifier.{kind}", "classifier.{kind}", "qa_outputs.{kind}"),
)


PADDING_ID = 1  # positions start at PADDING + 1
POSITION_OFFSET = PADDING_ID + 1


def subtract_position_offset(sizes: StackArguments, config: Fields) -> StackArguments:
    """max_len without the position embeddings that precede the first token's."""
    if sizes["max_len"] < POSITION_OFFSET + MIN_TEXT_LEN:
        raise config.error("max_position_embeddings", f"which leaves no text after the first {POSITION_OFFSET}")
    return {"max_len": sizes["max_len"] - POSITION_OFFSET}


ROBERTA = Stack(
    kind=TextEncoder,
    model_type="roberta",
    prefix="roberta.",
    sizes={**BERT_SIZES, "vocab_size": integer("vocab_size", 50265)},
    more=subtract_position_offset,
    names={
        **BERT_EMBEDDINGS,
        "positions.weight": Weight(
            ("embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"),
            lambda positions, types: positions[POSITION_OFFSET:] + types[0],  # the only token type
        ),
        **expand_layers(BERT_LAYERS, "encoder.layer"),
    },
    head={"token_embed.weight": f"roberta.{WORD_EMBEDDINGS}|{WORD_EMBEDDINGS}|lm_head.decoder.weight"},
    unused=BERT.unused,
    needed=BERT_REQUIREMENTS
    | {"is_decoder": False, "add_cross_attention": False, "pad_token_id": PADDING_ID, "type_vocab_size": 1},
    neutral_keys=BERT_NEUTRAL_KEYS,
)


ROBERTA_PREDICTIONS: Names = {
    "vocabulary_head.bias": "lm_head.bias|lm_head.decoder.bias",
    "vocabulary_head.dense": "lm_head.dense",
    "vocabulary_head.norm": "lm_head.layer_norm",
}
ROBERTA_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(ROBERTA, config)},
    models={
        "RobertaForMaskedLM": Model("masked_language_modeling", partial(specify_masked_lm, transform="gelu")),
        "RobertaForSequenceClassification": Model("text_classification", specify_bert_classifier),
        "RobertaForTokenClassification": Model("tagging", specify_tagger),
    },
    heads={
        MaskedLanguageModel: lambda model: ROBERTA_PREDICTIONS,
        SequenceClassifier: lambda model: {"transform": "classifier.dense", "head": "classifier.out_proj"},
        TokenClassifier: name_token_head,
    },
    unused=(
        *list_patterns(ROBERTA_PREDICTIONS),
        *("classifier.{kind}", "classifier.dense.{kind}", "classifier.out_proj.{kind}", "qa_outputs.{kind}"),
    ),
    special_tokens={"pad": "<pad>", "bos": "<s>", "eos": "</s>"},
    supports_pairs=False,
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
