"""Compares lmms-eval on `vlm serve` with `vlm evaluate`: questions about 20 images, with a small random SmolVLM.

    python benchmarks/references/image_harness.py FOLDER PYTHON

It runs in the environment of vlm with its `test` extra, writes the model, the images and a task to FOLDER, and runs
lmms-eval with PYTHON, which is of another environment. `lmms_eval.sh` runs it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
IMAGES = 20
QUESTIONS = ("what is it?", "where is it?", "what colour?", "how many?", "who is it?")
TOKENS = 12  # of an answer
TASK = """
task: local_questions
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_visual: !function functions.find_images
doc_to_text: !function functions.find_question
doc_to_target: answer
generation_kwargs: {max_new_tokens: TOKENS, temperature: 0}
process_results: !function functions.score
metric_list: [{metric: accuracy, aggregation: mean, higher_is_better: true}]
metadata: [{version: 1.0}]
"""
FUNCTIONS = """
from PIL import Image


def find_images(record):
    return [Image.open(record["path"]).convert("RGB")]


def find_question(record):
    return record["question"]


def score(record, answers):
    return {"accuracy": float(answers[0].strip() == record["answer"])}
"""


def prepare(folder: Path) -> list[dict[str, str]]:
    """Writes the model and the images; returns the records of the questions."""
    import torch
    from hugging import photos
    from image_text import saved_image_text

    torch.manual_seed(5)
    saved_image_text(folder / "model", "smolvlm")
    (folder / "photos").mkdir()
    paths = [Path(path) for part in "ab" for path in photos(folder / "photos" / part, IMAGES // 2)]
    others = [Path(path) for path in photos(folder / "photos" / "c", 2)]
    records = []
    for number, path in enumerate([*paths, *others]):
        split = "test" if number < IMAGES else ("train", "val")[number - IMAGES]
        image, question = str(path.relative_to(folder / "photos")), QUESTIONS[number % len(QUESTIONS)]
        records.append({"image": image, "path": str(path), "question": question, "answer": "a", "split": split})
    return records


def evaluate(folder: Path, records: list[dict[str, str]], out: Path) -> tuple[list[str], float]:
    """Returns the answers of `vlm evaluate`, and its accuracy."""
    table = folder / "questions.jsonl"
    known = ("image", "question", "answer", "split")
    table.write_text("\n".join(json.dumps({name: record[name] for name in known}) for record in records))
    command = [sys.executable, "-m", "vlm", "evaluate", "-c", str(folder / "model"), "task=image_questions"]
    command += ["data=questions", f"data.root={folder / 'photos'}", f"data.path={table}", f"task.max_tokens={TOKENS}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--out", str(out)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    details = json.loads((out / "details.json").read_text())["questions"]
    by_image = {row["image_id"]: row["predicted"] for row in details}
    return [by_image[record["image"]] for record in records[:IMAGES]], json.loads((out / "metrics.json").read_text())[
        "test/accuracy"
    ]


def harness(folder: Path, python: str, port: int) -> tuple[list[str], float]:
    """Returns the answers that lmms-eval got from a service, and its accuracy."""
    tasks, out = folder / "tasks", folder / "out"
    environment: dict[str, Any] = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    environment |= {"OPENAI_API_BASE": f"http://127.0.0.1:{port}/v1", "HF_HOME": str(folder / "cache")}
    model = f"model_version=model,base_url=http://127.0.0.1:{port}/v1,api_key=none"
    command = [python, "-m", "lmms_eval", "--model", "openai_compatible", "--model_args", model]
    command += ["--tasks", "local_questions", "--include_path", str(tasks), "--batch_size", "4"]
    command += ["--log_samples", "--output_path", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    found = [*out.rglob("*samples_local_questions.jsonl")]
    if not found:  # lmms-eval ends with status 0 after an error
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    (samples,) = found
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    (results,) = out.rglob("*results.json")
    scores = json.loads(results.read_text())["results"]["local_questions"]
    accuracy = next(value for name, value in scores.items() if name.startswith("accuracy,"))
    return [str(row["filtered_resps"]).strip() for row in rows], float(accuracy)


def main(folder: Path, python: str) -> int:
    from serving_load import run_service

    records = prepare(folder)
    answers, _ = evaluate(folder, records, folder / "first")
    for record, answer in zip(records[:IMAGES:2], answers[::2], strict=True):
        record["answer"] = answer  # half of the answers are right
    answers, accuracy = evaluate(folder, records, folder / "scores")
    (folder / "tasks").mkdir()
    data = folder / "test.jsonl"
    data.write_text("\n".join(map(json.dumps, records[:IMAGES])))
    task = TASK.replace("DATA", str(data)).replace("TOKENS", str(TOKENS))
    (folder / "tasks" / "local_questions.yaml").write_text(task)
    (folder / "tasks" / "functions.py").write_text(FUNCTIONS)
    with run_service(folder / "model", "--precision", "fp32") as (port, _):
        theirs, score = harness(folder, python, port)
    equal = sum(ours == other for ours, other in zip(answers, theirs, strict=True))
    print(f"{equal} of {IMAGES} answers are those of vlm evaluate, {len({*theirs})} different ones")
    print(f"accuracy {score:.3f} with lmms-eval, {accuracy:.3f} with vlm evaluate", flush=True)
    return int(equal < IMAGES or score != accuracy)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
