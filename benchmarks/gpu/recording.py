"""Records a decode step while another thread pins memory, as a validation in the middle of training does.

    python benchmarks/gpu/recording.py [--mode global] [--models 20]

In mode `global`, torch's default, recording fails whenever any thread waits for the device. The package, and this
script without --mode, records in mode `thread_local`. Prints how many steps were not recorded, an error of the other
thread, and whether the device's random number generator still works.
"""

import argparse
import threading

import torch
from device import require_gpu

from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.nn.step.replay import Stepper


class Pinning(threading.Thread):
    """Pins pieces of memory of growing size until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop, self.fault = threading.Event(), "none"

    def run(self) -> None:
        size = 2**20
        while not self.stop.is_set():
            try:
                torch.empty(size, dtype=torch.uint8).pin_memory()
            except RuntimeError as fault:
                self.fault = str(fault).splitlines()[0]
                return
            size = size + 2**20 if size < 2**28 else 2**20


def force_mode(mode: str) -> None:
    """Makes torch.cuda.graph record in this mode."""
    graph = torch.cuda.graph
    torch.cuda.graph = lambda recorded, **_: graph(recorded, capture_error_mode=mode)  # type: ignore[assignment, misc]


@torch.inference_mode()
def count_unrecorded(models: int) -> int:
    """Returns how many of this many decoders could not be recorded."""
    decoder = Decoder(vocab_size=8000, max_len=40, dim=256, depth=6, num_heads=4, context_dim=256).cuda().eval()
    failed = 0
    for _ in range(models):
        context = Context(torch.randn(8, 64, 256, device="cuda"))
        stepper = Stepper(decoder, decoder.start(context, rows=8, max_len=40))
        for _ in range(8):
            stepper.logits(torch.ones(8, 1, dtype=torch.long, device="cuda"))
        failed += stepper._graph is None
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("global", "thread_local", "relaxed"))
    parser.add_argument("--models", type=int, default=20)
    args = parser.parse_args()
    require_gpu()
    if args.mode:
        force_mode(args.mode)
    torch.zeros(1, device="cuda")
    other = Pinning()
    other.start()
    try:
        print(f"{count_unrecorded(args.models)} of {args.models} not recorded")
    except RuntimeError as fault:
        print(f"this thread: {str(fault).splitlines()[0]}")
    finally:
        other.stop.set()
        other.join()
    print(f"fault of the other thread: {other.fault}")
    print(f"the stream is the default one: {torch.cuda.current_stream() == torch.cuda.default_stream()}")
    try:
        kept = torch.nn.functional.dropout(torch.ones(10_000, device="cuda"), 0.5).mean()
        print(f"dropout afterwards: mean {kept:.3f}, where it should be near 1")
    except RuntimeError as fault:
        print(f"dropout afterwards: {str(fault).splitlines()[0]}")


if __name__ == "__main__":
    main()
