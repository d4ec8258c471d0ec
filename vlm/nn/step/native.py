"""Products and decode steps in C++ (native.cpp), compiled for the processor when they are first needed."""

import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.nn.attention import CosineScale, attention
from vlm.nn.blocks import ACTIVATIONS, MLP, GatedMLP, RMSNormPlusOne

SOURCE = Path(__file__).with_suffix(".cpp")
# Sums may be reordered, as vector instructions need, and no code relies on signed zeros or floating-point exceptions.
FLAGS = [
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-fassociative-math",
]
FLAGS += ["-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
COMPILE_SECONDS = 120  # limit of a compilation, which takes about 2 seconds
GROUP = 16  # outputs that are adjacent in the layout of weights
WEIGHT_KINDS = {torch.qint8: 0, torch.float32: 1, torch.bfloat16: 2}
ADJACENT = {torch.qint8: 4, torch.float32: 1, torch.bfloat16: 2}  # inputs
NORM_KINDS = {nn.Identity: 0, nn.LayerNorm: 1, nn.RMSNorm: 2, RMSNormPlusOne: 2, CosineScale: 3}
ACTIVATION_KINDS = {ACTIVATIONS[name]: i for i, name in enumerate(("relu", "gelu", "gelu_tanh", "quick_gelu", "silu"))}
COSINE_EPS = 1e-12  # of F.normalize
log = logging.getLogger(__name__)


def _structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_Norm: Any = _structure("Norm", weight=_POINTER, bias=_POINTER, eps=_FLOAT, kind=_INT)
_Linear: Any = _structure(
    "Linear", weight=_POINTER, scale=_POINTER, bias=_POINTER, outputs=_LONG, inputs=_LONG, kind=_INT, levels=_INT
)
_NORMS = ("norm1", "norm_cross", "norm2", "norm_q", "norm_k", "norm_cross_q")
_LINEARS = ("qkv", "proj", "cross_q", "cross_proj", "fc1", "fc2")
_Block: Any = _structure(
    "Block",
    **dict.fromkeys(_NORMS, _Norm),
    **dict.fromkeys(_LINEARS, _Linear),
    scale=_FLOAT,
    cross_scale=_FLOAT,
)
_Model: Any = _structure(
    "Model",
    **dict.fromkeys(("dim", "heads", "kv_heads", "head_dim", "hidden", "num_blocks"), _LONG),
    **dict.fromkeys(("activation", "gated", "has_cross"), _INT),
    blocks=ctypes.POINTER(_Block),
)
_Memory: Any = _structure("Memory", data=_POINTER, row=_LONG, head=_LONG)
_Step: Any = _structure(
    "Step",
    rows=_LONG,
    place=_LONG,
    length=_LONG,
    context_length=_LONG,
    cos=_POINTER,
    sin=_POINTER,
    rotation_row=_LONG,
    bias=_POINTER,
    bias_row=_LONG,
    bias_head=_LONG,
    context_bias=_POINTER,
    context_bias_row=_LONG,
    caches=ctypes.POINTER(_Memory),
    contexts=ctypes.POINTER(_Memory),
    threads=_INT,
)


@cache
def load_library() -> ctypes.CDLL | None:
    """Returns the compiled library; None without a C++ compiler with OpenMP.

    It is compiled once for each processor and version of the source, into the folder vlm of the user's cache
    (XDG_CACHE_HOME, by default ~/.cache).
    """
    try:
        return open_library(compile_library())
    except (OSError, RuntimeError, subprocess.SubprocessError) as fault:  # RuntimeError: there is no home folder
        log.debug("decode steps are not compiled: %s", fault)
        return None


def open_library(path: Path) -> ctypes.CDLL:
    """Opens a library of `compile_library` and declares its functions."""
    library = ctypes.CDLL(str(path))
    library.run_linear.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _INT]
    library.run_blocks.argtypes = [_POINTER, _POINTER, _POINTER]
    library.run_linear.restype = library.run_blocks.restype = None
    return library


def compile_library(flags: Sequence[str] = ()) -> Path:
    """Compiles native.cpp unless the cache holds the result; returns the path of the library.

    Args:
        flags: Further flags of the compiler.
    Raises:
        OSError: There is no compiler, or no folder to write to.
        RuntimeError: The user has no home folder.
        subprocess.SubprocessError: The compiler failed.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    # Linked with the OpenMP that torch has loaded: the threads of a second one would compete with torch's.
    command = [*compiler.split(), *FLAGS, *flags, str(SOURCE), *_loaded_openmp()]
    processor = repr((platform.machine(), sorted(torch.cpu.get_capabilities().items())))
    key = hashlib.sha256("\0".join([*command, processor]).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "vlm"
    path = folder / f"native-{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    log.info("compiling decode steps for this processor, once, into %s", folder)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        built = Path(place, "native.so")
        subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, timeout=COMPILE_SECONDS)
        built.replace(path)  # at once, so that other processes never see a part of it
    return path


def _loaded_openmp() -> list[str]:
    """Returns the path of the GNU OpenMP library of this process, if it has one: torch's, if others have their own."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths, folder = {line.split()[-1] for line in lines if "libgomp" in line}, Path(torch.__file__).parent
    return sorted(paths, key=lambda path: (folder not in Path(path).parents, path))[:1]


class NativeLinear:
    """A linear layer of native.cpp, which multiplies float32 inputs or converts them first.

    Args:
        parts: The weight (out, in) in parts of whole rows, float32, bfloat16 or qint8 as `quantize_weight` returns it.
            Each but the last has a multiple of GROUP rows. They are copied one by one, so that they may be made one by
            one.
        dtype: Their type.
        outputs, inputs: The sizes of all parts together.
        bias: (out,) or None.
        levels: Largest absolute value that inputs are rounded to, for qint8.
        library: The compiled library.
    """

    def __init__(
        self,
        parts: Iterable[Tensor],
        dtype: torch.dtype,
        outputs: int,
        inputs: int,
        bias: Tensor | None,
        levels: int,
        library: ctypes.CDLL,
    ) -> None:
        self.library, self.outputs, self.inputs = library, outputs, inputs
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.scale = torch.empty(outputs) if dtype == torch.qint8 else None
        adjacent = ADJACENT[dtype]
        shape = (-(-outputs // GROUP), -(-inputs // adjacent), GROUP, adjacent)
        self.weight, row = torch.empty(shape, dtype=torch.int8 if dtype == torch.qint8 else dtype), 0
        for part in parts:
            if self.scale is not None:
                self.scale[row : row + len(part)] = part.q_per_channel_scales()
            values = part.int_repr() if part.is_quantized else part.detach()
            padding = (0, -inputs % adjacent, 0, -len(part) % GROUP)
            padded = F.pad(values, padding) if any(padding) else values
            tiles = padded.reshape(-1, GROUP, shape[1], adjacent).transpose(1, 2)
            self.weight[row // GROUP : row // GROUP + len(tiles)] = tiles
            row += len(part)
        if self.scale is not None:
            self.weight = self.weight.view(torch.uint8).bitwise_xor_(128)  # adds 128 to signed integers
        self.structure = _Linear(
            self.weight.data_ptr(),
            _address(self.scale),
            _address(self.bias),
            outputs,
            inputs,
            WEIGHT_KINDS[dtype],
            levels,
        )
        self.address = ctypes.addressof(self.structure)

    @classmethod
    def from_floats(cls, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL) -> Self:
        """Returns the layer of a weight (out, in) in float32 or bfloat16, and a bias (out,) or None."""
        outputs, inputs = weight.shape
        return cls([weight], weight.dtype, outputs, inputs, bias, 0, library)

    def multiply(self, x: Tensor) -> Tensor:
        """The layer: x (..., in) -> (..., out), of the same type."""
        inputs = x.float().contiguous()
        y = inputs.new_empty(*x.shape[:-1], self.outputs)
        rows, threads = x.numel() // self.inputs, torch.get_num_threads()
        self.library.run_linear(self.address, inputs.data_ptr(), y.data_ptr(), rows, threads)
        return y.to(x.dtype)


class NativeBlocks:
    """Decoder blocks of which native.cpp computes a step of one token per row.

    Args:
        blocks: DecoderBlocks for which `is_supported` returns True.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.library = blocks[0].attn.qkv.native.library
        self._weights: list[Tensor] = []  # referred to by address only
        attn, mlp, cross = blocks[0].attn, blocks[0].mlp, blocks[0].cross_attn
        gated = isinstance(mlp, GatedMLP)
        self.head_dim, self.has_cross = attn.head_dim, cross is not None
        self._blocks = (_Block * len(blocks))(*map(self._describe, blocks))
        self._model = _Model(
            dim=attn.proj.native.outputs,
            heads=attn.num_heads,
            kv_heads=attn.num_kv_heads,
            head_dim=attn.head_dim,
            hidden=mlp.fc2.native.inputs,
            num_blocks=len(blocks),
            activation=ACTIVATION_KINDS[mlp.gate if gated else mlp.activation],
            gated=gated,
            has_cross=self.has_cross,
            blocks=self._blocks,
        )

    @staticmethod
    def is_supported(block: Any) -> bool:
        """Returns True if native.cpp computes such a block, with these layers."""
        attn, cross = block.attn, block.cross_attn
        mlp = block.mlp
        layers: list[Any] = [attn.qkv, attn.proj, getattr(mlp, "fc1", None), getattr(mlp, "fc2", None)]
        norms, parts = [block.norm1, block.norm2], [attn]
        if cross is not None:
            layers, norms, parts = [*layers, cross.q, cross.proj], [*norms, block.norm_cross], [*parts, cross]
        if not block.pre_norm or any(getattr(layer, "native", None) is None for layer in layers):
            return False
        if type(mlp) not in (MLP, GatedMLP) or any(type(norm) not in NORM_KINDS for norm in norms):
            return False
        if isinstance(mlp, GatedMLP) and layers[3].native.inputs % GROUP:
            return False  # gates and values share a group of outputs
        if any(part.attend is not attention for part in parts):  # attention is recorded
            return False
        return not any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())

    def _describe(self, block: Any) -> Any:
        attn, mlp, cross = block.attn, block.mlp, block.cross_attn
        queries, keys = self._head_norms(attn)
        described = _Block(
            norm1=self._norm(block.norm1),
            norm2=self._norm(block.norm2),
            norm_q=queries,
            norm_k=keys,
            qkv=attn.qkv.native.structure,
            proj=attn.proj.native.structure,
            fc1=mlp.fc1.native.structure,
            fc2=mlp.fc2.native.structure,
            scale=_scale(attn),
        )
        if cross is not None:
            described.norm_cross, described.norm_cross_q = self._norm(block.norm_cross), self._head_norms(cross)[0]
            described.cross_q, described.cross_proj = cross.q.native.structure, cross.proj.native.structure
            described.cross_scale = _scale(cross)
        return described

    def _head_norms(self, layer: Any) -> tuple[Any, Any]:
        """The norms of the queries and keys of an attention layer."""
        if layer.cosine is not None:
            kind = NORM_KINDS[CosineScale]
            return _Norm(self._keep(layer.cosine.scale), None, COSINE_EPS, kind), _Norm(None, None, COSINE_EPS, kind)
        norm = layer.head_norm
        return (_Norm(), _Norm()) if norm is None else (self._norm(norm.q), self._norm(norm.k))

    def _norm(self, norm: Any) -> Any:
        if (kind := NORM_KINDS[type(norm)]) == 0:
            return _Norm()
        weight = norm.weight.detach().float()
        bias = getattr(norm, "bias", None)
        weight = 1 + weight if isinstance(norm, RMSNormPlusOne) else weight
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        return _Norm(self._keep(weight), None if bias is None else self._keep(bias), eps, kind)

    def _keep(self, weight: Tensor) -> int:
        weight = weight.detach().float().contiguous()
        self._weights.append(weight)
        return weight.data_ptr()

    def step(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
        caches: Sequence[Any],
        contexts: Sequence[tuple[Tensor, Tensor] | None],
        context_bias: Tensor | None,
    ) -> Tensor:
        """Passes the residual stream of one new token per row through the blocks, and adds it to the caches.

        Args:
            rotation, bias: As in StepInputs, without beams.
            caches: The KeyValueCache of each block.
            contexts: Keys and values of the context in each block, or None.
            context_bias: The context's mask, (B, 1, 1, S), for cross-attention.
        Shapes:
            x (B, D) -> the same
        """
        rows, dtype = x.shape[0], x.dtype
        x = x.to(torch.float32, copy=True).contiguous()
        slots = [cache.take_slot() for cache in caches]  # the same in all caches
        step = _Step(rows=rows, threads=torch.get_num_threads())
        step.place, step.length = slots[0]
        step.caches = _memories([(cache.keys, cache.values) for cache in caches])
        pairs = [pair for pair in contexts if pair is not None]
        if pairs:
            step.contexts, step.context_length = _memories(pairs), pairs[0][0].shape[2]
        held: list[Tensor] = [x]
        if rotation is not None:
            cos, sin = (part.float().expand(*part.shape[:-1], self.head_dim // 2).contiguous() for part in rotation)
            held += [cos, sin]
            step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
            step.rotation_row = cos.shape[-1] if cos.numel() > cos.shape[-1] else 0
        if bias is not None:
            bias = bias.float().contiguous()
            held.append(bias)
            step.bias = bias.data_ptr()
            step.bias_row, step.bias_head = (bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1))
        if context_bias is not None and self.has_cross:
            context_bias = context_bias.float().contiguous()
            held.append(context_bias)
            step.context_bias = context_bias.data_ptr()
            step.context_bias_row = context_bias.stride(0) if len(context_bias) > 1 else 0
        self.library.run_blocks(ctypes.addressof(self._model), ctypes.addressof(step), x.data_ptr())
        return x.to(dtype)


def _scale(layer: Any) -> float:
    return 1 / math.sqrt(layer.head_dim) if layer.scale is None else layer.scale


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _memories(pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Describes keys and values (B, N, S, K) of each block, whose last two axes are contiguous."""
    tensors = [tensor for pair in pairs for tensor in pair]
    return (_Memory * len(tensors))(*((tensor.data_ptr(), *tensor.stride()[:2]) for tensor in tensors))
