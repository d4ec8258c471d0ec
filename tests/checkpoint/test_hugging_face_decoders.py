"""Decoders of Llama's family, in and out: the same logits and texts as `transformers` has of the same folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hugging import DECODERS, TEXTS, saved_decoder, saved_gpt2

from vlm.checkpoint.file import write
from vlm.checkpoint.load import load_model, read
from vlm.checkpoint.rebuild import rebuild
from vlm.cli.main import run as command
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.tasks.language_modeling.predict import TextGenerator, generate

PROMPTS = ["a man in", "the children don't", "two dogs run over the", "a", "a big brown cat is"]
PROMPTS += ["table", "rock", "red."]


def tokens_of(tokenizer, count: int = 40) -> torch.Tensor:
    return torch.randint(len(tokenizer), (2, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("old", [False, True], ids=["today", "published"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_theirs(folder: str, name: str, old: bool) -> None:
    torch.manual_seed(1)
    theirs, tokenizer = saved_decoder(folder, name, old=old, **({"max_shard_size": "20KB"} if old else {}))
    assert Path(folder, "model.safetensors.index.json").is_file() == old
    loaded = read(folder)
    assert loaded["vlm"]["task"] == "language_modeling" and loaded["vlm"]["max_tokens"] == 64
    ours, tokens = load_model(loaded), tokens_of(tokenizer)
    truth = theirs(tokens).logits
    assert truth.std() > 0.3
    torch.testing.assert_close(ours.head(ours(tokens)), truth, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_folder_loads_without_the_compiler(folder: str) -> None:
    saved_decoder(folder, "llama")
    program = f"import sys, vlm; vlm.load({folder!r}).generate('a', max_tokens=1)"
    program += "; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True False"


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", [*DECODERS, "gpt2"])
def test_texts_are_theirs(folder: str, name: str) -> None:
    torch.manual_seed(2)
    theirs, tokenizer = saved_gpt2(folder) if name == "gpt2" else saved_decoder(folder, name)
    ours = TextGenerator(folder)
    assert [ours.tokenizer.encode(text) for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]
    ranking = {"num_beams": 4, "length_penalty": 0.3, "early_stopping": "never"}
    found = generate(ours.model, ours.tokenizer, PROMPTS, max_tokens=12, seed=0, sampling=Sampling(temperature=0.0))
    searched, ranked = (
        [texts[0] for _, texts in sorted(ours.results([PROMPTS], ours.options(beam=4, max_tokens=12, **more)))]
        for more in ({}, {"length_penalty": 0.3})
    )
    for texts, options in ((found, {"num_beams": 1}), (searched, {"num_beams": 4}), (ranked, ranking)):
        for prompt, one in zip(PROMPTS, texts, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            row = theirs.generate(ids, max_new_tokens=12, do_sample=False, **options)[0, ids.shape[1] :]
            assert one.text == tokenizer.decode(row, skip_special_tokens=True), (prompt, options)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_what_a_folder_bans_or_forces_holds(folder: str, beams: int) -> None:
    """Without options too, which decode in another way than a search."""
    torch.manual_seed(2)
    theirs, tokenizer = saved_decoder(folder, "llama")
    ours = TextGenerator(folder)
    free = generate(ours.model, ours.tokenizer, PROMPTS, max_tokens=12, seed=0, sampling=Sampling(temperature=0.0))
    banned = sorted({token for text in free for token in text.tokens[:2]})
    theirs.generation_config.update(bad_words_ids=[[token] for token in banned], renormalize_logits=True)
    theirs.generation_config.forced_eos_token_id = tokenizer.eos_token_id
    theirs.generation_config.save_pretrained(folder)
    ours = TextGenerator(folder)
    found = dict(ours.results([PROMPTS], ours.options(max_tokens=12, sample=False, beam=beams)))
    for place, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        row = theirs.generate(ids, max_new_tokens=12, do_sample=False, num_beams=beams)[0, ids.shape[1] :]
        assert found[place][0].text == tokenizer.decode(row, skip_special_tokens=True), prompt
    drawn = [texts[0] for _, texts in ours.results([PROMPTS], ours.options(max_tokens=12, sample=True))]
    assert not {token for text in drawn for token in text.tokens} & {*banned}


@pytest.mark.slow
@torch.no_grad()
def test_any_of_several_ends_ends_a_text(folder: str, tmp_path: Path) -> None:
    """Greedy, by beams, drawn and under a rule, as `generate` has them; each end comes first somewhere."""
    torch.manual_seed(4)
    theirs, tokenizer = saved_decoder(folder, "qwen3")
    free = TextGenerator(folder)
    free = generate(free.model, free.tokenizer, PROMPTS, max_tokens=9, seed=0, sampling=Sampling(temperature=0.0))
    ends = [tokenizer.eos_token_id, *{text.tokens[-1] for text in free}]  # what they would write
    assert len(ends) > 3
    theirs.generation_config.eos_token_id = ends
    theirs.generation_config.save_pretrained(folder)
    ours, seen = TextGenerator(folder), set()
    for options in ({}, {"num_beams": 4}, {"num_beams": 3, "min_new_tokens": 3}):
        chosen = {"beam": options.get("num_beams", 1), "min_tokens": options.get("min_new_tokens"), "sample": False}
        found = dict(ours.results([PROMPTS], ours.options(max_tokens=30, **chosen)))
        for place, prompt in enumerate(PROMPTS):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            row = theirs.generate(ids, max_new_tokens=30, do_sample=False, **options)[0, ids.shape[1] :].tolist()
            seen |= {token for token in row if token in ends}
            row = [token for token in row if token not in ends]
            assert found[place][0].text == tokenizer.decode(row), (options, prompt)
    assert len(seen) > 2
    drawn = [texts[0] for _, texts in ours.results([PROMPTS * 4], ours.options(max_tokens=60, sample=True))]
    assert min(len(text.tokens) for text in drawn) < 59
    assert not {token for text in drawn for token in text.tokens} & {*ends}
    assert command(["export", str(tmp_path / "out"), "-c", folder]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == ends


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_what_we_export_is_theirs_again(folder: str, tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    theirs, tokenizer = saved_decoder(folder, name)
    out = tmp_path / "out"
    assert command(["export", str(out), "-c", folder]) == 0
    again, info = type(theirs).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    tokens = tokens_of(tokenizer)
    assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)
    assert transformers.AutoTokenizer.from_pretrained(out)(PROMPTS).input_ids == tokenizer(PROMPTS).input_ids
    assert read(out)["state_dict"].keys() == read(folder)["state_dict"].keys()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_sizes_that_follow_from_others_are_exported(folder: str, tmp_path: Path, name: str, monkeypatch) -> None:
    """As many heads of keys as of queries, of hidden_size / heads each, where their classes have other defaults."""
    kind, config, options = DECODERS[name]
    heads = {"num_key_value_heads": 4} | ({} if name == "qwen2" else {"head_dim": 6})
    monkeypatch.setitem(DECODERS, name, (kind, lambda **sizes: config(**sizes | heads), options))
    theirs, tokenizer = saved_decoder(folder, name)
    assert command(["export", str(tmp_path / "out"), "-c", folder]) == 0
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert heads.items() <= stated.items() and None not in (stated[key] for key in heads)
    tokens = tokens_of(tokenizer)
    again = kind.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


# Values of both keys, and whether they are refused; Gemma's first release has "gelu" and null.
GEMMA_ACTIVATIONS = [
    ({"hidden_act": "gelu"}, False),
    ({"hidden_act": "gelu", "hidden_activation": None}, False),
    ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, False),
    ({"hidden_act": "gelu_new"}, False),
    ({"hidden_act": "gelu_fast"}, False),
    ({"hidden_act": "gelu_python"}, False),  # exact
    ({"hidden_act": "swish"}, False),
    ({"hidden_act": None}, False),  # removed
    ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, True),
    ({"hidden_act": "relu2"}, True),
    ({"hidden_act": "quick_gelu"}, True),
]


@torch.no_grad()
@pytest.mark.parametrize(("keys", "refused"), GEMMA_ACTIVATIONS)
def test_activations_of_gemma_are_theirs(folder: str, tmp_path: Path, keys: dict, refused: bool) -> None:
    theirs, tokenizer = saved_decoder(folder, "gemma")
    file = Path(folder) / "config.json"
    stated = json.loads(file.read_text()) | keys
    if stated["hidden_act"] is None:
        del stated["hidden_act"]
    file.write_text(json.dumps(stated))
    if refused:
        with pytest.raises(UserError, match="hidden_act"):
            read(folder)
        return
    ours, tokens = load_model(read(folder)), tokens_of(tokenizer)
    truth = type(theirs).from_pretrained(folder).eval()(tokens).logits
    torch.testing.assert_close(ours.head(ours(tokens)), truth, rtol=0, atol=1e-5 * truth.std().item())
    assert command(["export", str(tmp_path / "out"), "-c", folder]) == 0
    again = type(theirs).from_pretrained(tmp_path / "out").eval()(tokens).logits
    torch.testing.assert_close(again, truth, rtol=0, atol=1e-5 * truth.std().item())


@torch.no_grad()
def test_bfloat16_stays_as_it_is_stored(folder: str) -> None:
    theirs, tokenizer = saved_decoder(folder, "llama", dtype=torch.bfloat16)
    loaded = read(folder, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in loaded["state_dict"].values()} == {torch.bfloat16}
    embedding = loaded["state_dict"]["model.token_embed.weight"]
    assert torch.equal(embedding, theirs.model.embed_tokens.weight)
    ours, tokens = load_model(loaded, dtype=torch.bfloat16), tokens_of(tokenizer)
    exact = load_model(read(folder))
    truth = exact.head(exact(tokens))
    errors = [(found.float() - truth).std() for found in (ours.head(ours(tokens)), theirs(tokens).logits)]
    assert errors[0] < 1.5 * errors[1]  # as far from float32 as theirs


def test_a_language_model_of_ours_goes_out_as_llama(folder: str, tmp_path: Path) -> None:
    saved_decoder(folder, "llama")
    loaded = read(folder)
    args = {"max_len": 32, "dim": 24, "depth": 1, "num_heads": 3, "num_kv_heads": 1, "norm": "rms", "bias": False}
    args |= {"activation": "swiglu", "positions": {"name": "RotaryPositions", "args": {"head_dim": 8}}}
    args["vocab_size"] = len(loaded["state_dict"]["model.token_embed.weight"])
    loaded["vlm"] |= {"model": {"name": "Decoder", "args": args}, "max_tokens": 32}
    torch.manual_seed(0)
    ours = rebuild(loaded["vlm"]["model"]).eval()
    loaded["state_dict"] = {f"model.{name}": tensor for name, tensor in ours.state_dict().items()}
    write(tmp_path / "ours.ckpt", loaded)
    assert command(["export", str(tmp_path / "out"), "-c", str(tmp_path / "ours.ckpt")]) == 0
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(args["vocab_size"], (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.head(ours(tokens)), rtol=0, atol=1e-4)
