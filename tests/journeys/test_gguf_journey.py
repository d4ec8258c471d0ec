"""Adapters of a GGUF file, as a user goes: trained on a text, resumed to the bit, evaluated, exported for others."""

import json
import os
import signal
from pathlib import Path

import chats
import pytest
import torch
import transformers
from gguf_files import save_gguf
from hugging import TEXTS
from journey import results

from vlm.checkpoint.file import read_file
from vlm.cli.main import run as vlm
from vlm.training.callbacks.first_batch import ShowFirstBatch
from vlm.training.run.fit import main

GREEDY = ["--greedy", "--max-tokens", "12", "--precision", "fp32", "--format", "jsonl"]
GREEDY += ["--prompt", "a man", "--prompt", "two dogs"]


def trained(folder: Path, monkeypatch, *, stopped: bool = False) -> Path:
    """The folder of a run of six steps, which may be stopped in its fourth and go on."""

    def stop(audit, trainer, *args):
        if stopped and trainer.global_step == 3 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    sent: list = []
    data = ["data=text", f"data.path={folder / 'text.txt'}", "data.max_len=24", "data.batch_size=4"]
    steps = ["trainer=cpu", "trainer.max_steps=6", "callbacks.checkpoints.every_n_steps=1", "test=false"]
    model = ["model=pretrained", f"model.path={folder / 'small.gguf'}", "model/adapt=lora", "optim.lr=0.01"]
    runs = folder / f"runs_{stopped}"
    with monkeypatch.context() as patch:
        patch.setattr(ShowFirstBatch, "on_train_batch_start", stop)
        assert main([*model, *data, *steps, f"runs={runs}"]) == (143 if stopped else 0)
    run = next(runs.glob("*/20*"))
    assert not stopped or main([f"resume={run}"]) == 0
    return run


@pytest.mark.slow
def test_adapters_of_a_file_learn_resume_and_go_out(tmp_path, monkeypatch, capsys) -> None:
    torch.manual_seed(0)
    tokenizer = chats.saved_chat(tmp_path / "chat", "chatml")  # an instruct model's file
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "chat")
    values = {"tokenizer.chat_template": tokenizer.chat_template}
    save_gguf(tmp_path / "small.gguf", model, tokenizer, kind="F16", pre="smollm", values=values)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 8))
    whole, resumed = (trained(tmp_path, monkeypatch, stopped=stopped) for stopped in (False, True))
    one, other = (read_file(run / "checkpoints" / "last.ckpt") for run in (whole, resumed))
    assert one["global_step"] == other["global_step"] == 6
    assert all(".lora_" in name for name in one["state_dict"])
    assert all(torch.equal(tensor, other["state_dict"][name]) for name, tensor in one["state_dict"].items())

    best = str(resumed / "checkpoints" / "best.ckpt")
    assert vlm(["evaluate", "-c", best, "--out", str(tmp_path / "after")]) == 0
    same = ["data=text", f"data.path={tmp_path / 'text.txt'}", "data.max_len=24", "trainer=cpu"]
    assert vlm(["evaluate", "-c", str(tmp_path / "small.gguf"), *same, "--out", str(tmp_path / "before")]) == 0
    before, after = (results(tmp_path / name)["val/bits_per_byte"] for name in ("before", "after"))
    assert after < before

    assert vlm(["export", str(tmp_path / "out"), "-c", best]) == 0
    capsys.readouterr()
    assert vlm(["generate", "-c", best, *GREEDY]) == 0
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(written) == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    pieces = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for record in written:
        ids = pieces(record["prompt"], return_tensors="pt").input_ids
        row = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert pieces.decode(row, skip_special_tokens=True) == record["text"]
