"""Generated GGUF files: other values of every key, and tensors added, removed, renamed, cut and stored in other types.

Each file gives the logits of `transformers` with the weights that the library reads, or is refused by the name of the
key or tensor, in the same words by every command.
"""

import copy
import random
import re

import gguf
import numpy as np
import pytest
import torch
from gguf_files import DECODERS, decoder, dequantise, save_gguf

from vlm.checkpoint.hugging_face import describe_folder
from vlm.checkpoint.load import load_model, read
from vlm.errors import UserError
from vlm.inference.info import describe
from vlm.models.pretrained.load import open_folder

TOKENS = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(3))
VALUES = [True, False, 0, 1, 2, 3, 7, 16, 64, 2**31, -1, 0.0, 0.5, 1.0, 2.5, 1e-6, 1e6, "none", "mean", [1, 2], ["a"]]
# Keys of the architecture that change logits as a value of transformers' config does.
CONFIG = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", [1e-6, 1e-5, 0.01, 0.3]),
    "context_length": ("max_position_embeddings", [24, 64, 4096, 2**20]),
    "rope.freq_base": ("rope_theta", [100.0, 10_000.0, 5e5, 1e6]),
    "attention.head_count": ("num_attention_heads", [1, 2, 4, 8]),
    "attention.head_count_kv": ("num_key_value_heads", [1, 2, 4]),
    "feed_forward_length": ("intermediate_size", [64, 128, 256]),
    "block_count": ("num_hidden_layers", [1, 2, 3]),
    "embedding_length": ("hidden_size", [32, 64, 128]),
}
# Keys that describe the file or have another use than to compute logits, with valid values.
TEXTS = ("name", "author", "version", "basename", "description", "size_label", "license", "license.link", "url")
TEXTS += ("repo_url", "source.url", "source.repo_url", "base_model.0.name", "dataset.0.url", "tags")
IDS = ("unknown", "seperator", "mask", "fim_pre", "fim_mid", "fim_suf")
FREE = {f"general.{name}": ("text", 3, ["a", "b"]) for name in TEXTS} | {
    "general.file_type": (1, 15),
    "quantize.imatrix.file": ("a.dat",),
    "quantize.imatrix.entries_count": (3,),
    "tokenizer.chat_template.tool_use": ("{{ tools }}",),
    **{f"tokenizer.ggml.{name}_token_id": (0, 5, 290) for name in IDS},
    **{f"general.sampling.{name}": (0.25, 0.75, 1.0) for name in ("temp", "top_p", "min_p", "penalty_repeat")},
    "general.sampling.top_k": (0, 20),
    **{f"{{arch}}.rope.scaling.{name}": (8.0, 32.0) for name in ("yarn_beta_fast", "yarn_beta_slow")},
    "{arch}.rope.scaling.finetuned": (True, False),
    "{arch}.rope.scaling.original_context_length": (64, 8192),
}
# Values that change nothing, by key; any other value of these and of all keys that are not named here is refused.
NEUTRAL = {
    "{arch}.attention.causal": True,
    "{arch}.use_parallel_residual": False,
    "{arch}.rope.scaling.attn_factor": 1.0,
    "{arch}.rope.scaling.yarn_attn_factor": 1.0,
    **dict.fromkeys(("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token"), False),
    **dict.fromkeys(("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"), False),
    **{f"{{arch}}.{name}": 0 for name in ("expert_count", "attention.sliding_window", "final_logit_softcapping")},
    "general.type": "model",
}
OPTIONAL = {"output.weight", "rope_freqs.weight"}
TENSORS = sorted({name.format(bid=layer) for name in gguf.TENSOR_NAMES.values() for layer in (0, 1, 2)})


def all_keys(place=gguf.Keys):
    """Every key that the library of llama.cpp knows, without a few that hold the vocabulary."""
    for name, value in vars(place).items():
        if isinstance(value, type):
            yield from all_keys(value)
        elif not name.startswith("_") and isinstance(value, str) and value not in SPECIAL:
            yield re.sub(r"\{(id|name|dense)\}", "0", value)


SPECIAL = {getattr(gguf.Keys.Tokenizer, name) for name in ("LIST", "TOKEN_TYPE", "SCORES", "MERGES", "MODEL", "PRE")}
SPECIAL |= {getattr(gguf.Keys.Tokenizer, f"{name}_ID") for name in ("BOS", "EOS", "EOT", "EOM", "PAD")}
SPECIAL |= {getattr(gguf.Keys.Tokenizer, f"FIM_{name}_ID") for name in ("PAD", "REP", "SEP")}
SPECIAL |= {"general.architecture", "general.alignment", "general.quantization_version"}
KEYS = sorted(set(all_keys()))


class Case:
    """A file to write, and what is expected of it.

    Attributes:
        config: Changes of transformers' config that mean the same.
        named: The key or tensor that must be in the words of a refusal.
        outcome: "equal" or "refused" if only this is right, or "either".
    """

    def __init__(self, base, dice):
        self.model, self.tokenizer = base
        self.arch = self.model.config.model_type
        self.values, self.config, self.change, self.named, self.outcome = {}, {}, None, "", "either"
        dice.choice([self._key, self._key, self._size, self._scaling, self._tensor, self._tensor])(dice)

    def _key(self, dice):
        template = dice.choice([*KEYS, *FREE, *NEUTRAL])
        name = template.removeprefix("{arch}.")
        if name in CONFIG or name in ("rope.scaling.type", "rope.scaling.factor"):
            return self._size(dice)
        self.named = template.replace("{arch}", self.arch)
        valid = [*FREE.get(template, ()), *([NEUTRAL[template]] if template in NEUTRAL else ())]
        value = dice.choice(valid if valid and dice.random() < 0.5 else VALUES)
        self.values = {self.named: value}
        if template in NEUTRAL and type(value) is type(NEUTRAL[template]) and value == NEUTRAL[template]:
            self.outcome = "equal"
        elif template in FREE:
            is_valid = any(type(value) is type(one) and value == one for one in FREE[template])
            self.outcome = "equal" if is_valid else "either"
        elif name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
            heads = self.model.config.num_attention_heads
            usual = getattr(self.model.config, "head_dim", None) or self.model.config.hidden_size // heads
            self.outcome = "equal" if value == usual else "refused"
        elif template.startswith("{arch}") and value not in (0, 1, "none"):  # which may mean that it is not used
            self.outcome = "refused"

    def _size(self, dice):
        key = dice.choice([*CONFIG])
        name, values = CONFIG[key]
        value = dice.choice(values) if dice.random() < 0.8 else dice.choice(VALUES)
        stated = f"{self.arch}.{key}"
        # A size is also compared with the shapes of tensors and with the number of rotated dimensions.
        self.named = f"{stated}|tensor '|{self.arch}.rope.dimension_count|rope_freqs"
        self.values, self.config = {stated: value}, {name: value}
        if type(value) is int and key in ("feed_forward_length", "attention.head_count_kv") and dice.random() < 0.3:
            self.values = {stated: [value] * self.model.config.num_hidden_layers}

    def _scaling(self, dice):
        kind = dice.choice([None, "linear", "linear", "none", "yarn", "longrope", "dynamic"])
        factor = dice.choice([None, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
        name = dice.choice(["scaling.factor", "scaling.factor", "scale_linear"])
        self.named = f"{self.arch}.rope."
        keys = {"scaling.type": kind, "scaling.factor": None, name: factor}
        self.values = {f"{self.named}{name}": value for name, value in keys.items()}
        if kind not in (None, "linear", "none"):
            self.outcome = "refused"
        elif kind == "none" or factor in (None, 0.0, 1.0):
            self.outcome, self.config = "equal", {} if self.is_llama3 else {"scaling": None}
        else:
            self.outcome = "refused" if self.is_llama3 or factor < 1 else "equal"
            self.config = {"scaling": factor}

    @property
    def is_llama3(self):
        return self.model.config.rope_parameters["rope_type"] == "llama3"

    def _tensor(self, dice):
        """Takes the change of one tensor; the writer calls it with all of them."""
        action = dice.choice([self._add, self._remove, self._rename, self._retype, self._cut, self._scale])
        drawn, number = dice.random(), dice.random()

        def change(tensors):
            self.named = [*tensors][int(drawn * len(tensors))]
            action(tensors, self.named, random.Random(number))

        self.change = change

    def _add(self, tensors, name, dice):
        self.named = dice.choice(TENSORS) + dice.choice([".weight", ".weight", ".bias", ".scale", ""])
        if dice.random() < 0.5:  # a known one with a bias, of another layer or of none
            old, new = dice.choice([("weight", "bias"), ("blk.1", "blk.2"), ("blk.0.", "")])
            self.named = name.replace(old, new)
        drawn = np.random.default_rng(0).standard_normal(tensors["token_embd.weight"][0].shape).astype(np.float32)
        self.outcome = "either" if self.named in (*tensors, *OPTIONAL) else "refused"
        tensors[self.named] = drawn, None

    def _remove(self, tensors, name, dice):
        del tensors[name]
        self.outcome = "equal" if name in OPTIONAL else "refused"
        if name == "rope_freqs.weight":
            self.config = {"scaling": None}

    def _rename(self, tensors, name, dice):
        other = dice.choice(TENSORS) + ".weight"
        self.named, self.outcome = f"{name}|{other}", "either" if {name, other} & OPTIONAL else "refused"
        if name == "rope_freqs.weight":
            self.config = {"scaling": None}
        tensors[other] = tensors.pop(name)

    def _retype(self, tensors, name, dice):
        values, _ = tensors[name]
        stored = dice.choice(["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "I8", "I32", "F64"])
        made = {"I8": np.int8, "I32": np.int32, "F64": np.float64}.get(stored)
        if made is not None:
            tensors[name], self.outcome = (values.astype(made), None), "refused"
        elif values.ndim == 2 or not stored.startswith("Q"):
            tensors[name] = gguf.quantize(values, gguf.GGMLQuantizationType[stored]), stored
            self.outcome = "either" if name == "rope_freqs.weight" else "equal"

    def _cut(self, tensors, name, dice):
        tensors[name], self.outcome = (tensors[name][0][: len(tensors[name][0]) // 2].copy(), None), "refused"
        self.named += f"|{self.arch}.vocab_size"

    def _scale(self, tensors, name, dice):
        tensors[name] = tensors[name][0] * np.float32(3), None
        self.outcome = "refused" if name == "rope_freqs.weight" else "equal"

    def reference(self, path):
        """The logits of transformers with the meaning of the header and the weights of the file."""
        config = copy.deepcopy(self.model.config)
        stored = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
        config.tie_word_embeddings = "output.weight" not in stored
        for name, value in self.config.items():
            if name == "rope_theta":
                config.rope_parameters = config.rope_parameters | {"rope_theta": value}
            elif name == "scaling":
                base = config.rope_parameters["rope_theta"]
                linear = {"rope_type": "default"} if value is None else {"rope_type": "linear", "factor": value}
                config.rope_parameters = {"rope_theta": base, **linear}
            else:
                setattr(config, name, value)
        return dequantise(path, type(self.model)(config).eval())(TOKENS).logits


@pytest.fixture(scope="module")
def bases():
    torch.manual_seed(6)
    return {name: decoder(name) for name in DECODERS}


def outcome_of(path):
    """The logits of a file or the words of its refusal, which must be the same for a description and for training."""
    words = []
    for use in (
        lambda: load_model(read(path)),
        lambda: describe(str(path)),
        lambda: describe_folder(open_folder(path)),
    ):
        try:
            result = use()
            words.append(None)
        except UserError as fault:
            words.append(str(fault))
        if len(words) == 1 and words[0] is None:
            logits = result.head(result(TOKENS))
    assert words[1:] == words[:1] * 2
    return logits if words[0] is None else words[0]


def fault_of(case, path):
    """What is wrong with the outcome of a file, or ""; and whether the file was read."""
    found = outcome_of(path)
    if isinstance(found, str):
        if case.outcome == "equal":
            return f"refused: {found}", False
        is_named = any(part in found for part in case.named.split("|"))
        return "" if is_named and "\n" not in found and "does not describe" not in found else f"words: {found}", False
    if case.outcome == "refused":
        return "was read", True
    truth = case.reference(path)
    gap = (found - truth).abs().max() / max(1, truth.std())
    return "" if gap < 1e-4 else f"differs by {gap:.2g}", True


NIGHTLY = [pytest.param(seed, 100, marks=pytest.mark.nightly) for seed in range(1, 7)]


@torch.no_grad()
@pytest.mark.parametrize(("seed", "count"), [pytest.param(0, 40, marks=pytest.mark.slow), *NIGHTLY])
def test_a_generated_file_is_equal_or_refused_by_name(bases, tmp_path, seed, count):
    dice, path, faults, read = random.Random(seed), tmp_path / "a.gguf", [], 0
    for number in range(count):
        name = dice.choice([*bases])
        case = Case(bases[name], dice)
        save_gguf(path, case.model, case.tokenizer, values=case.values, change=case.change)
        fault, is_read = fault_of(case, path)
        read += is_read
        if fault:
            faults.append(f"file {number}, {name} {case.values} {case.named}: {fault}")
    assert not faults, "\n".join(faults)
    assert count / 10 < read < count * 9 / 10
