"""Adapters of a GGUF file, as a user goes: trained on a text, resumed to the bit, evaluated, exported for others."""

import json
import signal

import chats
import pytest
import torch
import transformers
from gguf_files import save_gguf
from hugging import TEXTS
from journey import best, interrupt_at, only_run, results

from vlm.checkpoint.file import read_file
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

GREEDY = ["--greedy", "--max-tokens", "12", "--precision", "fp32", "--format", "jsonl"]
GREEDY += ["--prompt", "a man", "--prompt", "two dogs"]


@pytest.mark.slow
def test_adapters_of_a_file_learn_resume_and_go_out(tmp_path, monkeypatch, capsys) -> None:
    torch.manual_seed(0)
    tokenizer = chats.saved_chat(tmp_path / "chat", "chatml")  # an instruct model's file
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "chat")
    values = {"tokenizer.chat_template": tokenizer.chat_template}
    save_gguf(tmp_path / "small.gguf", model, tokenizer, kind="F16", pre="smollm", values=values)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 8))
    text = [f"data.path={tmp_path / 'text.txt'}", "data=text", "data.max_len=24", "trainer=cpu"]
    given = ["model=pretrained", f"model.path={tmp_path / 'small.gguf'}", "model/adapt=lora", "optim.lr=0.01", *text]
    given += ["data.batch_size=4", "trainer.max_steps=6", "callbacks.checkpoints.every_n_steps=1", "test=false"]
    assert main([*given, f"runs={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patch:
        interrupt_at(3, signal.SIGTERM, patch)
        assert main([*given, f"runs={tmp_path / 'stopped'}"]) == 143
    whole, resumed = (only_run(tmp_path / name) for name in ("whole", "stopped"))
    assert main([f"resume={resumed}"]) == 0
    one, other = (read_file(run / "checkpoints" / "last.ckpt") for run in (whole, resumed))
    assert one["global_step"] == other["global_step"] == 6
    assert all(".lora_" in name for name in one["state_dict"])
    assert all(torch.equal(tensor, other["state_dict"][name]) for name, tensor in one["state_dict"].items())

    own = best(resumed)
    assert vlm(["evaluate", "-c", own, "--out", str(tmp_path / "after")]) == 0
    assert vlm(["evaluate", "-c", str(tmp_path / "small.gguf"), *text, "--out", str(tmp_path / "before")]) == 0
    before, after = (results(tmp_path / name)["val/bits_per_byte"] for name in ("before", "after"))
    assert after < before

    assert vlm(["export", str(tmp_path / "out"), "-c", own]) == 0
    capsys.readouterr()
    assert vlm(["generate", "-c", own, *GREEDY]) == 0
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(written) == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    pieces = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for record in written:
        ids = pieces(record["prompt"], return_tensors="pt").input_ids
        row = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert pieces.decode(row, skip_special_tokens=True) == record["text"]
