"""Compares lm-eval on `vlm serve` with its hf backend: three tasks and a conversation on a small random model.

`prepare FOLDER` makes a model in Hugging Face's format, and task files with their data. `compare FOLDER LM_EVAL` runs
both backends of a command `lm_eval`, which is in an environment of its own, and compares every example. Both run in the
environment of vlm with its `test` extra. `lm_eval.sh` runs both.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
EXAMPLES = 24  # of each task
WINDOW = 256  # tokens
TOLERANCE = 2e-3  # largest difference of a sum of log-probabilities, of hundreds of tokens in float32
PHRASE = "a man in the red shirt climbs a rock and two dogs run over green grass while children play in blue water"
TASKS: dict[str, dict[str, Any]] = {
    "local_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["e", "zz"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        # A conversation's answer has no white space at its beginning.
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
}


def prepare(folder: Path) -> None:
    """Writes the model, the task files and their data."""
    import torch
    from chats import saved_chat

    torch.manual_seed(5)
    saved_chat(folder / "model", "chatml", room=WINDOW)
    (folder / "tasks").mkdir()
    dice, words = random.Random(0), PHRASE.split()

    def phrase(least: int, most: int) -> str:
        return " ".join(dice.choices(words, k=dice.randint(least, most)))

    for name, task in TASKS.items():
        records = []
        for _ in range(EXAMPLES):
            longest = 300 if name == "local_perplexity" else 12  # texts beyond the window too
            choices = [f" {phrase(1, 4)}" for _ in range(3)]
            record = {
                "text": phrase(2, longest),
                "choices": choices,
                "label": dice.randrange(3),
                "target": phrase(1, 3),
            }
            records.append(json.dumps(record))
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(records))
        content = {"task": name, "dataset_path": "json", "test_split": "test", **task, "metadata": {"version": 1.0}}
        content["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(content, indent=2))


def run(lm_eval: str, folder: Path, tasks: list[str], backend: str, arguments: dict[str, Any], *more: str) -> Path:
    """Runs lm-eval; returns the folder with the samples."""
    out = folder / "out" / "_".join([backend, *tasks, *(option.strip("-") for option in more)])
    command = [lm_eval, "run", "--model", backend, "--include_path", str(folder / "tasks"), "--tasks", *tasks]
    command += ["--model_args", *(f"{name}={value}" for name, value in arguments.items())]
    command += ["--output_path", str(out), "--log_samples", *more]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return out


def read_samples(out: Path, task: str) -> Iterator[dict[str, Any]]:
    """Yields the samples of a task in their order."""
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    yield from sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def differs(ours: Any, theirs: Any) -> bool:
    """Whether two results of an example differ by more than rounding."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) != len(theirs) or any(map(differs, ours, theirs))
    try:
        return abs(float(ours) - float(theirs)) > TOLERANCE
    except (TypeError, ValueError):
        return str(ours) != str(theirs)


def compare(folder: Path, lm_eval: str) -> int:
    """Prints how many examples of each task are equal; returns 1 if any differs."""
    from serving_load import run_service

    failures = 0
    likelihoods, generation = ["local_choices", "local_perplexity"], ["local_generation"]
    model = folder / "model"
    with run_service(model, "--precision", "fp32") as (port, _):
        base, common = f"http://127.0.0.1:{port}/v1", {"model": "model", "tokenizer_backend": "huggingface"}
        common |= {"tokenizer": str(model), "max_length": WINDOW, "num_concurrent": 4}
        # Of a service's window, lm-eval leaves two tokens unused when it splits long texts.
        hf, cpu = {"pretrained": str(model), "dtype": "float32", "max_length": WINDOW - 2}, ("--device", "cpu")
        completions = {**common, "base_url": f"{base}/completions"}
        chat, template = {**common, "base_url": f"{base}/chat/completions"}, "--apply_chat_template"
        runs = [
            ("local-completions", likelihoods, completions, ("--batch_size", "4"), ()),
            ("local-completions", generation, completions, ("--batch_size", "4"), ()),
            ("local-chat-completions", generation, chat, (template,), (template,)),
        ]
        for backend, tasks, arguments, ours_more, theirs_more in runs:
            ours = run(lm_eval, folder, tasks, backend, arguments, *ours_more)
            theirs = run(lm_eval, folder, tasks, "hf", hf, *cpu, *theirs_more)
            for task in tasks:
                pairs = list(zip(read_samples(ours, task), read_samples(theirs, task), strict=True))
                equal = sum(not differs(a["filtered_resps"], b["filtered_resps"]) for a, b in pairs)
                kinds = len({str(a["filtered_resps"]) for a, _ in pairs})
                print(
                    f"{backend} {task}: {equal} of {len(pairs)} examples as hf, {kinds} different results", flush=True
                )
                failures += equal < len(pairs) or kinds < len(pairs) // 2
                for a, b in pairs:
                    if differs(a["filtered_resps"], b["filtered_resps"]):
                        print(f"  {a['doc_id']}: {a['filtered_resps']!r:.200} is not {b['filtered_resps']!r:.200}")
                        break
    return min(failures, 1)


if __name__ == "__main__":
    action, place, *rest = sys.argv[1:]
    sys.exit(prepare(Path(place)) if action == "prepare" else compare(Path(place), *rest))
