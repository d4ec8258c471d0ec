"""Compares tokens a second and memory for a GGUF file: ours, `transformers`, and llama.cpp if it is installed.

    python benchmarks/gguf_speed.py FILE.gguf [--turns 3] [--threads 2] [--prompt 512] [--new 128] [--out FILE.json]

One text is written greedily, without an end token. Ours and `transformers` compute in float32 with the same weights.
`transformers` reads the folder that `vlm export` writes, and runs eagerly and compiled with a static cache, as its
documentation advises. llama.cpp (llama-cpp-python) computes with the file's own blocks. Sides take turns, each in its
own process, which makes the same calls once before they are timed; the best of all turns is shown. The time to write
one token counts as the prompt's, and the additional time for more tokens as that of the new text. Memory is the peak of
the process. `--threads 1 --cpu` measures processor time, for a busy machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm.machine import tune

TEXT = "A man walked along the river in the morning and told his dog about the day that lay before them. "
Write = Callable[[list[int], int], list[int]]  # (tokens of a prompt, count) -> count new tokens


def ours(path: str, folder: str, threads: int) -> Write:
    import torch

    from vlm.decoding.continuation import continue_texts
    from vlm.decoding.sampling import Sampling
    from vlm.tasks.language_modeling.predict import TextGenerator

    torch.set_num_threads(threads)
    generator = TextGenerator(path)
    generator.prepack(1)

    @torch.inference_mode()
    def write(ids: list[int], count: int) -> list[int]:
        plan = Sampling(temperature=0.0)
        steps = continue_texts(generator.model, [ids], sampling=plan, max_tokens=count, eos_id=-1, seed=0)
        return [drawn.token for (drawn,) in steps]

    return write


def transformers(path: str, folder: str, threads: int, *, compiled: bool = False) -> Write:
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if compiled:
        model.generation_config.cache_implementation = "static"
        model.forward = torch.compile(model.forward)

    @torch.inference_mode()
    def write(ids: list[int], count: int) -> list[int]:
        row = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
        return row[0, len(ids) :].tolist()

    return write


def llama_cpp(path: str, folder: str, threads: int) -> Write:
    from llama_cpp import Llama

    model = Llama(path, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def write(ids: list[int], count: int) -> list[int]:
        model.reset()
        new = model.generate(ids, temp=0.0, repeat_penalty=1.0, reset=True)
        return [token for token, _ in zip(new, range(count), strict=False)]

    return write


SIDES: dict[str, Callable[..., Write]] = {
    "ours": ours,
    "transformers": transformers,
    "transformers, compiled": lambda *places: transformers(*places, compiled=True),
    "llama.cpp": llama_cpp,
}


def measure(side: str, path: str, folder: str, threads: int, prompt: list[int], new: int, cpu: bool) -> dict[str, Any]:
    """Returns tokens a second, megabytes, and the new tokens of one side."""
    clock = time.process_time if cpu else time.perf_counter
    tune(single_threaded=True)  # applies to all sides
    write = SIDES[side](path, folder, threads)
    for count in (1, new + 1):  # warms up and compiles for the lengths that are timed
        write(prompt, count)
    start = clock()
    write(prompt, 1)
    first = clock() - start
    tokens = write(prompt, new + 1)
    rest = clock() - start - 2 * first
    status = Path("/proc/self/status").read_text().splitlines()  # rusage would include the parent's peak
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e3
    return {"prompt": len(prompt) / first, "new": new / rest, "megabytes": peak, "tokens": tokens}


def run_in_process(*job: Any) -> dict[str, Any] | None:
    """Runs `measure` in a separate process; returns None if a side cannot run."""
    text = json.dumps(job)
    done = subprocess.run([sys.executable, __file__, "--job", text], capture_output=True, text=True)
    if done.returncode:
        print(f"{job[0]}: left out ({(done.stderr.strip().splitlines() or ['no reason'])[-1]:.150})", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--sides", nargs="+", default=[*SIDES], choices=SIDES)
    for name, default in (("turns", 3), ("threads", 2), ("prompt", 512), ("new", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action="store_true", help="time of the processor: one thread on a busy machine")
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    from vlm.checkpoint.export import export
    from vlm.data.text.hugging_face import read_tokenizer
    from vlm.models.pretrained.load import open_folder

    ids = read_tokenizer(open_folder(options.file)).encode(TEXT * options.prompt)[: options.prompt]
    best: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        export(options.file, folder, form="huggingface")
        sides = [*options.sides]
        for turn in range(options.turns):
            for side in sides[:: 1 if turn % 2 else -1]:
                found = run_in_process(side, options.file, folder, options.threads, ids, options.new, options.cpu)
                if found is None:
                    sides = [one for one in sides if one != side]
                    continue
                print(f"turn {turn + 1}, {side}: {found['prompt']:.1f} and {found['new']:.1f} tokens/s", flush=True)
                known = best.setdefault(side, found)
                for name in ("prompt", "new"):
                    known[name] = max(known[name], found[name])
                known["megabytes"] = min(known["megabytes"], found["megabytes"])
    print(f"\n| | prompt of {options.prompt}, tokens/s | {options.new} new tokens, tokens/s | peak memory, MB |")
    print("|---|---|---|---|")
    for side, found in best.items():
        print(f"| {side} | {found['prompt']:.0f} | {found['new']:.1f} | {found['megabytes']:.0f} |")
    if len(same := [found["tokens"] for side, found in best.items() if side != "llama.cpp"]) > 1:
        print(f"\nours and transformers write the same tokens: {all(one == same[0] for one in same)}")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(best, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
