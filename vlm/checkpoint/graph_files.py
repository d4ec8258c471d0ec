"""Exports models as graphs of ONNX or torch.export, with a description for programs that have neither torch nor vlm.

`graphs.json` describes them: the names, types and shapes of inputs and outputs, images, special tokens, classes. It is
written last, so that a folder that has it is complete.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import nn

from vlm.checkpoint.file import GRAPHS_DESCRIPTION
from vlm.checkpoint.stored import Metadata
from vlm.data.images.image import Preprocess
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.conversation import BEGIN, END, ChatForm, Turn
from vlm.data.text.hugging_face import list_pieces, make_tokenizer_files
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import ANCHOR, PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.graphs import LENGTHS, Graph, Ports, graphs_of
from vlm.models.pretrained.architecture import IMAGE

Content: TypeAlias = str | bytes | Callable[[Path], object]  # content of a file, or a function that writes it
GRAPHS = ("onnx", "pt2")
PIECES = "pieces.json"
# Entries in which tasks describe the texts that they read, by the names of their options.
TextOption: TypeAlias = Literal["max_len", "pairs", "stride", "longest", "abstains", "marks_shared"]
TEXT_OPTIONS: tuple[TextOption, ...] = ("max_len", "pairs", "stride", "longest", "abstains", "marks_shared")


class PortDescription(TypedDict):
    """An input or output: its type, and its shape, in which names stand for sizes that vary."""

    type: str
    shape: list[int | str]


class GraphDescription(TypedDict):
    """A graph: its file, inputs and outputs by name."""

    file: str
    inputs: dict[str, PortDescription]
    outputs: dict[str, PortDescription]


class GraphsDescription(TypedDict, total=False):
    """The content of graphs.json.

    Args:
        image: The preprocessing of images.
        tokens: Ids of special tokens, and the size of the vocabulary.
        reads, writes: Tokens around texts that the model reads and writes, and their lengths.
        prompts: The text that represents an image in a prompt and what surrounds its states, the token of a state (null
            for none), the tokens after a prompt's text, and the instructions for a caption and for an answer.
        similarity: Scale and bias of the similarities of a dual encoder.
    """

    format: int
    task: str | None
    graphs: dict[str, GraphDescription]
    image: dict[str, Any]
    tokens: dict[str, int | None]
    reads: dict[str, Any]
    writes: dict[str, Any]
    prompts: dict[str, Any]
    tokenizer_files: list[str]
    classes: list[str]
    similarity: dict[str, float | None]


def make_graph_files(about: Metadata, model: nn.Module, *, form: str) -> dict[str, Content]:
    """Returns the files of an exported model: its graphs, its tokenizer, and graphs.json.

    Args:
        about: The checkpoint's description of the model.
        form: "onnx" or "pt2".
    Returns:
        The content of each file, or a function that writes it to a path, by file name.
    Raises:
        UserError: A package is missing, or a part of the model has no graph.
    """
    if form == "onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as fault:
            missing = str(fault.name).partition(".")[0]
            raise UserError(f'--to onnx: needs the package {missing}; pip install "vlm-lightning[onnx]"') from fault
    image = Preprocess.from_state(about["preprocess"]).state() if "preprocess" in about else {}
    inside, embedding = "form" in about, about.get("embedding")
    graphs = graphs_of(model, image_size=image.get("image_size"), embedding=embedding, inside=inside)
    files: dict[str, Content] = {f"{graph.name}.{form}": trace_graph(graph, form=form) for graph in graphs}
    described: GraphsDescription = {"format": 1, "task": about["task"], "graphs": {}}
    for graph in graphs:
        inputs, outputs = _describe_ports(graph.inputs), _describe_ports(graph.outputs)
        described["graphs"][graph.name] = {"file": f"{graph.name}.{form}", "inputs": inputs, "outputs": outputs}
    if image:
        described["image"] = image | {"channels": "RGB", "normalized": "(value / 255 - mean) / std"}
    if "tokenizer" in about:
        tokenizer = tokenizer_from_state(about["tokenizer"])
        texts_files = make_tokenizer_files(tokenizer)
        if (texts := list_pieces(tokenizer)) is not None:
            texts_files[PIECES] = json.dumps(texts)
        files |= texts_files
        described |= _describe_texts(about, model, graphs, tokenizer) | {"tokenizer_files": [*texts_files]}
    if "classes" in about:
        described["classes"] = ["".join(name) for name in about["classes"]]
    if isinstance(model, DualEncoder):
        bias = None if model.bias is None else model.bias.item()
        described["similarity"] = {"scale": model.scale.item(), "bias": bias}
    return files | {GRAPHS_DESCRIPTION: json.dumps(described, indent=1, ensure_ascii=False) + "\n"}


def trace_graph(graph: Graph, *, form: str) -> Callable[[Path], object]:
    """Traces a graph; returns the function that writes it to a path.

    Raises:
        UserError: It cannot be traced.
    """
    dims = {name: torch.export.Dim(name, min=0 if name == "past" else 1) for name in LENGTHS}
    example = tuple(port.example() for port in graph.inputs.values())
    axes = [enumerate(port.shape) for port in graph.inputs.values()]
    shapes = (tuple({axis: dims[size] for axis, size in sizes if isinstance(size, str)} for sizes in axes),)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of the exporter's own internals
            exported = torch.export.export(graph.eval(), example, dynamic_shapes=shapes)
            if form == "pt2":
                return partial(torch.export.save, exported)
            names: dict[str, Any] = {"input_names": [*graph.inputs], "output_names": [*graph.outputs]}
            program = torch.onnx.export(exported, dynamic_shapes=shapes, dynamo=True, verbose=False, **names)
    except Exception as fault:  # a user's class may raise anything
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise UserError(f"model: its {graph.name} cannot be traced ({reason:.200}); use --to safetensors") from fault
    assert program is not None
    return program.save


def _describe_ports(ports: Ports) -> dict[str, PortDescription]:
    return {
        name: {"type": str(port.dtype).removeprefix("torch."), "shape": [*port.shape]} for name, port in ports.items()
    }


def _describe_texts(about: Metadata, model: Any, graphs: Sequence[Graph], tokenizer: Tokenizer) -> GraphsDescription:
    """Returns special tokens, the tokens around the texts that the model reads and writes, and their lengths."""
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "bos", "eos", "unk", "mask")}
    described: GraphsDescription = {"tokens": ids | {"vocab_size": tokenizer.vocab_size}}
    if any("mask" in graph.inputs for graph in graphs):
        limits = {"begin": tokenizer.read_begin, "end": [tokenizer.eos_id]}
        described["reads"] = limits | {name: about[name] for name in TEXT_OPTIONS if name in about}
    if any(graph.name == "step" for graph in graphs):
        options, is_decoder = about.get("decoding", {}), isinstance(model, Decoder)
        described["writes"] = {
            "begin": [*tokenizer.starts] if is_decoder else [tokenizer.bos_id, *tokenizer.begin()],
            "languages": {language: tokenizer.begin(language) for language in tokenizer.languages},
            "ends": [tokenizer.eos_id, *options.get("ends", ())],
            "max_len": (model if is_decoder else model.decoder).max_len,
            "max_tokens": options.get("max_tokens") or about.get("max_tokens"),
            "options": {name: value for name, value in options.items() if name not in ("ends", "max_tokens")},
        }
        if "form" in about:
            form = PromptForm.of(about["form"])
            described["writes"]["prompt"] = form.format_example()
            if about["task"] == "conversations":
                ends = [*described["writes"]["ends"], *form.ends(tokenizer)]
                described["writes"]["ends"] = [*dict.fromkeys(ends)]
            if form.states:
                described |= _describe_prompts(form, tokenizer, described["writes"])
    return described


def _describe_prompts(form: PromptForm, tokenizer: Tokenizer, writes: dict[str, Any]) -> GraphsDescription:
    """Returns how images stand in prompts, and updates the text of a prompt and the tokens that it begins with."""
    writes["begin"], answer = [*tokenizer.starts] if form.starts else [], list[int]()
    if isinstance(form.chat, ChatForm) and form.plain:  # tokens, not texts, surround the question
        pieces = [*form.chat.pieces([Turn("user", "{}", (0,))], answering=True)]
        asked = next(place for place, piece in enumerate(pieces) if piece.text is not None and not piece.mark)
        ids = {BEGIN: [tokenizer.bos_id], END: [tokenizer.eos_id]}
        for place, piece in enumerate(pieces):
            (writes["begin"] if place < asked else answer).extend(ids.get(piece.text or "", []))
        writes["prompt"] = f"{IMAGE}{{}}"
    elif isinstance(form.chat, ChatTemplate) and writes["prompt"] is not None and isinstance(tokenizer, JsonTokenizer):
        begin = tokenizer.encode_marked(writes["prompt"])[: len(writes["begin"])]
        writes["begin"] = [] if begin == writes["begin"] else writes["begin"]  # the template writes them
    names = ("states", "image_id", "before", "after", "tile", "caption", "question")
    prompts = {"image": IMAGE, "anchor": "" if form.plain else ANCHOR, "answer": answer}
    return {"prompts": prompts | {name: getattr(form, name) for name in names}}
