"""The engines that `engines.py` times: each function loads a model and returns a function that writes texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[[list[list[int]], int], list[list[int]]]  # (prompts of equal length, new tokens) -> new tokens of each


def ours(places: dict[str, str], threads: int, rows: int, *, int8: bool = False) -> Write:
    import torch

    from vlm.decoding.continuation import continue_texts
    from vlm.decoding.sampling import Sampling
    from vlm.tasks.language_modeling.predict import TextGenerator

    torch.set_num_threads(threads)
    generator = TextGenerator(places.get("gguf") or places["folder"], int8=int8)
    generator.prepack(rows)
    model = generator.model

    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        plan = Sampling(temperature=0.0)
        for step in continue_texts(model, prompts, sampling=plan, max_tokens=count, eos_id=-1, seed=0):
            for drawn in step:
                texts[drawn.prompt].append(drawn.token)
        return texts

    return write


def transformers(places: dict[str, str], threads: int, rows: int, *, compiled: bool = False) -> Write:
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(places["folder"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if compiled:
        model.generation_config.cache_implementation = "static"
        model.forward = torch.compile(model.forward)

    @torch.inference_mode()
    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        seen = torch.ones(len(prompts), len(prompts[0]), dtype=torch.long)
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": seen}
        return model.generate(torch.tensor(prompts), max_new_tokens=count, **options)[:, len(prompts[0]) :].tolist()

    return write


def ctranslate2(places: dict[str, str], threads: int, rows: int, *, kind: str) -> Write:
    import ctranslate2

    folder = places["ctranslate2"]
    generator = ctranslate2.Generator(folder, compute_type=kind, intra_threads=threads, inter_threads=1)
    words: list[str] = json.loads(Path(folder, "vocabulary.json").read_text())

    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        options: dict[str, Any] = {"max_length": count, "min_length": count, "include_prompt_in_result": False}
        spoken = [[words[id] for id in prompt] for prompt in prompts]
        found = generator.generate_batch(spoken, beam_size=1, sampling_topk=1, end_token=[], **options)
        return [one.sequences_ids[0] for one in found]

    return write


def onnx_runtime(places: dict[str, str], threads: int, rows: int) -> Write:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if "profile" in places:
        options.enable_profiling, options.profile_file_prefix = True, str(Path(places["profile"], f"{rows}-rows"))
    session = onnxruntime.InferenceSession(str(Path(places["onnx"], "step.onnx")), options)
    return lambda prompts, count: onnx_texts(session, session.io_binding(), np.array(prompts), count)


def onnx_texts(session: Any, binding: Any, tokens: Any, count: int) -> list[list[int]]:
    """Returns greedy texts from a decode step that `vlm export --to onnx` wrote; caches stay in the runtime.

    Args:
        binding: IO binding of the session, with the context bound if the step reads one.
        tokens: Prompts, an array of integers.
        count: New tokens of each text.
    Shapes:
        tokens (rows, length)
    """
    import numpy as np

    rows, new = len(tokens), []
    past = [port for port in session.get_inputs() if port.name.startswith("past")]
    outputs = [port.name for port in session.get_outputs()]
    binding.bind_cpu_input("starts", np.zeros(rows, np.int64))
    for port in past:
        binding.bind_cpu_input(port.name, np.zeros((rows, port.shape[1], 0, port.shape[3]), np.float32))
    for _ in range(count):
        binding.bind_cpu_input("tokens", tokens)
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        logits, *caches = binding.get_outputs()
        for port, cache in zip(past, caches, strict=True):
            binding.bind_ortvalue_input(port.name, cache)
        tokens = logits.numpy().argmax(1)[:, None]
        new.append(tokens)
    return np.concatenate(new, axis=1).tolist()


def llama_cpp(places: dict[str, str], threads: int, rows: int, *, kind: str) -> Write:
    from llama_cpp import Llama

    if rows > 1:
        raise ValueError("llama-cpp-python writes one text at a time")
    sizes: dict[str, Any] = {"n_ctx": 2048, "n_batch": 512, "n_threads": threads, "n_threads_batch": threads}
    model = Llama(places[kind], verbose=False, **sizes)

    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        model.reset()
        new = model.generate(prompts[0], temp=0.0, repeat_penalty=1.0, reset=True)
        return [[token for token, _ in zip(new, range(count), strict=False)]]

    return write


def side(work: Callable[..., Write], **options: Any) -> Callable[..., Write]:
    return lambda *about: work(*about, **options)


SIDES: dict[str, Callable[..., Write]] = {
    "ours": ours,
    "ours, int8": side(ours, int8=True),
    "transformers": transformers,
    "transformers, compiled": side(transformers, compiled=True),
    "CTranslate2": side(ctranslate2, kind="float32"),
    "CTranslate2, int8": side(ctranslate2, kind="int8"),
    "ONNX Runtime": onnx_runtime,
    "llama.cpp, F16": side(llama_cpp, kind="f16"),
    "llama.cpp, Q8_0": side(llama_cpp, kind="q8_0"),
    "llama.cpp, as it is": side(llama_cpp, kind="gguf"),
}
