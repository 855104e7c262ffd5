"""Tiny MRConv layers and models away from their initial values: `from tests.mrconv.mrconv_testing import ...`."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_ext.mrconv import (
    MRConvConfig,
    MRConvForSequenceClassification,
    MRConvLayer,
    MRConvNextConfig,
    MRConvNextForImageClassification,
)
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from tests.kit import warm_python
from tests.kit.models import ModelTesterMixin

# The shortest kernel does not divide the longest, and no length is a power of two.
SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "kernel_size": 5, "max_position_embeddings": 37, "num_labels": 3}
TOKENS = {**SIZES, "vocab_size": 11}
EVERY_KERNEL = list(itertools.product(KERNEL_TYPES, (False, True)))


class MRConvTester(ModelTesterMixin):
    bfloat16_tolerance = 0.05
    fields: dict

    def make_config(self):
        return MRConvConfig(**self.fields)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=generator(seed))


def make_mask() -> torch.Tensor:
    """Of four rows of 20, one is padded on the right and one on the left."""
    mask = torch.ones(4, 20, dtype=torch.int64)
    mask[1, 13:] = 0
    mask[2, :4] = 0
    return mask


def shake(module: torch.nn.Module) -> None:
    """Move parameters and statistics from their initial values, where a missing term would not be seen."""
    with torch.no_grad():
        for index, value in enumerate(itertools.chain(module.parameters(), module.buffers())):
            if value.is_floating_point():
                value += 0.3 * torch.rand(value.shape, generator=generator(index)).to(value.dtype)


def make_model(model_class=MRConvForSequenceClassification, **fields):
    torch.manual_seed(0)
    model = model_class(MRConvConfig(**(fields or TOKENS)))
    shake(model)
    return model.eval()


# A scale as large as after training, so that a difference in a layer is seen in the output.
IMAGES = {"image_size": 16, "patch_size": 2, "hidden_sizes": [6, 8], "depths": [1, 2], "kernel_size": 4}
IMAGES |= {"num_labels": 3, "layer_scale_init_value": 0.5}


def make_image_model(**fields) -> MRConvNextForImageClassification:
    torch.manual_seed(0)
    model = MRConvNextForImageClassification(MRConvNextConfig(**{**IMAGES, **fields}))
    shake(model)
    return model.eval()


def make_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def make_layer(layer_index: int = 0, **fields) -> MRConvLayer:
    torch.manual_seed(0)
    layer = MRConvLayer(MRConvConfig(**{**SIZES, **fields}), layer_index)
    shake(layer)
    return layer.eval()


def make_signal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64).to(dtype)


# Both processes are forks of one, which imports once. Arguments: a folder, a module, the name of its function, words.
_TWO_PROCESSES = """
import importlib
import multiprocessing
import sys

import torch
import torch.distributed as distributed

folder, module, name, *words = sys.argv[1:]
function = getattr(importlib.import_module(module), name)


def run(rank):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(function(rank, *words), f"{folder}/result{rank}")
    distributed.destroy_process_group()


processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def in_two_processes(folder: Path, function: Callable[..., Any], *words: object) -> list[Any]:
    """Results of a function of a module here in each of two processes; it gets its rank and the words as texts."""
    root = Path(__file__).resolve().parents[2]
    module = f"tests.mrconv.{function.__module__.rpartition('.')[2]}"
    command = [sys.executable, "-c", _TWO_PROCESSES, str(folder), module, function.__name__, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = warm_python.run(command, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"result{rank}") for rank in range(2)]
