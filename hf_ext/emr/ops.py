# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Block operations of EMR-Merging (arXiv 2405.17461): elect, mask, the sums of the rescalers, and restore.

Plain torch (`arithmetic`), or the compiled kernels of `hf_ext.fast`: bit-equal weights and masks, sums within 1e-12.
Compiled sums may differ in their last bits between processors with vectors of other widths; threads
and blocks change nothing. `tests/emr/reference_ops.py` has the same functions in the paper's own two passes.
Shapes: n elements of a flat tensor, N tasks. A sum is taken in fp64 over each sub-block of 8,192 elements, and the
sub-blocks are added in the order of their index: how a tensor is cut into blocks changes no bit.
"""

import torch
from torch import Tensor

from hf_ext.fast.emr_sums import SUB_BLOCK as SUB_BLOCK
from hf_ext.fast.emr_sums import SUMS as SUMS
from hf_ext.fast.emr_sums import TOTALS as TOTALS
from hf_ext.fast.emr_sums import Sums as Sums

from ..errors import UsageError
from .arithmetic import DTYPES as DTYPES
from .arithmetic import find_kernels
from .arithmetic import pack_mask as pack_mask
from .arithmetic import unpack_mask as unpack_mask

# Elements of one tensor that are one unit of work, of the journal and of partial sums.
SEGMENT = 128 * SUB_BLOCK


def merge_block(
    base: Tensor,  # [n], W_0; float32, float16 or bfloat16, as all weights
    tasks: list[Tensor],  # [n] each, W_t, each of its own dtype
    unified: Tensor,  # [n], takes W_uni, rounded to its dtype
    masks: Tensor | None,  # [N, ceil(n / 8) or more], takes M_t, lowest bit first; bits after the last are 0
    sums: Sums,  # the block's are added to them
    *,
    first: int = 0,  # index in the tensor of the block's first sub-block
    tie: str = "zero",  # where S = 0: "zero" elects nobody (the paper), "negative" the lowest d_t (the authors' code)
) -> None:
    """
    Elect the unified weights of a block, mask each task, and add the block's sums. All tensors lie on one device. On
    the CPU it runs on one thread, and Python's other threads run meanwhile.

    With d_t = W_t - W_0 in fp32 and S = Σ_t d_t (fp32, in the order of the tasks), W_uni is max_t W_t where S > 0,
    min_t W_t where S < 0 and W_0 where S = 0: the paper's τ_uni = W_uni - W_0. The mask is M_t = [sgn d_t = sgn τ_uni
    ≠ 0], with the τ_uni of the weights as stored.
    """
    if tie not in ("zero", "negative"):
        raise UsageError(f"tie is {tie!r}: choose 'zero' (the paper) or 'negative' (the authors' code)")
    _check_block(base, tasks, unified, masks, sums, first)
    find_kernels(base.device.type).run_block(base, tasks, unified, masks, sums, first, tie)


def mask_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, *, first: int = 0
) -> None:
    """Mask each task against unified weights that are given, and add the block's sums: the second half of
    [`merge_block`], and mask-and-rescale as a post-process of any merged model (Table 9 of the paper)."""
    _check_block(base, tasks, unified, masks, sums, first)
    find_kernels(base.device.type).run_block(base, tasks, unified, masks, sums, first, None)


@torch.no_grad()
def restore_block(base: Tensor, unified: Tensor, mask: Tensor, scale: float, out: Tensor) -> None:
    """Weights of one task: Ŵ = W_0 + λ·(W_uni - W_0) where the mask is set and W_0 elsewhere, computed in fp32 and
    rounded once. On the CPU it runs on as many threads as torch uses."""
    weights = {"base": base, "unified": unified, "out": out}
    for name, tensor in weights.items():
        _check_weights(name, tensor, base.numel(), base.device)
    _check_mask(mask, base.numel(), base.device)
    base, unified, out, mask = base.view(-1), unified.view(-1), out.view(-1), mask.view(-1)
    find_kernels(base.device.type).restore(base, unified, [mask], [scale], [out])


def _check_weights(name: str, tensor: Tensor, n: int, device: torch.device) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}: weights must be float32, float16 or bfloat16; convert them first")
    if tensor.numel() != n or not tensor.is_contiguous() or tensor.device != device:
        raise UsageError(
            f"{name} has {tensor.numel()} elements with strides {tensor.stride()} on {tensor.device}: "
            f"it must be contiguous with {n} elements on {device}"
        )


def _check_mask(mask: Tensor, n: int, device: torch.device) -> None:
    if mask.dtype != torch.uint8:
        raise TypeError(f"the mask is {mask.dtype}: it must be packed bits in uint8, as pack_mask makes them")
    if mask.shape[-1] < -(-n // 8) or mask.stride(-1) != 1 or mask.device != device:
        got = f"{mask.shape[-1]} bytes on {mask.device}"
        raise UsageError(f"the mask has {got}: {n} elements need {-(-n // 8)} contiguous bytes on {device}")


def _check_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, first: int
) -> None:
    """Checks the arguments of a block, quickly, as a block takes a few hundred microseconds."""
    n, count, device = base.numel(), len(tasks), base.device
    if not tasks or first < 0:
        raise UsageError(f"{count} tasks from sub-block {first}: at least one task and no negative index")
    _check_weights("base", base, n, device)
    _check_weights("unified", unified, n, device)
    for index, task in enumerate(tasks):
        _check_weights(f"task {index}", task, n, device)
    if masks is not None:
        if masks.ndim != 2 or len(masks) != count:
            raise UsageError(f"masks have shape {tuple(masks.shape)}: one row of packed bits for each task is needed")
        _check_mask(masks, n, device)
    for name, tensor, shape in zip(Sums._fields, sums, ((count, 10), (4,), (count, count)), strict=True):
        if (tensor.dtype, tensor.shape, tensor.device) != (torch.float64, shape, device) or not tensor.is_contiguous():
            raise UsageError(
                f"sums of {name} are {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: "
                f"contiguous float64 of {shape} on {device} is needed"
            )
