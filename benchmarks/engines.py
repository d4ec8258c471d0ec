"""Compares tokens a second of language models on a CPU with other inference engines.

    python benchmarks/engines.py [--gguf FILE.gguf] [--sides ...] [--batches 1 8] [--prompts 16 512] [--turns 2]

Without `--gguf` the model is GPT-2 124M with random weights; with it, a file of Llama's family. Sides: ours in float32
and in int8; `transformers`, eager and compiled with a static cache; CTranslate2 (float32, int8), if it is installed;
ONNX Runtime with the files of `vlm export --to onnx` (`--profile DIR` keeps its own profile of each case); and with
`--gguf` llama.cpp through llama-cpp-python, from F16 and Q8_0 files of the same dequantised weights and from the file
itself. Decoding is greedy and has no end token. Sides take turns, each in its own process, which makes the same calls
once before they are timed; the best of all turns counts. "First" is the time of the prompt and one token. Tokens a
second count all texts of the batch, after the first token. Texts are compared with those of `transformers`.

The last column is (bytes of weights that a step reads) x (steps a second) / (memory bandwidth). The bandwidth is the
most that a reader in C, torch's sum, or its matrix-vector product reaches over 512 MB, before and after. If the
processor's cache holds a part of the weights, the column may exceed 1.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_sides import SIDES

from vlm.machine import tune

VOCAB, POSITIONS = 50257, 1024
READER = """
#include <stddef.h>
float sum(const float *x, size_t n) {
    float total = 0;
    #pragma omp parallel for simd reduction(+:total) schedule(static)
    for (size_t i = 0; i < n; i++) total += x[i];
    return total;
}
"""


def random_gpt2(folder: str) -> None:
    """Writes the smallest GPT-2 with random weights, and a tokenizer of the same size, which CTranslate2 needs."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS)).eval()
    model.transformer.wpe.weight.data *= 8  # otherwise a random model repeats one token
    model.save_pretrained(folder)
    words = models.WordLevel({word(id): id for id in range(VOCAB)}, unk_token=word(0))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), bos_token=word(0), eos_token=word(0), unk_token=word(0)
    )
    tokenizer.save_pretrained(folder)


def word(id: int) -> str:
    return f"w{id}"


def draw_prompt(row: int, length: int) -> list[int]:
    """Returns a prompt of words that lie far apart, different for each row."""
    return [(row * 7919 + place * 104729) % 40000 + 100 for place in range(length)]


def measure(name: str, places: dict[str, str], threads: int, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Returns seconds to the first token, tokens a second after it, megabytes, and the new tokens of one side."""
    tune(single_threaded=True)  # applies to all sides
    write = SIDES[name](places, threads, len(prompts))
    for count in (1, new + 1):  # warms up and compiles for the lengths that are timed
        write(prompts, count)
    times: dict[int, float] = {}
    for count in (1, new + 1, 1, new + 1):
        start = time.perf_counter()
        texts = write(prompts, count)
        times[count] = min(times.get(count, float("inf")), time.perf_counter() - start)
    status = Path("/proc/self/status").read_text().splitlines()  # rusage would include the parent's peak
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e3
    rate = len(prompts) * new / (times[new + 1] - times[1])
    return {"first": times[1], "rate": rate, "megabytes": peak, "tokens": texts}


def bandwidth(threads: int) -> float:
    """Returns the highest read bandwidth of this machine in GB/s, from three readers of 512 MB."""
    import torch

    torch.set_num_threads(threads)
    matrix, vector = torch.ones(1 << 14, 1 << 13), torch.ones(1 << 13)
    readers: list[Callable[[], Any]] = [matrix.sum, lambda: matrix @ vector]
    with tempfile.TemporaryDirectory() as folder:
        if compiler := shutil.which("cc"):
            source, library = Path(folder, "sum.c"), Path(folder, "sum.so")
            source.write_text(READER)
            flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
            subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
            in_c = ctypes.CDLL(str(library)).sum
            in_c.argtypes, in_c.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_float
            readers.append(lambda: in_c(matrix.data_ptr(), matrix.numel()))
        best = float("inf")
        for read in readers * 5:
            start = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - start)
    return matrix.numel() * 4 / best / 1e9


def run_in_process(*job: Any) -> Any:
    """Runs `measure` or `bandwidth` in a separate process; returns None if a side cannot run."""
    done = subprocess.run([sys.executable, __file__, "--job", json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        print(f"{job[0]}: left out ({reason:.150})", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def write_formats(path: str | None, folder: Path, sides: Sequence[str]) -> dict[str, str]:
    """Writes the model in the format of each engine; returns paths by format."""
    from vlm.checkpoint.export import export

    places = {"folder": str(folder / "folder")}
    if path is None:
        random_gpt2(places["folder"])
    else:
        export(path, places["folder"], form="huggingface")
        places["gguf"] = path
        for kind in ("F16", "Q8_0"):
            if f"llama.cpp, {kind}" in sides:
                places[kind.lower()] = str(folder / f"{kind}.gguf")
                requantise(path, places[kind.lower()], kind)
    if "ONNX Runtime" in sides:
        places["onnx"] = str(folder / "onnx")
        export(path or places["folder"], places["onnx"], form="onnx")
    if any(name.startswith("CTranslate2") for name in sides):
        from ctranslate2.converters import TransformersConverter

        places["ctranslate2"] = str(folder / "ctranslate2")
        TransformersConverter(places["folder"]).convert(places["ctranslate2"])
    return places


def requantise(source: str, target: str, kind: str) -> None:
    """Rewrites a GGUF file with its matrices dequantised and stored in another type."""
    import gguf
    import numpy as np

    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stored = gguf.quantize(values, wanted) if values.ndim > 1 else values
        writer.add_tensor(tensor.name, stored, raw_dtype=wanted if values.ndim > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def multiplied_weights(folder: str) -> int:
    """Returns the number of weights that a step multiplies: all matrices except embeddings, and the head."""
    from safetensors import safe_open

    with safe_open(Path(folder, "model.safetensors"), "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
    matrices = [size for name, size in sizes.items() if len(size) == 2 and "wpe" not in name and "lm_head" not in name]
    return sum(rows * columns for rows, columns in matrices)  # the head is tied and counted as the token embedding


BYTES = {"int8": 1, "F16": 2, "Q8_0": 34 / 32, "as it is": 20 / 32}  # bytes per weight; the last is that of Q4_1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 512])
    for name, default in (("turns", 2), ("threads", 2), ("new", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    parser.add_argument("--profile", metavar="DIR", help="for ONNX Runtime's own profiles, a file of JSON a case")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sides = options.sides or [name for name in SIDES if options.gguf or not name.startswith("llama.cpp")]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = write_formats(options.gguf, Path(folder), sides) | (
            {"profile": options.profile} if options.profile else {}
        )
        numbers, speed = multiplied_weights(places["folder"]), run_in_process("bandwidth", options.threads)
        for turn in range(options.turns):
            for rows, length in ((rows, length) for rows in options.batches for length in options.prompts):
                prompts = [draw_prompt(row, length) for row in range(rows)]
                case = results.setdefault(f"batch {rows}, prompt {length}", {})
                for name in [name for name in sides if turn == 0 or name in case][:: 1 if turn % 2 else -1]:
                    if (found := run_in_process(name, places, options.threads, prompts, options.new)) is None:
                        continue
                    print(f"turn {turn + 1}, {rows} x {length}, {name}: {found['rate']:.1f} tokens/s", flush=True)
                    best = case.setdefault(name, found)
                    best["rate"], best["first"] = max(best["rate"], found["rate"]), min(best["first"], found["first"])
        speed = max(speed, run_in_process("bandwidth", options.threads))
    print_table(results, numbers, speed)
    if options.out:
        Path(options.out).write_text(json.dumps({"bandwidth": speed, "cases": results}, indent=1))


def print_table(results: dict[str, dict[str, Any]], numbers: int, speed: float) -> None:
    print(f"\nbandwidth {speed:.1f} GB/s\n")
    print("| | | first, s | tokens/s | memory, MB | texts as transformers' | of the bandwidth |")
    print("|---|---|---|---|---|---|---|")
    for case, found in results.items():
        rows = int(case.split()[1].strip(","))
        truth = found.get("transformers", {"tokens": []})["tokens"]
        for name, one in sorted(found.items(), key=lambda item: -item[1]["rate"]):
            same = sum(a == b for a, b in zip(one["tokens"], truth, strict=False))
            size = numbers * BYTES.get(name.split(", ")[-1], 4)
            share = one["rate"] / rows * size / speed / 1e9
            line = f"| {case} | {name} | {one['first']:.3f} | {one['rate']:.1f} | {one['megabytes']:.0f} "
            print(f"{line}| {same} of {rows} | {share:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        name, *job = json.loads(sys.argv[2])
        print(json.dumps(bandwidth(*job) if name == "bandwidth" else measure(name, *job)))
    else:
        main()
