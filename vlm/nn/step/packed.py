"""Linear layers arranged for inference on a CPU: compiled, packed or split float weights, and 8-bit weights."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.machine import return_freed_memory
from vlm.nn.blocks import ACTIVATIONS, MLP, Block
from vlm.nn.step.native import NativeLinear, load_library
from vlm.nn.vocabulary_loss import Head

Product = Callable[[Tensor], Tensor]
WEIGHT = 127  # largest quantised weight
TINY = 1e-30  # minimum scale, for rows of zeros
ROWS_AT_ONCE = 256  # that are quantised together, a multiple of native.GROUP


class InferenceLayer(nn.Module):
    """Base of layers that are also available as plain functions, without the overhead of modules."""

    @abstractmethod
    def function(self) -> Product:
        """The layer as a plain function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)


class Int8Linear(InferenceLayer):
    """A linear layer that multiplies 8-bit integers: W8A8 with vector-wise scales (Dettmers et al. 2022, 2.1).

    Each output has a scale for its weights. Inputs are quantised on the fly, with a scale per row, so that a row's
    result does not depend on other rows. Sums of the integers are exact. The products are native.cpp's where it can be
    compiled, else FBGEMM's.

    Args:
        weight: (out, in), on the CPU; float, or already quantised by `quantize_weight`.
        bias: (out,) or None.
    Shapes:
        x (..., in), float32 -> (..., out)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight, library = weight.data, load_library()
        self.bias = None if bias is None else bias.detach().float()
        outputs, self.in_features = weight.shape
        self.native = None
        if library is not None:
            parts = [weight] if weight.is_quantized else map(quantize_weight, weight.split(ROWS_AT_ONCE))
            self.native = NativeLinear(parts, torch.qint8, outputs, self.in_features, self.bias, levels(), library)
            self.weight = None
        else:
            quantized = weight if weight.is_quantized else quantize_weight(weight)
            self.weight = torch.ops.quantized.linear_prepack(quantized, None)  # FBGEMM's layout

    def function(self) -> Product:
        if self.native is not None:
            return self.native.multiply
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        weight, bias, level = self.weight, self.bias, levels()

        def multiply(x: Tensor) -> Tensor:
            size = x.abs().amax(-1, keepdim=True).clamp_min_(TINY)  # (..., 1)
            y = product(x / size, 1 / level, level + 1, weight)
            return y.mul_(size) if bias is None else torch.addcmul(bias, y, size)

        return multiply


def allocate_int8(shape: torch.Size) -> Tensor:
    """Returns memory for a weight of 8 bits with a scale per row, which `quantize_weight` fills.

    Shapes:
        shape (out, in) -> the same, of dtype qint8, on the CPU
    """
    scales, zeros = torch.ones(shape[0], dtype=torch.double), torch.zeros(shape[0], dtype=torch.long)
    with warnings.catch_warnings():  # torch deprecates its quantised tensors, but offers no other way yet
        warnings.simplefilter("ignore", UserWarning)
        options: dict[str, Any] = {"scales": scales, "zero_points": zeros, "axis": 0, "dtype": torch.qint8}
        return torch._empty_per_channel_affine_quantized(shape, **options)


def quantize_weight(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Quantises a weight to 8 bits, with a scale per row, in parts that need little memory.

    Args:
        out: Memory for the result, from `allocate_int8`.
    Shapes:
        weight (out, in) -> the same, of dtype qint8
    """
    quantized = allocate_int8(weight.shape) if out is None else out
    # Both are written in place: `int_repr` would be a copy.
    integers = torch.empty(0, dtype=torch.int8).set_(quantized.untyped_storage(), 0, weight.shape)  # type: ignore[call-overload]
    scales = quantized.q_per_channel_scales()
    for part, rows, scale in zip(*(tensor.split(ROWS_AT_ONCE) for tensor in (weight, integers, scales)), strict=True):
        values = part.float()
        found = values.abs().amax(1).clamp_min(TINY) / WEIGHT
        rows.copy_((values / found[:, None]).round())
        scale.copy_(found)
    return quantized


@cache
def is_supported() -> bool:
    """Returns True if torch runs the int8 product on this processor; on ARM, its list of engines is not reliable."""
    try:
        Int8Linear(torch.eye(2), None)(torch.eye(2))
    except RuntimeError:
        return False
    return True


@cache
def levels() -> int:
    """The largest absolute value that inputs are quantised to.

    On processors without VNNI, FBGEMM adds pairs of products in 16 bits, and saturates sums above 32,767. Inputs of 7
    bits stay below: 2 * 127 * 127 = 32,258, with the input stored as 1 to 127.
    """
    return 127 if torch.cpu.get_capabilities().get("avx512_vnni", False) else 63


class Bfloat16Embedding(nn.Embedding):
    """An embedding stored in bfloat16, in half the memory, whose vectors are float32.

    Shapes:
        tokens (...) -> (..., D)
    """

    def __init__(self, weight: Tensor) -> None:
        count, dim = weight.shape
        super().__init__(count, dim, _weight=weight.detach().bfloat16(), _freeze=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def list_int8_weights(model: nn.Module) -> set[str]:
    """Names of the weights in a model's blocks that `quantize` stores in 8 bits."""
    return {
        f"{block_name}.{name}.weight"
        for block_name, block in model.named_modules()
        if isinstance(block, Block)
        for name, layer in block.named_modules()
        if type(layer) is nn.Linear
    }


def quantize(model: nn.Module, decoders: Iterable[Any]) -> int:
    """Quantises the linear layers of a model's blocks and the heads of its decoders to 8 bits; returns their number.

    Weights that `quantize_weight` has quantised before are used as they are. A decoder's embedding is rounded to
    bfloat16, before the head if they share the weight.
    """
    return_freed_memory()
    count = 0
    for decoder in decoders:  # first, because a head's 8-bit weight takes memory besides its packed one
        if type(decoder.token_embed) is nn.Embedding:  # not a recurrent decoder's
            decoder.token_embed = Bfloat16Embedding(decoder.token_embed.weight)
        head = decoder.head_parts
        product = Int8Linear(head.weight, head.bias).function()
        decoder.head = lambda hidden, head=head, product=product: product(head.apply_transform(hidden))
        count += 1
    return_freed_memory()
    return count + replace_in_blocks(
        model, lambda name, layer: Int8Linear(layer.weight, layer.bias) if type(layer) is nn.Linear else None
    )


def replace_in_blocks(model: nn.Module, replacement: Callable[[str, Any], nn.Module | None]) -> int:
    """Replaces layers in all blocks of a model; returns their number.

    Args:
        replacement: Returns the replacement of a layer, given its name in its parent; None to replace layers inside it.
    """
    count = 0
    stack: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    while stack:
        parent = stack.pop()
        for name in [name for name, _ in parent.named_children()]:
            child = parent.get_submodule(name)  # the only reference to a layer, which is freed as it is replaced
            if (new := replacement(name, child)) is None:
                stack.append(child)
                continue
            setattr(parent, name, new)
            count += 1
            del child, new
            return_freed_memory()
    return count


FEW_ROWS = 8  # batch size that the layout is optimised for; others work too

# Activations that oneDNN fuses into a product: name and algorithm.
FUSED = {
    ACTIVATIONS["relu"]: ("relu", ""),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_tanh"]: ("gelu", "tanh"),
    ACTIVATIONS["silu"]: ("swish", ""),
}


class PackedLinear(InferenceLayer):
    """A linear layer whose weight is stored in the blocked layout of oneDNN.

    With plain weights oneDNN copies them into blocks at each call: most of the time of a product of 8 rows, and still a
    fifth with 200.

    Args:
        weight: (out, in), on the CPU.
        bias: (out,) or None.
        activation: One of FUSED, computed inside the product; or None.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        # torch's own compiler packs frozen weights with this operator; layers of torch.utils.mkldnn do not take
        # ordinary tensors.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)
        self.bias = None if bias is None else bias.detach()
        self.fused = ("none", "") if activation is None else FUSED[activation]

    def function(self) -> Product:
        product, weight, bias = torch.ops.mkldnn._linear_pointwise.default, self.weight, self.bias
        name, algorithm = self.fused
        return lambda x: product(x, weight, bias, name, [], algorithm)


class FloatLinear(InferenceLayer):
    """A linear layer in float32 or bfloat16 that native.cpp multiplies.

    Milliseconds of the products of a decode step of SmolLM2-135M on two cores of an AMD EPYC with AVX512-BF16, by
    `benchmarks/products.py`:

        | rows     |    1 |    4 |    8 |   16 |   32 |   128 |
        |----------|------|------|------|------|------|-------|
        | float32  | 16.5 | 14.1 | 17.4 | 26.7 | 46.4 | 165.6 |
        |   packed | 26.7 | 21.8 | 27.2 | 33.9 | 53.4 | 167.3 |
        | bfloat16 |  9.2 |  9.9 | 11.7 | 17.4 | 28.0 |  92.0 |
        |   packed | 14.7 | 13.4 | 15.5 | 19.4 | 29.7 |  87.9 |

    Args:
        weight: (out, in), on the CPU.
        bias: (out,) or None.
        library: The compiled library.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, library: Any) -> None:
        super().__init__()
        self.native = NativeLinear.from_floats(weight, bias, library)

    def function(self) -> Product:
        return self.native.multiply


class SplitLinear(InferenceLayer):
    """A linear layer in float32 that multiplies a single row in parts, by a batched product.

    MKL computes a batch of matrices times a vector at nearly the speed of memory, and one matrix times a vector at half
    of it, except on Intel's processors with AVX-512. Inputs of several rows use oneDNN. The weight is not copied,
    unless it is stored transposed. Milliseconds of the products of a decode step of one text, on two cores of an AMD
    EPYC (`benchmarks/products.py --rows 1`):

        |         | plain | packed | split |
        |---------|-------|--------|-------|
        | S       |   3.4 |    1.9 |   1.3 |
        | M       |   6.0 |    3.5 |   2.3 |
        | SmolLM2 |  42.2 |   24.3 |  12.1 |
        | GPT-2   |  35.0 |   21.9 |  15.5 |

    Args:
        layer: The layer, whose parameters are shared.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.weight.data = self.weight.data.contiguous()

    def function(self) -> Product:
        return split_product(self.weight, self.bias)


def split_product(weight: Tensor, bias: Tensor | None) -> Product:
    """The forward pass of a `SplitLinear`, as a plain function.

    Shapes:
        weight (out, in), contiguous; bias (out,) or None
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    outputs, inputs = weight.shape
    count = max(2, torch.get_num_threads())
    even = outputs - outputs % count
    parts, rest = weight[:even].view(count, -1, inputs), weight[even:]
    has_onednn = packs(weight.dtype)

    def product(x: Tensor) -> Tensor:
        if x.numel() != inputs:
            if has_onednn:
                return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
            return F.linear(x, weight, bias)
        column = x.reshape(1, inputs).t()  # strides select the fast product: those of a (inputs, 1) tensor do not
        y = torch.bmm(parts, column.expand(count, -1, -1)).view(*x.shape[:-1], even)
        y = y if even == outputs else torch.cat([y, F.linear(x, rest)], dim=-1)
        return y if bias is None else y.add_(bias)  # baddbmm would take three times as long

    return product


class PackedMLP(InferenceLayer):
    """An MLP with packed layers.

    Shapes:
        x (..., D) -> (..., D)
    """

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        # oneDNN does not have quick_gelu, so it runs as a separate step.
        self.activation = None if mlp.activation in FUSED else mlp.activation
        self.fc1 = PackedLinear(mlp.fc1.weight, mlp.fc1.bias, mlp.activation if self.activation is None else None)
        self.fc2 = PackedLinear(mlp.fc2.weight, mlp.fc2.bias)

    def function(self) -> Product:
        first, second, activation = self.fc1.function(), self.fc2.function(), self.activation
        return (lambda x: second(first(x))) if activation is None else (lambda x: second(activation(first(x))))


def prepack(model: nn.Module, wanted: Callable[[str, nn.Linear], bool] = lambda name, layer: True) -> None:
    """Packs the linear layers and MLPs of a model's blocks on a CPU, if this build of torch can. Results do not change.

    Args:
        wanted: Selects layers by name and layer; called with the first layer of an MLP.
    """

    def should_pack(name: str, layer: nn.Module) -> bool:
        return type(layer) is nn.Linear and _can_pack(layer.weight) and wanted(name, layer)

    def pack_layer(name: str, layer: Any) -> nn.Module | None:
        if type(layer) is MLP and should_pack(name, layer.fc1):
            return PackedMLP(layer)
        return PackedLinear(layer.weight, layer.bias) if should_pack(name, layer) else None

    replace_in_blocks(model, pack_layer)


def prepack_for_decoding(decoder: nn.Module, *, rows: int) -> None:
    """Arranges the weights that decode steps use on a CPU: linear layers of all blocks, and the head.

    Results stay equal. native.cpp computes steps where it can be compiled. Elsewhere, packed layers halve the time for
    several rows. For one row in float32, plain layers are faster where MKL has special code for the processor, and
    `SplitLinear` elsewhere.

    Args:
        rows: Typical number of texts decoded at once, beams included.
    """
    if "head" in vars(decoder):  # stored in 8 bits, or packed before
        return
    head: Head = decoder.head_parts  # type: ignore[assignment]
    weight = head.weight
    if weight.device.type != "cpu":
        return
    library = load_library() if _is_native_fast(weight.dtype) else None
    if library is not None:
        prepack(decoder, lambda name, layer: name == "kv")  # products of the context have many rows
        replace_in_blocks(
            decoder,
            lambda name, layer: FloatLinear(layer.weight, layer.bias, library) if type(layer) is nn.Linear else None,
        )
        if rows == 1 and weight.dtype == torch.float32:  # reads the weight as fast, and does not copy it
            product = split_product(weight, head.bias)
        else:
            product = NativeLinear.from_floats(weight, head.bias, library).multiply
    elif rows == 1 and weight.dtype == torch.float32:
        prepack(decoder, lambda name, layer: name == "kv")  # products of the context have many rows
        if _has_fast_row_products():
            return
        replace_in_blocks(decoder, lambda name, layer: SplitLinear(layer) if type(layer) is nn.Linear else None)
        product = split_product(weight, head.bias)
    elif _can_pack(weight):
        prepack(decoder)
        if rows == 1:
            return  # avoids a copy of the head's weight, often shared with the embedding; its product is as fast
        product = PackedLinear(weight, head.bias).function()
    else:
        return
    decoder.head = lambda hidden: product(head.apply_transform(hidden))  # type: ignore[assignment]


def _can_pack(weight: Tensor) -> bool:
    """Returns True if torch can pack this weight on this processor."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and packs(weight.dtype)


def _is_native_fast(dtype: torch.dtype) -> bool:
    """Returns True if native.cpp should multiply weights of this type: AMX, which oneDNN uses, reads prompts faster."""
    has_amx = torch.cpu.get_capabilities().get("amx_bf16", False)
    return dtype == torch.float32 or (dtype == torch.bfloat16 and not has_amx)


def _has_fast_row_products() -> bool:
    """Returns True if plain products of one row in float32 are the fastest: MKL's code for AVX-512.

    MKL runs that code only on Intel's processors, so the processor's name is checked. Milliseconds of a step's products
    on two cores of a Xeon, by benchmarks/products.py:

        |         | plain | packed |
        |---------|-------|--------|
        | M       |   8.7 |   11.7 |
        | SmolLM2 |  62.0 |   72.6 |
        | GPT-2   |  40.2 |   57.5 |
    """
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_f")) and "Intel" in capabilities.get("cpu_name", "")


@cache
def packs(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN packs weights of this type: it refuses bfloat16 on processors with AVX2 only."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(FEW_ROWS, FEW_ROWS, dtype=dtype), FEW_ROWS)
    except (AttributeError, RuntimeError):  # built without the operator, or refused by oneDNN
        return False
    return True
