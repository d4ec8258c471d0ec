"""Models as functions from tensors to tensors, which torch.export can trace: an encoder, a decode step, a head.

Two graphs write a text. "encoder" computes what all steps need of the input: each of its outputs is an input of "step"
of the same name. "step" reads the next tokens of each row; it returns the logits after the last of them, and the keys
and values of all tokens so far, which the next step takes:

    past.0.keys (B, N, P, K)  +  tokens (B, L)  ->  present.0.keys (B, N, P + L, K)

Beams are rows: a search repeats the encoder's outputs for each beam, and reorders the rows of past keys and values.

A model that reads images inside prompts has "images" and "embed" in place of "encoder", and "step" reads vectors: those
of tokens, with the states of the images between them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.classifier import Classifier, Pool, SequenceClassifier, TokenClassifier, default_pool, pool_states
from vlm.models.context import Context, concat_states
from vlm.models.decoder import Decoder, HiddenStateDecoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.encoder_decoder import EncoderDecoder, VisionLanguageModel
from vlm.models.image_decoder import ImageTokenDecoder
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import MaskedLanguageModel, TextEncoder
from vlm.models.timm_encoder import TimmEncoder
from vlm.nn.attention import to_additive_mask
from vlm.nn.embeddings import Spelling
from vlm.nn.image_size import ImageSize, sides
from vlm.nn.position import Positions
from vlm.nn.step.block import GrowingCache, StepBlock, StepInputs

# Modules without a graph, and why.
UNTRACED: dict[type[nn.Module], str] = {
    ImageTokenDecoder: "its tokens are patches of a codebook",
    HiddenStateDecoder: "it keeps a hidden state in place of keys and values",
    RecurrentEncoder: "it reads token by token",
    Spelling: "its rows of bytes depend on the words",
}
POOLINGS: dict[str, Pool] = {"mean": "mean", "first": "class"}
# Lengths of the example that a graph is traced with; they are distinct, so that none is confused with another.
LENGTHS = {"batch": 2, "tokens": 3, "past": 4, "states": 5, "length": 6, "gaps": 7, "images": 8}


class Port(NamedTuple):
    """Type and shape of an input or output; an axis named in LENGTHS is dynamic."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def example(self) -> Tensor:
        sizes = [size if isinstance(size, int) else LENGTHS[size] for size in self.shape]
        return torch.full(sizes, self.dtype is torch.bool, dtype=self.dtype)


Ports = dict[str, Port]


class Graph(nn.Module):
    """A function of a model from named tensors to named tensors.

    Args:
        name: Name of the graph.
        model: Module that holds the weights.
        function: Takes the inputs by name and returns the outputs in order.
    """

    def __init__(
        self, name: str, model: nn.Module, function: Callable[..., tuple[Tensor, ...]], inputs: Ports, outputs: Ports
    ) -> None:
        super().__init__()
        self.name, self.model, self.function = name, model, function
        self.inputs, self.outputs = inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(**dict(zip(self.inputs, tensors, strict=True)))


def graphs_of(
    model: nn.Module,
    *,
    image_size: ImageSize | None = None,
    embedding: Mapping[str, Any] | None = None,
    inside: bool = False,
) -> list[Graph]:
    """The graphs of a model in evaluation mode.

    Args:
        image_size: Height and width of its images, or one number; None for a model without images.
        embedding: For an encoder without a head, its "pooling" (a name in POOLINGS) and whether to "normalize" vectors.
        inside: Whether a model of images reads them inside its prompts.
    Raises:
        UserError: There is no graph for a part of the model; the message names it.
    """
    for name, part in model.named_modules():
        if why := next((why for kind, why in UNTRACED.items() if isinstance(part, kind)), None):
            where = f"model.{name}" if name else "model"
            raise UserError(f"{where}: {type(part).__name__} has no graph: {why}; export --to safetensors")
    images: Ports = {}
    if image_size is not None:  # one or several per record
        several = getattr(getattr(model, "encoder", model), "count", None)
        shape = ("batch", *([several] if several else []), 3, *sides(image_size))
        images["images"] = Port(torch.float32, shape)
    match model:
        case Decoder():
            return [step_graph(model)]
        case VisionLanguageModel() if inside and image_size is not None:
            return _prompted_graphs(model, image_size)
        case EncoderDecoder():
            return _generator_graphs(model, images)
        case DualEncoder():
            return _dual_graphs(model, images)
        case Classifier():
            return [_classifier_graph(model, images)]
        case SequenceClassifier():
            return [_classifier_graph(model, _text_ports(model.encoder))]
        case TokenClassifier():
            logits = {"logits": Port(torch.float32, ("batch", "length", model.head.out_features))}
            return [
                Graph(
                    "model",
                    model,
                    lambda **texts: (model.head(_encode_inputs(model.encoder, texts).states),),
                    _text_ports(model.encoder),
                    logits,
                )
            ]
        case MaskedLanguageModel():
            return [_masked_lm_graph(model)]
    inputs = _text_ports(model) if isinstance(model, TextEncoder) else images
    if not inputs or not hasattr(model, "dim"):
        raise UserError(f"model: {type(model).__name__} has no graph; export --to safetensors")
    return [_encoder_graph(model, inputs, embedding or {})]


def step_graph(decoder: Decoder, *, states: int | str = 0, masked: bool = False) -> Graph:
    """The decode step of a decoder, "step".

    Args:
        states: Number S of context states; a prefix is part of the past keys and values.
        masked: Whether texts attend to only a part of the context.
    Shapes:
        tokens (B, L), right-aligned; starts (B,): columns before a row's first token; past.N.keys and past.N.values
        (B, N, P, K), P = 0 at first; context_mask (B, S); context.N.keys and context.N.values (B, N, S, K)
        -> logits (B, V), present.N.keys and present.N.values (B, N, P + L, K)
    """
    crossed, blocks = decoder.context_dim is not None, list(decoder._blocks())
    prefix = 0 if decoder.prefix is None else int(states)
    first = prefix if decoder.prefix is not None and decoder.prefix.counted else 0

    def step(tokens: Tensor, starts: Tensor, context_mask: Tensor | None = None, **held: Tensor) -> tuple[Tensor, ...]:
        caches = [GrowingCache(*_keys_values(held, "past", place)) for place in range(len(blocks))]
        sizes = {"past": caches[0].keys.shape[2], "length": tokens.shape[1], "prefix": prefix, "first": first}
        positions, inputs = step_inputs(decoder.positions, starts, **sizes, prompts=None)
        x = decoder.embed(tokens, positions).flatten(0, 1)  # (B * L, D)
        bias = None if context_mask is None else to_additive_mask(context_mask, x)[:, None, None]
        for place, (block, cache) in enumerate(zip(blocks, caches, strict=True)):
            context = _keys_values(held, "context", place) if crossed else None
            x = StepBlock(block).step(x, inputs, cache, context, bias)
        hidden = decoder.norm(x).unflatten(0, tokens.shape)  # (B, L, D)
        return decoder.head(hidden[:, -1]), *(part for cache in caches for part in (cache.keys, cache.values))

    rows = Port(torch.int64, ("batch", "tokens")), Port(torch.int64, ("batch",))
    inputs: Ports = dict(zip(("tokens", "starts"), rows, strict=True)) | _cache_ports(decoder, "past", "past")
    if crossed:
        inputs |= {"context_mask": Port(torch.bool, ("batch", states))} if masked else {}
        inputs |= _cache_ports(decoder, "context", states)
    logits = Port(torch.float32, ("batch", decoder.head_parts.weight.shape[0]))
    return Graph("step", decoder, step, inputs, {"logits": logits} | _cache_ports(decoder, "present", "past + tokens"))


def _prompted_graphs(model: VisionLanguageModel, image_size: ImageSize) -> list[Graph]:
    """Graphs of a model that reads images inside its prompts.

    Shapes:
        images: images (T, 3, H, W) -> states (T, S, D)
        embed: tokens (B, L) -> vectors (B, L, D), among which a program puts the states in the places of an image
        step: as `step_graph`, with vectors (B, L, D) for tokens; and prompts (B,), the number of columns that attend to
            each other in both directions, for a decoder whose prefix is not causal
    Raises:
        UserError: The decoder reads images otherwise, or normalises the vectors of tokens after their positions are
            added.
    """
    decoder: Any = model.decoder
    prefix = getattr(decoder, "prefix", None)
    if prefix is None or not prefix.counted:
        how = "by cross-attention" if prefix is None else "as states without positions"
        raise UserError(f"model.fusion: conversations that read images {how} have no graph; export --to safetensors")
    blocks = list(decoder._blocks())
    if not isinstance(decoder.embed_norm, nn.Identity):
        raise UserError("model.decoder.embed_norm: has no graph with images inside prompts; export --to safetensors")

    def read_images(images: Tensor) -> tuple[Tensor, ...]:
        return (prefix(model.encoder(images).states),)

    def embed(tokens: Tensor) -> tuple[Tensor, ...]:
        return (decoder.token_embed(tokens) * decoder.embed_scale,)

    def step(vectors: Tensor, starts: Tensor, prompts: Tensor | None = None, **past: Tensor) -> tuple[Tensor, ...]:
        caches = [GrowingCache(*_keys_values(past, "past", place)) for place in range(len(blocks))]
        sizes = {"past": caches[0].keys.shape[2], "length": vectors.shape[1], "prefix": 0, "first": 0}
        positions, inputs = step_inputs(decoder.positions, starts, **sizes, prompts=prompts)
        added = decoder.positions.embed(positions)
        x = (vectors if added is None else vectors + added).flatten(0, 1)  # (B * L, D)
        for block, cache in zip(blocks, caches, strict=True):
            x = StepBlock(block).step(x, inputs, cache, None, None)
        hidden = decoder.norm(x).unflatten(0, vectors.shape[:2])  # (B, L, D)
        return decoder.head(hidden[:, -1]), *(part for cache in caches for part in (cache.keys, cache.values))

    with torch.no_grad():
        count = read_images(torch.zeros(1, 3, *sides(image_size)))[0].shape[1]
    width, vocabulary = decoder.dim, decoder.head_parts.weight.shape[0]
    pixels = {"images": Port(torch.float32, ("images", 3, *sides(image_size)))}
    states = {"states": Port(torch.float32, ("images", count, width))}
    tokens = {"tokens": Port(torch.int64, ("batch", "tokens"))}
    vectors: Ports = {"vectors": Port(torch.float32, ("batch", "tokens", width))}
    inputs = vectors | {"starts": Port(torch.int64, ("batch",))}
    inputs |= {} if prefix.causal else {"prompts": Port(torch.int64, ("batch",))}
    outputs = {"logits": Port(torch.float32, ("batch", vocabulary))} | _cache_ports(decoder, "present", "past + tokens")
    used = [decoder.blocks, decoder.norm, decoder.positions, decoder.vocabulary_head or decoder.token_embed]
    return [
        Graph("images", nn.ModuleList([model.encoder, prefix]), read_images, pixels, states),
        Graph("embed", nn.ModuleList([decoder.token_embed]), embed, tokens, vectors),
        Graph("step", nn.ModuleList(used), step, inputs | _cache_ports(decoder, "past", "past"), outputs),
    ]


def step_inputs(
    positions: Positions,
    starts: Tensor,
    *,
    past: int,
    length: int,
    prefix: int,
    first: int,
    prompts: Tensor | None,
) -> tuple[Tensor, StepInputs]:
    """Positions (B, L) of the next tokens, and the inputs of their step.

    Args:
        starts: Number of columns after the prefix that precede each row's first token, (B,).
        past: Number of columns before these tokens, the prefix's included.
        first: Position of a text's first token.
        prompts: Number of first columns, padding included, that attend to each other in both directions, (B,).
    """
    columns = torch.arange(past + length, device=starts.device)
    queries, begins = columns[past:], prefix + starts[:, None]  # (L,), (B, 1)
    # Padding before a text attends to itself, so that no row of weights is empty.
    visible = (columns < prefix) | (columns >= torch.minimum(begins, queries)[..., None])  # (B, L, P + L)
    last = queries[:, None]  # that each query attends to, (L, 1)
    if prompts is not None:
        both = (queries >= begins) & (queries < prompts[:, None])  # (B, L)
        last = torch.where(both, prompts[:, None] - 1, queries)[..., None]  # (B, L, 1)
    bias = to_additive_mask(visible & (columns <= last), torch.empty(0, device=starts.device))[:, None]
    at = (queries - begins).clamp(min=0) + first  # (B, L)
    position = positions.place(at, keys=past + length - prefix)
    if position.bias is not None:
        bias = bias + F.pad(position.bias, (prefix, 0))
    return at, StepInputs(1, length, position, bias)


def _keys_values(held: Mapping[str, Tensor], name: str, place: int) -> tuple[Tensor, Tensor]:
    return held[f"{name}.{place}.keys"], held[f"{name}.{place}.values"]


def _cache_ports(decoder: Decoder, name: str, length: int | str) -> Ports:
    """Keys and values of each block: NAME.0.keys, NAME.0.values, NAME.1.keys, ..."""
    layers = [block.cross_attn if name == "context" else block.attn for block in decoder._blocks()]
    shapes = [("batch", layer.num_kv_heads, length, layer.head_dim) for layer in layers if layer is not None]
    ports = ((place, Port(torch.float32, shape)) for place, shape in enumerate(shapes))
    return {f"{name}.{place}.{part}": port for place, port in ports for part in ("keys", "values")}


def _generator_graphs(model: EncoderDecoder, images: Ports) -> list[Graph]:
    """Encoder and step graphs of a model that generates text."""
    decoder: Any = model.decoder
    readers = [part for part in (model.encoder, getattr(model, "image_encoder", None)) if part is not None]
    text = next((part for part in readers if isinstance(part, TextEncoder)), None)
    image: Any = next((part for part in readers if part is not text), None)
    inputs = ({} if text is None else _text_ports(text)) | ({} if image is None else images)
    if decoder.prefix is not None and text is not None:
        raise UserError(
            "model.decoder.prefix: has no graph: the length of a prefix of texts differs between rows; "
            "export --to safetensors"
        )

    def context(images: Tensor | None = None, **texts: Tensor) -> Context:
        parts = ([] if text is None else [text.read(**texts)]) + ([] if images is None else [image(images)])
        return concat_states(parts)

    def encoder(**tensors: Tensor) -> tuple[Tensor, ...]:
        read = decoder.read(context(**tensors))
        mask = [] if read.mask is None else [read.mask]
        return *mask, *(part for pair in read.keys_values for part in pair)

    with torch.no_grad():
        example = context(**{name: port.example() for name, port in inputs.items()})
    masked, states = example.mask is not None, "states" if text is not None else example.states.shape[1]
    step = step_graph(decoder, states=states, masked=masked)
    outputs = {name: port for name, port in step.inputs.items() if name.startswith("context")}
    used = [decoder] if decoder.prefix is not None else [block.cross_attn for block in decoder.blocks]
    reading = nn.ModuleList([*readers, *used])  # so that the file holds only these weights
    return [Graph("encoder", reading, encoder, inputs, outputs or _cache_ports(decoder, "past", states)), step]


def _text_ports(encoder: nn.Module) -> Ports:
    """Ports of texts for an encoder, padded to one length; the mask is False after each text's end."""
    shape = ("batch", "length")
    types = {} if encoder.type_embed is None else {"types": Port(torch.int64, shape)}
    return {"tokens": Port(torch.int64, shape), "mask": Port(torch.bool, shape)} | types


def _encode_inputs(encoder: Any, tensors: Mapping[str, Tensor]) -> Context:
    return encoder(tensors["images"]) if "images" in tensors else encoder.read(**tensors)


def _classifier_graph(model: Classifier | SequenceClassifier, inputs: Ports) -> Graph:
    """Graph of class logits and of the pooled vector, which is the input's embedding."""

    def function(**tensors: Tensor) -> tuple[Tensor, ...]:
        pooled = model.pool_context(_encode_inputs(model.encoder, tensors))
        return model.head(pooled), pooled

    count, width = model.head.weight.shape
    outputs = {name: Port(torch.float32, ("batch", size)) for name, size in (("logits", count), ("vector", width))}
    return Graph("model", model, function, inputs, outputs)


def _masked_lm_graph(model: MaskedLanguageModel) -> Graph:
    """Graph of the logits of tokens at some places, which are indices in the flattened rows."""

    def function(places: Tensor, **texts: Tensor) -> tuple[Tensor, ...]:
        states = _encode_inputs(model.encoder, texts).states.flatten(0, 1)  # (B * L, D)
        return (model.head.logits(states.index_select(0, places)),)

    inputs = _text_ports(model.encoder) | {"places": Port(torch.int64, ("gaps",))}
    return Graph("model", model, function, inputs, {"logits": Port(torch.float32, ("gaps", len(model.head.weight)))})


def _dual_graphs(model: DualEncoder, images: Ports) -> list[Graph]:
    """Graphs of the embeddings of images and of texts, of norm 1."""
    of_texts: Any = model.text_encoder
    pool, fill = model.text_pool, model.text_fill

    def embed_images(images: Tensor) -> tuple[Tensor, ...]:
        return (model.embed_images(images),)

    def embed_texts(tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        if fill is not None:  # padding is not masked; the begin token is removed
            tokens = F.pad(
                torch.where(mask, tokens, fill)[:, 1:], (0, of_texts.max_len + 1 - tokens.shape[1]), value=fill
            )
            mask = torch.ones_like(tokens, dtype=torch.bool)
        causal = isinstance(of_texts, Decoder)
        states = of_texts(tokens) if causal else of_texts.read(tokens, mask).states  # (B, L, D)
        if pool == "mean":
            pooled = pool_states(Context(states, mask), "mean", None)  # (B, D)
        else:
            place = mask.sum(1) - 1 if pool == "last" else torch.zeros_like(tokens[:, 0])
            pooled = states.gather(1, place[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        return (F.normalize(model.text_projection(pooled).float(), dim=-1),)

    width = model.text_projection.out_features
    outputs = {"vector": Port(torch.float32, ("batch", width))}
    shape = ("batch", "length")
    texts = {"tokens": Port(torch.int64, shape), "mask": Port(torch.bool, shape)}
    return [Graph("images", model, embed_images, images, outputs), Graph("texts", model, embed_texts, texts, outputs)]


def _encoder_graph(model: Any, inputs: Ports, options: Mapping[str, Any]) -> Graph:
    """Graph of an encoder's states and their pooled vector, as `vlm embed` computes it."""
    pool = POOLINGS[options["pooling"]] if options.get("pooling") else default_pool(model)
    timm_pooling = isinstance(model, TimmEncoder) and not options.get("pooling")  # timm pools by itself

    def function(**tensors: Tensor) -> tuple[Tensor, ...]:
        context = _encode_inputs(model, tensors)
        pooled = model.pool_images(**tensors) if timm_pooling else pool_states(context, pool, None)
        return context.states, F.normalize(pooled, dim=-1) if options.get("normalize") else pooled

    with torch.no_grad():
        states, pooled = function(**{name: port.example() for name, port in inputs.items()})
    counted = "length" if isinstance(model, TextEncoder) else states.shape[1]
    shapes = {"states": ("batch", counted, states.shape[2]), "vector": ("batch", pooled.shape[1])}
    return Graph("model", model, function, inputs, {name: Port(torch.float32, shape) for name, shape in shapes.items()})
