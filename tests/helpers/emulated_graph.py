"""CUDA graphs emulated on a CPU: what a decode step launches is recorded once, and replayed as it was recorded."""

import contextlib
from collections import Counter
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from waits import wait_of


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Records operations with their arguments; memory that was there before is put back as it was at the end."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.saved, self.new = graph, {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if wait_of(func, args) is not None:
            raise RuntimeError(f"capture: illegal {func}")
        for tensor in written_tensors(func, args, kwargs):
            if place(tensor) not in self.saved and place(tensor) not in self.new:
                self.saved[place(tensor)] = (tensor.untyped_storage(), tensor.untyped_storage().clone())
        out = func(*args, **kwargs)
        read = {place(tensor) for tensor in tensors_of((args, kwargs))}
        fresh = bool(tensors_of(out)) and all(place(tensor) not in read for tensor in tensors_of(out))
        if fresh:
            self.new |= {place(tensor) for tensor in tensors_of(out)}
        self.graph.launches.append((func, args, kwargs, out, fresh))
        return out


def written_tensors(func, args, kwargs):
    """The tensors that an operation writes to, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_of(args[index] if index < len(args) else kwargs.get(argument.name))


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    counts: ClassVar[Counter] = Counter()

    def __init__(self):
        self.launches = []

    def replay(self):
        self.counts["replays"] += 1
        for func, args, kwargs, out, fresh in self.launches:
            again = func(*args, **kwargs)
            for kept, new in zip(tensors_of(out), tensors_of(again), strict=True) if fresh else ():
                kept.copy_(new)

    def reset(self):
        self.counts["resets"] += 1
        self.launches = []


@contextlib.contextmanager
def capture(graph, *, capture_error_mode):
    """In the place of torch.cuda.graph: launches are recorded and not carried out."""
    assert capture_error_mode == "thread_local"
    graph.counts["captures"] += 1
    recorder = Recorder(graph)
    try:
        with recorder:
            yield
    finally:
        for storage, copy in recorder.saved.values():
            storage.copy_(copy)
    for _, _, _, out, fresh in graph.launches:
        for tensor in tensors_of(out) if fresh else ():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # nothing may be read of a capture but what a replay writes


def emulate(monkeypatch):
    """Makes decoding treat the CPU as it does a GPU; returns the counts of captures, replays and resets."""
    Graph.counts = Counter()
    monkeypatch.setattr("vlm.nn.step.replay.uses_cuda_graph", lambda device: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream before")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    return Graph.counts
