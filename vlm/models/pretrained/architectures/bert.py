"""BERT (Devlin et al. 2019), bare or with one of its heads."""

from collections.abc import Mapping

from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.models.pretrained.architecture import Architecture, Model, Spec, class_names, count_exclusive_classes, spec_of
from vlm.models.pretrained.fields import Fields, integer
from vlm.models.pretrained.stack import SIZES, Names, Part, Paths, Stack, layers, patterns_of
from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder

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
