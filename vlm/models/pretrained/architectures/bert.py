"""BERT (Devlin et al. 2019), bare or with one of its heads."""

from collections.abc import Mapping
from typing import Any

from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.specs import Spec, class_names, part_of
from vlm.models.pretrained.stack import (
    Names,
    Part,
    Sources,
    Stack,
    Table,
    layers,
    modules,
    same,
    stack_sizes,
    tied,
)
from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder

LAYERS: Table = {
    "norm1": "attention.output.LayerNorm",
    "attn.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.proj": "attention.output.dense",
    "norm2": "output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
PREDICTIONS = "cls.predictions"
ABSOLUTE = {"position_embedding_type": "absolute"}


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a stack that is laid out as BERT's."""
    return stack_sizes(config) | {
        "pre_norm": False,
        "embed_norm": True,
        "vocab_size": config.get("vocab_size", 30522),
        "max_len": config.get("max_position_embeddings", 512),
    }


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return text_sizes(config) | {"token_types": config.get("type_vocab_size", 2)}


def text_sources(stack: Any, table: Table) -> Sources:
    """Sources of a stack that is laid out as BERT's.

    Args:
        table: Modules of a layer.
    """
    return {
        "token_embed.weight": ((WORDS,), same),
        # A text that fits has its first positions, however many there are after them.
        "positions.weight": ((POSITIONS,), lambda rows: rows[: stack.max_len]),
        **modules({"embed_norm": "embeddings.LayerNorm"}),
        **layers(stack.blocks, table, "encoder.layer"),
    }


def sources(encoder: TextEncoder, names: Names) -> Sources:
    types: Sources = {"type_embed.weight": (("embeddings.token_type_embeddings.weight",), same)}
    return text_sources(encoder, LAYERS) | types


def predictions(names: Names, *, embedding: str) -> Sources:
    """The head that predicts words, over the embedding of words.

    Args:
        embedding: Name of that of ours.
    """
    bias = next((name for name in ("bias", "decoder.bias") if f"{PREDICTIONS}.{name}" in names), "bias")
    table = {"dense": "transform.dense", "norm": "transform.LayerNorm"}
    parts: Sources = {"bias": ((bias,), same), **modules(table)}
    head: Sources = {f"vocabulary_head.{name}": source for name, source in parts.items()}
    head = {name: (tuple(f"{PREDICTIONS}.{other}" for other in others), make) for name, (others, make) in head.items()}
    matrix = f"{PREDICTIONS}.decoder.weight"
    return head | ({embedding: ((f"bert.{WORDS}", matrix), tied)} if matrix in names else {})


def class_head(model: SequenceClassifier, names: Names) -> Sources:
    """Its pooler and head, where ours reads the first token through the same layer."""
    if model.pool != "class" or model.transform is None:
        return {}
    pooler = "bert.pooler.dense" if "bert.pooler.dense.weight" in names else "pooler.dense"
    return modules({"transform": pooler, "head": "classifier"})


def token_head(model: TokenClassifier, names: Names) -> Sources:
    return modules({"head": "qa_outputs" if "qa_outputs.weight" in names else "classifier"})


def fills(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Spec:
    args = specs["encoder"]["args"]
    head = {"bias": True, "transform": args["activation"], "norm_eps": args["norm_eps"]}
    return part_of("MaskedLanguageModel", encoder=specs["encoder"], vocab_size=args["vocab_size"], **head)


def classifies(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Spec:
    if (problem := config.get("problem_type")) not in (None, "single_label_classification"):
        raise ValueError(f"problem_type={problem!s:.40} is not one class of several")
    count = len(class_names(config))
    return part_of("SequenceClassifier", encoder=specs["encoder"], num_classes=count, pool="class", transform=True)


def tags(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Spec:
    return part_of("TokenClassifier", encoder=specs["encoder"], num_classes=len(class_names(config)))


def answers(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Spec:
    return part_of("TokenClassifier", encoder=specs["encoder"], num_classes=2)


BERT = Stack(
    kind=TextEncoder,
    stem="bert.",
    sizes=sizes,
    sources=sources,
    needed=ABSOLUTE | {"is_decoder": False, "add_cross_attention": False},
)
ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(BERT, config)},
    models={
        "BertForMaskedLM": Model("masked_language_modeling", fills),
        "BertForPreTraining": Model("masked_language_modeling", fills),
        "BertForSequenceClassification": Model("text_classification", classifies),
        "BertForTokenClassification": Model("tagging", tags),
        "BertForQuestionAnswering": Model("span_answering", answers),
    },
    heads={
        MaskedLanguageModel: lambda model, names: predictions(names, embedding="encoder.token_embed.weight"),
        SequenceClassifier: class_head,
        TokenClassifier: token_head,
    },
)
