"""The fused kernels for CUDA, in triton's interpreter where triton is installed and on a device where there is one."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_ext.emr import arithmetic, ops
from tests.emr.blocks import DTYPES, Block, assert_agree, random_block, same_bits

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = """
import itertools, torch
from hf_ext.emr import ops
from hf_ext.fast import emr_triton
from tests.emr.blocks import DTYPES, Block, assert_agree, random_block, same_bits

kinds = [(kind, kind) for kind in DTYPES] + [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
for n, (kind, dtype), tie in itertools.product((9, 8192 + 1500), kinds, ("zero", "negative", None)):
    given = random_block(n, 3, base=kind, tasks=(kind,), dtype=dtype, spread=1e-3)
    expected, ours = given.merge(tie=tie or "zero"), Block(given.base, given.tasks, dtype)
    if tie is None:
        ours.unified = expected.unified.clone()
    emr_triton.run_block(ours.base, ours.tasks, ours.unified, ours.masks, ours.added, 0, tie)
    assert_agree(ours, expected)
    assert same_bits(ours.unified, expected.unified) and same_bits(ours.masks, expected.masks)
    one, other = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
    emr_triton.restore(ours.base, ours.unified, ours.masks[0], 0.73, one)
    ops.restore_block(ours.base, ours.unified, ours.masks[0], 0.73, other)
    assert same_bits(one, other)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_have_the_bits_of_the_cpu():
    # Triton decides when it is imported, hence a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], cwd=ROOT, env=environment, check=True)


def test_torch_is_the_default_on_cuda_and_triton_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    # Also where triton can be imported, as on every machine with a CUDA build of torch; no GPU is touched.
    monkeypatch.delenv("HF_EXT_TRITON", raising=False)
    plain = arithmetic.Kernels(arithmetic.run_block, arithmetic.restore, arithmetic.multiply)
    assert arithmetic.find_kernels("cuda") == plain
    monkeypatch.setenv("HF_EXT_TRITON", "1")
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(ImportError, match="triton is not installed"):
            arithmetic.find_kernels("cuda")
    else:
        from hf_ext.fast import emr_triton

        assert arithmetic.find_kernels("cuda") == (emr_triton.run_block, emr_triton.restore, arithmetic.multiply, None)
    assert arithmetic.find_kernels("cpu").run_block is not plain.run_block


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("kind", DTYPES)
def test_the_device_has_the_bits_of_the_cpu(kind, kernels, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_EXT_TRITON", str(int(kernels == "triton")))
    for n, count, tasks in itertools.product((1, 9, 5 * 2**20 + 77), (1, 3, 8), ((kind,), DTYPES)):
        expected = random_block(n, count, base=kind, tasks=tasks, dtype=kind, spread=1e-3).merge(first=3)
        block = Block(expected.base.cuda(), [task.cuda() for task in expected.tasks], kind)
        for name in ("unified", "masks", "sums", "totals", "gram"):
            setattr(block, name, getattr(block, name).cuda())
        ops.merge_block(block.base, block.tasks, block.unified, block.masks, block.added, first=3)
        out, restored = torch.empty_like(block.unified), torch.empty_like(expected.unified)
        ops.restore_block(block.base, block.unified, block.masks[0], 0.73, out)
        ops.restore_block(expected.base, expected.unified, expected.masks[0], 0.73, restored)
        for name in ("unified", "masks", "sums", "totals", "gram"):
            setattr(block, name, getattr(block, name).cpu())
        block.base, block.tasks = expected.base, expected.tasks
        assert_agree(block, expected)
        assert same_bits(block.unified, expected.unified) and same_bits(block.masks, expected.masks)
        assert same_bits(out.cpu(), restored)
