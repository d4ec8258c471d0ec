"""Folders whose tensors are removed, renamed, added, retyped or scaled: read as transformers reads them, or refused.

The reference is the folder that transformers saves after it has read the faulty one. What it would draw at random has
to be refused, by the tensor's name, by the functions behind every command.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from dual import saved_dual
from hugging import (
    CAPTIONERS,
    CLASSIFIERS,
    DECODERS,
    ENCODERS,
    save_parts,
    saved_decoder,
    saved_gpt2,
    saved_reader,
)
from image_text import saved_image_text
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from translators import saved_marian, saved_t5

from vlm.checkpoint.hugging_face import describe_folder
from vlm.checkpoint.load import read
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.start import start_from
from vlm.errors import UserError
from vlm.inference.info import describe
from vlm.models.pretrained.load import open_folder

SEED = 51
READERS = {
    "bert_fill": t.BertForMaskedLM,
    "bert_pretraining": t.BertForPreTraining,
    "bert_classes": t.BertForSequenceClassification,
    "bert_tags": t.BertForTokenClassification,
    "bert_spans": t.BertForQuestionAnswering,
    "bert": t.BertModel,
    "distilbert_fill": t.DistilBertForMaskedLM,
    "distilbert_classes": t.DistilBertForSequenceClassification,
    "roberta_fill": t.RobertaForMaskedLM,
    "roberta_classes": t.RobertaForSequenceClassification,
    "xlm_roberta_tags": t.XLMRobertaForTokenClassification,
}
FOLDERS: dict[str, Callable[[Any], Any]] = {
    "gpt2": saved_gpt2,
    **{name: partial(saved_decoder, name=name) for name in DECODERS},
    **{name: partial(saved_reader, kind=kind) for name, kind in READERS.items()},
    **CAPTIONERS,
    **{f"{name}_encoder": lambda folder, made=made: save_parts(folder, made()) for name, made in ENCODERS.items()},
    **{f"{name}_classes": lambda folder, made=made: save_parts(folder, made()) for name, made in CLASSIFIERS.items()},
    **{name: partial(saved_dual, name) for name in ("clip", "siglip")},
    "marian": saved_marian,
    "marian_apart": partial(saved_marian, share_encoder_decoder_embeddings=False),
    "t5": saved_t5,
    "flan_t5": partial(saved_t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    **{
        name: partial(saved_image_text, name=name)
        for name in ("llava_clip", "llava_siglip", "idefics3", "smolvlm", "paligemma")
    },
}
# Tensors that transformers misses, and that our models have no use for.
NEEDLESS = re.compile(
    r"pooler|mask_token|vision_(model|tower)\.head|^head\.|post_layernorm|embed_positions|position_ids"
)
# Copies of one tensor, by the names that transformers ties.
TIES = [
    {"lm_head.weight", "model.embed_tokens.weight"},
    {"lm_head.weight", "transformer.wte.weight"},
    {"lm_head.weight", "model.language_model.embed_tokens.weight"},
    {"lm_head.weight", "language_model.model.embed_tokens.weight"},
    {"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
    {"lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"},
    {"vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"},
    {"decoder.lm_head.weight", "decoder.transformer.wte.weight"},
    {"decoder.output_projection.weight", "decoder.model.decoder.embed_tokens.weight"},
    {"text_decoder.cls.predictions.decoder.weight", "text_decoder.bert.embeddings.word_embeddings.weight"},
    {"output.weight", "git.embeddings.word_embeddings.weight"},
    {"lm_head.weight", "model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"},
    {"lm_head.weight", "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"},
]
PARTS = ("weight_scale_inv", "weight_scale", "SCB", "qweight", "scales", "qzeros", "lora_A.weight", "bias", "gate")
ADDED = ("position_ids", "extra.weight", "classifier.weight", "qa_outputs.bias", "model.layers.7.mlp.up_proj.weight")
TYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)


@cache
def clean(name: str, root: Path) -> tuple[Path, str]:
    """A folder as transformers saves it, and the name of its class."""
    torch.manual_seed(SEED)
    model, *_ = FOLDERS[name](root / name)
    return root / name, type(model).__name__


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clean")


def damage(tensors: dict[str, Tensor], draw: random.Random, *, tied: bool) -> tuple[set[str], Any, Any]:
    """Puts one fault into a folder's tensors.

    Returns:
        The names of which a refusal has to mention one; the tensors that transformers is to read instead, {} for the
        same, and None if it has no such form; keys of config.json.
    """
    kind = draw.choice([kind for kind in KINDS if tied or kind != "tie"])
    name = draw.choice(sorted(tensors))
    return KINDS[kind](tensors, name, draw)


def remove(tensors: dict[str, Tensor], name: str, draw: random.Random) -> Any:
    del tensors[name]
    return {name}, {}, {}


def rename(tensors: dict[str, Tensor], name: str, draw: random.Random) -> Any:
    base, _, kind = name.rpartition(".")
    moved = re.sub(r"\.(\d+)\.", ".7.", name, count=1)
    new = draw.choice([f"{name}s", f"{base}.own.{kind}", f"module.{name}", name.partition(".")[2], moved])
    if new and new not in tensors:
        tensors[new] = tensors.pop(name)
    return {name, new}, {}, {}


def add(tensors: dict[str, Tensor], name: str, draw: random.Random) -> Any:
    base = name.rpartition(".")[0]
    near = f"{base}.{draw.choice(PARTS)}"
    copy = draw.choice([name.partition(".")[2], f"model.{name}", re.sub(r"\.(\d+)\.", ".7.", name, count=1)])
    new = draw.choice([near, near, copy, draw.choice(ADDED)])
    if new not in tensors:
        tensors[new or "x"] = torch.randn(tensors[name].shape) if new == copy else torch.randn(3)
    return {new or "x", name}, {}, {}


def retype(tensors: dict[str, Tensor], name: str, draw: random.Random) -> Any:
    tensors[name] = tensors[name].to(draw.choice(TYPES))
    return {name}, {}, {}


def scale(tensors: dict[str, Tensor], name: str, draw: random.Random) -> Any:
    """Quantises a matrix, per tensor or per block, with a description that fits or does not."""
    matrices = sorted(one for one in tensors if one.endswith(".weight") and tensors[one].dim() == 2)
    name = draw.choice(matrices)
    weight, block = tensors[name].float(), draw.choice([None, (8, 8), (16, 4), (128, 128)])
    rows, columns = block or weight.shape
    grid = tuple(-(-side // each) for side, each in zip(weight.shape, (rows, columns), strict=True))
    factors = torch.rand(grid) + 0.5
    spread = factors.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
    stored = factors if block else draw.choice([factors.flatten(), factors.reshape(())])
    if draw.random() < 0.2:
        stored = torch.ones(5, 7)
    tensors[f"{name}_scale_inv"] = stored
    config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": block and [*block], "fmt": "e4m3"}
    if draw.random() < 0.2:
        config |= draw.choice([{"quant_method": "fbgemm_fp8"}, {"fmt": "e3m4"}, {"odd": 1}, {"weight_block_size": [3]}])
    instead = None
    sides = zip(weight.shape, (rows, columns), grid, strict=True)
    # They take the sizes of blocks from the number of scales, so that blocks that are cut off cannot be compared.
    if stored.shape != (5, 7) and all(count == 1 or side % each == 0 for side, each, count in sides):
        exact = Fp8Dequantize(None)._dequantize_one(tensors[name], factors, torch.float32)
        instead = {one: tensor for one, tensor in tensors.items() if one != f"{name}_scale_inv"} | {name: exact}
    stated = {"quantization_config": config} if draw.random() < 0.8 else {}
    return {name, f"{name}_scale_inv", "quantization_config"}, instead, stated


def tie(tensors: dict[str, Tensor], name: str, draw: random.Random) -> Any:
    """Stores copies of an embedding under some of their names, of which one may differ."""
    groups = [group for group in TIES if group & tensors.keys()]
    if not groups:
        return remove(tensors, name, draw)
    group = draw.choice(groups)
    held = {one: tensors.pop(one) for one in group & tensors.keys()}
    for one in draw.sample(sorted(group), draw.randint(1, len(group))):
        tensors[one] = held.get(one, next(iter(held.values()))).clone()
        if draw.random() < 0.15:
            tensors[one] += 1
    return group, {}, {}


KINDS: dict[str, Callable[..., Any]] = {
    "remove": remove, "rename": rename, "add": add, "retype": retype, "scale": scale, "tie": tie,
}  # fmt: skip


def read_by_theirs(folder: Path, kind: str, out: Path) -> Path | None:
    """The folder that transformers saves after reading one; None if it cannot read it or draws weights at random."""
    try:
        model, about = getattr(t, kind).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception:
        return None
    if about["mismatched_keys"] or any(not NEEDLESS.search(name) for name in about["missing_keys"]):
        return None
    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(out)
    return out


def by_read(folder: Path) -> dict[str, Tensor]:
    """As in generate, chat, caption, evaluate, serve, embed and export."""
    return read(folder)["state_dict"]


def by_training(folder: Path) -> dict[str, Tensor]:
    """As in train model=pretrained."""
    _, about = describe_folder(open_folder(folder))
    model = rebuild(about["model"])
    start_from(model, {"": str(folder)})
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def by_info(folder: Path) -> None:
    describe(str(folder))


def outcomes(folder: Path) -> Iterator[tuple[str, dict[str, Tensor] | None, str]]:
    """For each function behind a command: its name, the weights that it reads if any, and its refusal or ""."""
    for function in (by_read, by_training, by_info):
        try:
            yield function.__name__, function(folder), ""
        except UserError as fault:
            yield function.__name__, None, str(fault)


def check(name: str, number: int, root: Path, work: Path) -> str:
    """Tries a fault in a folder: "equal", "refused", "alone" (read without a reference), or what is wrong."""
    draw = random.Random(f"{SEED} {name} {number}")
    torch.manual_seed(number)
    source, kind = clean(name, root)
    folder = work / "faulty"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    before = {one: (tensor.dtype, tensor.shape) for one, tensor in tensors.items()}
    tied = not name.endswith(("_classes", "_tags", "_spans"))  # these classes have no head that shares the embedding
    words, instead, stated = damage(tensors, draw, tied=tied)
    names = {one for one in words | {re.sub(pattern, new, one) for one in words for pattern, new in renames_of(folder)}}
    theirs = None
    if instead is not None:
        save_file(instead or tensors, folder / "model.safetensors", {"format": "pt"})
        theirs = read_by_theirs(folder, kind, work / "theirs")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | stated))
    after = {one: (tensor.dtype, tuple(tensor.shape)) for one, tensor in tensors.items() if before.get(one) is None}
    case = f"{name} {number}: {sorted(words)[:4]} {sorted(map(str, after.items()))[:3]} {stated}"
    found = list(outcomes(folder))
    if all(refusal for *_, refusal in found):
        wrong = [refusal for *_, refusal in found if not any(len(one) > 3 and one in refusal for one in names)]
        return f"{case}: refused without the name: {wrong[0][:300]}" if wrong else "refused"
    if any(refusal for *_, refusal in found):
        return f"{case}: refused by some alone: {[(function, refusal[:200]) for function, _, refusal in found]}"
    if theirs is None:
        if instead is None:  # no reference, because blocks are cut off
            return "alone"
        return f"{case}: read, where transformers draws at random or fails"
    try:
        truth = by_read(theirs)
    except UserError as fault:
        return f"{case}: read, but what transformers saves of it is refused: {str(fault)[:300]}"
    for function, state, _ in found:
        for one in state or ():
            if not torch.allclose(state[one].float(), truth[one].float(), rtol=1e-5, atol=1e-6):
                return f"{case}: {function} reads another {one}"
    return "equal"


def renames_of(folder: Path) -> list[tuple[str, str]]:
    return [*open_folder(folder).architecture.renamed]


def try_all(count: int, root: Path, tmp_path: Path) -> None:
    tally: dict[str, int] = {"equal": 0, "refused": 0, "alone": 0}
    faults = []
    for number in range(count):
        name = [*FOLDERS][number % len(FOLDERS)]
        work = tmp_path / str(number)
        result = check(name, number, root, work)
        shutil.rmtree(work)
        if result in tally:
            tally[result] += 1
        else:
            faults.append(result)
    print(f"seed {SEED}, {count} folders: {tally}, {len(faults)} faults")
    assert not faults, "\n".join(faults[:40])
    assert tally["equal"] > count // 10 and tally["refused"] > count // 10


@pytest.mark.slow
def test_a_sample_of_faults(root: Path, tmp_path: Path) -> None:
    try_all(len(FOLDERS), root, tmp_path)


@pytest.mark.nightly
def test_all_faults(root: Path, tmp_path: Path) -> None:
    try_all(800, root, tmp_path)
