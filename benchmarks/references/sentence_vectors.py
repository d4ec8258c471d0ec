"""Compares `/v1/embeddings` of `vlm serve` with sentence-transformers, on small random models that it saves itself.

    PYTHONPATH=PACKAGES python benchmarks/references/sentence_vectors.py FOLDER

It runs in the environment of vlm with its `test` extra, and with sentence-transformers, and writes the models to
FOLDER. `sentence_transformers.sh` runs it.
"""

import base64
import json
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
TOLERANCE = 1e-5
WORDS = "a man in the red shirt climbs a rock and two dogs don't run over green grass, while children play!"
TEXTS = [" ".join(WORDS.split()[place // 2 :][: 1 + 7 * place % 15]) for place in range(19)] + [""]


def save_model(folder: Path, pooling: str, *, normalize: bool) -> np.ndarray:
    """Saves a random BERT as sentence-transformers does; returns the vectors of the texts."""
    import torch
    from hugging import saved_bert
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(4)
    saved_bert(folder / "bert", BertModel)
    encoder = Transformer(str(folder / "bert"))
    modules = [encoder, Pooling(encoder.get_embedding_dimension(), pooling_mode=pooling)]
    model = SentenceTransformer(modules=[*modules, Normalize()] if normalize else modules, device="cpu")
    model.save(str(folder / "saved"))
    return SentenceTransformer(str(folder / "saved"), device="cpu").encode(TEXTS, batch_size=8)


def request_vectors(port: int, encoding: str) -> np.ndarray:
    """Returns the vectors of the texts by the service."""
    http = HTTPConnection("127.0.0.1", port)
    body = json.dumps({"input": TEXTS, "encoding_format": encoding})
    http.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    vectors: list[Any] = [item["embedding"] for item in json.loads(http.getresponse().read())["data"]]
    if encoding == "base64":
        return np.stack([np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors])
    return np.array(vectors, np.float32)


def main(work: Path) -> int:
    from serving_load import run_service

    failures = 0
    for pooling in ("mean", "cls"):
        for normalize in (True, False):
            folder = work / f"{pooling}_{normalize}"
            truth = save_model(folder, pooling, normalize=normalize)
            with run_service(folder / "saved", "--precision", "fp32") as (port, _):
                vectors, decoded = request_vectors(port, "float"), request_vectors(port, "base64")
            largest, equal = float(np.abs(vectors - truth).max()), bool((vectors == decoded).all())
            spread, norms = float(truth.std(0).mean()), np.linalg.norm(truth, axis=1)
            print(
                f"{pooling}, {'normalized' if normalize else 'not normalized'}: {len(TEXTS)} texts, largest difference "
                f"{largest:.1e}, standard deviation {spread:.1e}, norms {norms.min():.2f} to {norms.max():.2f}, "
                f"base64 {'equals' if equal else 'differs from'} float",
                flush=True,
            )
            failures += largest > TOLERANCE or not equal
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
