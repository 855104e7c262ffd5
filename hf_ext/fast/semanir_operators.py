"""Operators beside and in place of SemanIR's plain ones, registered when this file is imported.

Two things are registered in the tables of `ops_semanir`. `ATTENTION` gets the fused ways: "native" (kernels for CPUs)
and "triton" (for GPUs). `STEPS` gets functions around the plain ones: they take the kernels where these fit and
call the plain function elsewhere. The kernels are imported by the first call that needs them: numba takes a second.

Shapes: B feature maps [B, height, width, channels], W windows of N tokens.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from hf_ext.semanir.ops_semanir import ATTENTION, STEPS, Dictionary, Pair, UnitAttention

from ..errors import UsageError
from .derivatives import is_transformed, needs_plain_gradients, plain_gradients

_NUMBA_IS_INSTALLED = find_spec("numba") is not None
# Channels of a head that fit the registers of the kernels for CPUs.
_NATIVE_HEAD = 64
# The plain steps, which this file wraps.
_cut, _join, _choose_plainly, _choose_attention = (
    STEPS[name] for name in ("cut", "join", "choose_keys", "choose_attention")
)


@cache
def native_kernels_work() -> bool:
    """True where there are kernels for CPUs. Asking imports them."""
    try:
        from .semanir_native import select_keys  # noqa: F401
    except ImportError:
        return False
    return True


def _is_exporting() -> bool:
    """True while a graph is made for other programs."""
    # What torch.compiler.is_exporting() returns; but in a graph for torch itself that says yes before torch 2.13.
    return torch.compiler._is_exporting_flag


def _runs_natively(tensor: Tensor) -> bool:
    """True where the kernels for CPUs take a tensor, and a graph with them could be run."""
    if tensor.device.type != "cpu" or tensor.dtype == torch.float64 or _is_exporting() or is_transformed():
        return False
    # A compiler follows calls but not imports: here it must be content with the package being there.
    return _NUMBA_IS_INSTALLED if torch.compiler.is_compiling() else native_kernels_work()


# -------------------------------------------------------------------------------------- what the operators compute


def _select_natively(tokens: Tensor, regions: Tensor | None, top_k: int, cosine: bool, include_self: bool) -> Tensor:
    from .semanir_native import select_keys

    return _choose_plainly(tokens, regions, top_k, cosine, include_self, best_keys=select_keys)


def _call(name: str) -> Callable[..., Any]:
    """A kernel of `semanir_native`, which is imported when it is called."""
    return lambda *given: getattr(import_module("hf_ext.fast.semanir_native"), name)(*given)


def _shape_of_keys(tokens: Tensor, *_: Any) -> Tensor:
    windows, count = tokens.shape[:2]
    return tokens.new_empty(windows, count, (count + 7) // 8, dtype=torch.uint8)


def _shape_of_result(query: Tensor, *_: Any) -> Tensor:
    windows, heads, tokens, dim = query.shape
    return query.new_empty(windows, tokens, heads, dim)


def _shapes_of_gradients(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    query, _, _, temperature, table = given[:5]
    maps = [_shape_of_result(query) for _ in range(3)]
    return *maps, temperature.new_empty(temperature.shape), table.new_empty(table.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Nothing but the inputs is kept for the gradient, which computes the logits again."""
    ctx.save_for_backward(*inputs[:6])
    ctx.geometry = inputs[6:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if needs_plain_gradients():
        bits, (width, window_size) = ctx.saved_tensors[5], ctx.geometry
        dictionary = Dictionary((gradient.shape[1] // width, width), (0, 0), window_size, bits)
        form = partial(ATTENTION["eager"], dictionary=dictionary)
        return *plain_gradients(form, gradient.transpose(1, 2), *ctx.saved_tensors[:5]), None, None, None
    slopes = _attend_backward_operator(gradient, *ctx.saved_tensors, *ctx.geometry)
    return *(slope.transpose(1, 2) for slope in slopes[:3]), *slopes[3:], None, None, None


def _copy_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a function to return a copy: an operator must not return a view of its input."""

    def apply(given: Tensor, *arguments: Any) -> Tensor:
        result = function(given, *arguments)
        shared = result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()

    return apply


def _shape_of_windows(features: Tensor, window: Pair, shift: Pair) -> Tensor:
    batch, height, width, channels = features.shape
    count = batch * (height // window[0]) * (width // window[1])
    return features.new_empty(count, window[0] * window[1], channels)


def _shape_of_map(windows: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    count = (size[0] // window[0]) * (size[1] // window[1])
    return windows.new_empty(windows.shape[0] // count, size[0], size[1], windows.shape[-1])


def _keep_layout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.size, ctx.layout = inputs[0].shape[1:3], inputs[-2:]


def _gradient_of_cut(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _join_operator(gradient, ctx.size, *ctx.layout), None, None


def _gradient_of_join(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _cut_operator(gradient, *ctx.layout), None, None, None


# Inside a compiled graph each of these steps is an operator of torch, of which a compiler knows the shapes and asks no
# more: a kernel it could not read, and of the plain cutting and joining it writes each index as a function of those
# before it, through the layers of a stage, and does not come to an end with these formulas.
_NAMESPACE = "hf_ext_semanir"
# The operators last as long as this object.
_LIBRARY = Library(_NAMESPACE, "DEF")
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor temperature, Tensor table, Tensor? bits"
_SIZES = "SymInt width, SymInt window_size"


def _define(name: str, signature: str, kernel: Any, shapes: Any, where: str = "CPU") -> Any:
    """Defines an operator by its function and the shape function of its result."""
    _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, where)
    register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


_CHOOSE = "(Tensor tokens, Tensor? regions, SymInt top_k, bool cosine, bool include_self) -> Tensor"
_BACKWARD = f"(Tensor gradient, {_GIVEN}, {_SIZES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_choose_operator = _define("choose_keys", _CHOOSE, _select_natively, _shape_of_keys)
_attend_operator = _define("attend", f"({_GIVEN}, {_SIZES}) -> Tensor", _call("attend"), _shape_of_result)
_attend_backward_operator = _define("attend_backward", _BACKWARD, _call("attend_gradients"), _shapes_of_gradients)
_LAYOUT = "SymInt[] window, SymInt[] shift"
_EVERYWHERE = "CompositeExplicitAutograd"
_CUT, _JOIN = f"(Tensor features, {_LAYOUT}) -> Tensor", f"(Tensor windows, SymInt[] size, {_LAYOUT}) -> Tensor"
_cut_operator = _define("cut", _CUT, _copy_of(_cut), _shape_of_windows, _EVERYWHERE)
_join_operator = _define("join", _JOIN, _copy_of(_join), _shape_of_map, _EVERYWHERE)
register_autograd(f"{_NAMESPACE}::attend", _gradients, setup_context=_keep_inputs, lib=_LIBRARY)
register_autograd(f"{_NAMESPACE}::cut", _gradient_of_cut, setup_context=_keep_layout, lib=_LIBRARY)
register_autograd(f"{_NAMESPACE}::join", _gradient_of_join, setup_context=_keep_layout, lib=_LIBRARY)


# ------------------------------------------------------------------------------------------------ what is registered


def _in_graphs(operator: Any, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator in graphs for torch itself; other programs do not have ours."""
    return lambda *given: (operator if torch.compiler.is_compiling() and not _is_exporting() else plain)(*given)


def _choose_keys(tokens: Tensor, regions: Tensor | None, top_k: int, cosine: bool, include_self: bool) -> Tensor:
    choose = _choose_operator if _runs_natively(tokens) else _choose_plainly
    return choose(tokens, regions, top_k, cosine, include_self)


def _choose_fastest(value: Tensor, gradient: bool) -> str:
    if is_transformed():
        return "eager"
    # Measured from 64 to 1024 tokens and for every k: the kernels need no masks, and no copies of what is given. On a
    # GPU the choice stays with torch's own SDPA until the others are measured there.
    if value.device.type == "cpu" and value.shape[-1] <= _NATIVE_HEAD and _runs_natively(value):
        return "native"
    return _choose_attention(value, gradient)


def _check_sizes(
    dictionary: Dictionary, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | None, table: Tensor
) -> None:
    """Refuse arguments that fit neither each other nor the dictionary: the kernels read memory by address."""
    windows, heads, tokens = query.shape[:3]
    expected = {
        "key": (key, tuple(query.shape)),
        "value": (value, tuple(query.shape)),
        "temperature": (temperature, (heads,)),
        "table": (table, (heads, (2 * dictionary.window_size - 1) ** 2)),
        "dictionary.bits": (dictionary.bits, (windows, tokens, (tokens + 7) // 8)),
    }
    for name, (found, shape) in expected.items():
        if found is not None and (tuple(found.shape) != shape or found.device != query.device):
            queries = f"queries {tuple(query.shape)} on {query.device}"
            raise ValueError(
                f"`{name}` has shape {tuple(found.shape)} on {found.device}; {queries} need {shape} there."
            )
    if dictionary.window[0] * dictionary.window[1] != tokens or max(dictionary.window) > dictionary.window_size:
        needed = f"must hold {tokens} tokens, with sides of at most {dictionary.window_size}"
        raise ValueError(f"`dictionary.window` is {dictionary.window}; it {needed}.")


def native_attention(
    query: Tensor, key: Tensor, value: Tensor, temperature: Tensor, table: Tensor, dictionary: Dictionary
) -> Tensor:
    """Attention by the kernels for CPUs, as [`ops_semanir.key_semantic_attention`]. They read the chosen keys only,
    or, where these are many, compute all logits a few at a time. For the gradient the logits are computed again."""
    if is_transformed():
        return ATTENTION["eager"](query, key, value, temperature, table, dictionary)
    if value.shape[-1] > _NATIVE_HEAD or not _runs_natively(value):
        got = f"got {value.dtype} on {value.device}, {value.shape[-1]} channels a head"
        raise UsageError(
            f"`implementation` is 'native', which needs numba, at most float32 on a CPU, heads of "
            f"at most {_NATIVE_HEAD} channels and no export; {got}. Use 'auto', which chooses it where it can."
        )
    _check_sizes(dictionary, query, key, value, temperature, table)
    tensors = [tensor.float() for tensor in (query, key, value, temperature, table)]
    outputs = _attend_operator(*tensors, dictionary.bits, dictionary.window[1], dictionary.window_size)
    return outputs.transpose(1, 2).to(value.dtype)


def _attend_by_triton(query: Tensor, key: Tensor, value: Tensor, table: Tensor, dictionary: Dictionary) -> Tensor:
    if is_transformed():
        return cast(UnitAttention, ATTENTION["eager"]).attend(query, key, value, table, dictionary)
    from .semanir_triton import triton_attention

    _check_sizes(dictionary, query, key, value, None, table)
    return triton_attention(query.to(value.dtype), key.to(value.dtype), value, table, dictionary)


ATTENTION |= {"native": native_attention, "triton": UnitAttention(_attend_by_triton)}
STEPS |= {"cut": _in_graphs(_cut_operator, _cut), "join": _in_graphs(_join_operator, _join)}
STEPS |= {"choose_keys": _choose_keys, "choose_attention": _choose_fastest}
