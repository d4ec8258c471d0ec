"""Compares exported GGUF files with llama.cpp: greedy tokens and texts, logits, and embeddings of images.

`prepare FOLDER` runs in the environment of vlm with its `test` extra: it makes small random models and exports them.
`compare FOLDER FIXTURE` runs in an environment with llama-cpp-python and needs neither vlm nor torch: it runs the files
and writes what llama.cpp computes to a fixture, which tests read. `llama_cpp.sh` runs both.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 16  # generated tokens
TIE = 1e-2  # largest difference of the two best logits at which F16 and Q8_0 may choose the other token
# Results with Q8_0 are compared with vlm's of the same file, and with these if the inputs of matrices are rounded to
# 8 bits and GELU to 16, as llama.cpp does.
OUTTYPES = ("f32", "f16", "q8_0")


def prepare(folder: Path) -> None:
    """Writes models in Hugging Face's format, GGUF files, and what vlm computes with the former."""
    sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]
    import llama_cpp_models

    for name in llama_cpp_models.NAMES:
        is_image_model = name in llama_cpp_models.IMAGE_MODELS
        outtypes = OUTTYPES[:2] if is_image_model else OUTTYPES
        llama_cpp_models.prepare(name, folder / name, outtypes=outtypes)
        print(f"prepared {name}", flush=True)


class Runner:
    """A GGUF file in llama.cpp, on one thread."""

    def __init__(self, model: Path, projector: Path | None = None) -> None:
        import llama_cpp

        self.library = llama_cpp
        self.llama = llama_cpp.Llama(
            str(model),
            n_ctx=512,
            n_batch=512,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            verbose=False,
            type_k=0,
            type_v=0,
            flash_attn=False,  # keys and values in float32
        )
        self.context: Any = None
        if projector is not None:
            from llama_cpp import mtmd_cpp

            self.mtmd = mtmd_cpp
            options = mtmd_cpp.mtmd_context_params_default()
            options.use_gpu, options.n_threads, options.print_timings, options.warmup = False, 1, False, False
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self.context = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), self.llama.model, options)
            if self.context is None:
                raise SystemExit(f"{projector}: mtmd cannot load it")

    def encode(self, text: str) -> list[int]:
        return self.llama.tokenize(text.encode(), add_bos=True, special=True)

    def decode(self, tokens: list[int]) -> str:
        return self.llama.detokenize(tokens).decode("utf-8", "replace")

    def generate(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Returns the greedy tokens after a prompt, and the difference of the two best logits at each."""
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        self.llama.eval(tokens)
        return self.continue_greedily()

    def continue_greedily(self) -> tuple[list[int], list[float]]:
        generated: list[int] = []
        gaps: list[float] = []
        for _ in range(LENGTH):
            logits = np.ctypeslib.as_array(self.llama._ctx.get_logits_ith(-1), (self.llama.n_vocab(),)).copy()
            best = np.sort(logits)[-2:]
            generated.append(int(logits.argmax()))
            gaps.append(float(best[1] - best[0]))
            if self.library.llama_vocab_is_eog(self.llama._model.vocab, generated[-1]):
                break
            self.llama.eval([generated[-1]])
        return generated, gaps

    def last_logits(self, tokens: list[int]) -> np.ndarray:
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        self.llama.eval(tokens)
        return np.ctypeslib.as_array(self.llama._ctx.get_logits_ith(-1), (self.llama.n_vocab(),)).copy()

    def read_image(self, prompt: str, image: np.ndarray) -> tuple[list[Any], np.ndarray]:
        """Returns a prompt's chunks, tokens or the number of an image's states, and the states of all images."""
        mtmd = self.mtmd
        pixels = np.ascontiguousarray(image, np.uint8)
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], data)
        text = mtmd.mtmd_input_text()
        content = prompt.replace("<image>", mtmd.mtmd_default_marker().decode()).encode()
        text.text, text.text_len, text.add_special, text.parse_special = content, len(content), True, True
        chunks = mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if status := mtmd.mtmd_tokenize(self.context, chunks, ctypes.byref(text), bitmaps, 1):
            raise SystemExit(f"mtmd_tokenize: status {status}")
        parts: list[Any] = []
        states = []
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        for number in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, number)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                count = ctypes.c_size_t()
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                parts.append([tokens[place] for place in range(count.value)])
                self.llama.eval(parts[-1])
                continue
            count_of_states = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            parts.append(count_of_states)
            mtmd.mtmd_encode_chunk(self.context, chunk)
            width = self.llama.n_embd()
            states.append(
                np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self.context), (count_of_states, width)).copy()
            )
            place = self.library.llama_pos(0)
            mtmd.mtmd_helper_eval_chunk_single(
                self.context,
                self.llama._ctx.ctx,
                chunk,
                self.library.llama_pos(self.llama.n_tokens),
                self.library.llama_seq_id(0),
                self.llama.n_batch,
                True,
                ctypes.byref(place),
            )
            self.llama.n_tokens = place.value
        return parts, np.concatenate(states)


def is_tie(tokens: list[int], gaps: list[float], expected: list[int]) -> bool:
    """Returns whether the two best logits are close at the first token that differs."""
    pairs = enumerate(zip(tokens, expected, strict=False))
    place = next((place for place, (found, wanted) in pairs if found != wanted), None)
    return place is not None and gaps[place] < TIE


def compare_texts(expected: dict[str, Any], runner: Runner, outtype: str) -> dict[str, Any]:
    """Prints how many tokens and texts agree; returns what llama.cpp computes."""
    found: dict[str, Any] = {"prompts": [], "generated": []}
    same_ids = same = texts = ties = 0
    keys = ("texts", "prompts", "generated", "decoded")
    for prompt, ids, generated, text in zip(*(expected[key] for key in keys), strict=True):
        encoded = runner.encode(prompt)
        tokens, gaps = runner.generate(ids)
        found["prompts"].append(encoded)
        found["generated"].append(tokens)
        same_ids += encoded == ids
        same += tokens == generated
        texts += runner.decode(ids + tokens) == text
        ties += is_tie(tokens, gaps, generated)
    lines = sum(runner.encode(line) == ids for line, ids in expected["lines"])
    logits = runner.last_logits(expected["prompts"][0])
    difference = float(np.abs(logits - np.array(expected["logits"])).max())
    count = len(expected["texts"])
    print(
        f"  {outtype}: prompts with the same ids {same_ids}/{count}, other texts {lines}/{len(expected['lines'])}, "
        f"same greedy ids {same}/{count} "
        f"(others tied within {TIE:g}: {ties}), same texts {texts}/{count}, logits differ by at most {difference:.1e} "
        f"(deviation {np.std(expected['logits']):.2f})",
        flush=True,
    )
    found["logits"] = [round(float(value), 4) for value in logits[:16]]
    return found


def compare_images(expected: dict[str, Any], folder: Path, runner: Runner, outtype: str) -> dict[str, Any]:
    """The same for prompts with an image, and for the image's states."""
    images, states = np.load(folder / "images.npy"), np.load(folder / "states.npy")
    found: dict[str, Any] = {"generated": [], "states": []}
    read: list[np.ndarray] = []
    same = ties = 0
    for prompt, image, generated in zip(expected["prompts"], images, expected["generated"], strict=True):
        parts, embedded = runner.read_image(prompt, image)
        tokens, gaps = runner.continue_greedily()
        read.append(embedded)
        found["generated"].append(tokens)
        found["states"].append([round(float(value), 4) for value in embedded[0, :8]])
        same += tokens == generated
        ties += is_tie(tokens, gaps, generated)
    found["parts"] = parts
    print(
        f"  {outtype}: images with the same greedy ids {same}/{len(images)} (others tied within {TIE:g}: {ties}), "
        f"states differ by at most {np.abs(np.stack(read) - states).max():.1e} (deviation {states.std():.2f})",
        flush=True,
    )
    if (other := folder / "appended_states.npy").exists():
        difference = np.abs(np.stack(read) - np.load(other)).max()
        print(f"  {outtype}: with the class token after the patches, states differ by at most {difference:.1e}")
    return found


def compare(folder: Path, fixture: Path) -> None:
    """Runs all prepared files, prints how they agree, and writes the fixture."""
    import llama_cpp

    print(f"llama-cpp-python {llama_cpp.__version__}", flush=True)
    fixtures: dict[str, Any] = {"llama_cpp_python": llama_cpp.__version__}
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        expected = json.loads((place / "expected.json").read_text())
        print(f"{place.name}:", flush=True)
        entry: dict[str, Any] = {"digest": expected["digest"]}
        for outtype in (name for name in OUTTYPES if (place / name).exists()):
            projector = place / outtype / f"mmproj-model-{outtype.upper()}.gguf"
            runner = Runner(
                place / outtype / f"model-{outtype.upper()}.gguf", projector if projector.exists() else None
            )
            text = expected.get(outtype, expected.get("text"))
            found = {} if text is None else {"texts": compare_texts(text, runner, outtype)}
            if outtype == "q8_0":
                compare_texts(expected["q8_0 computed as llama.cpp does"], runner, "q8_0 with its rounding")
            if "image" in expected:
                found["images"] = compare_images(expected["image"], place, runner, outtype)
            if outtype == "f32":
                entry |= found
            elif outtype == "q8_0":
                entry["q8_0"] = {name: found["texts"][name] for name in ("generated", "logits")}
        fixtures[place.name] = entry
    fixture.write_text(json.dumps(fixtures, separators=(",", ":")).replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
