"""The network split over two processes by diffusers' `enable_parallelism`, under `fork_two`."""

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, TensorParallelConfig
from diffusers.hooks import tensor_parallel

from tests.disentangled_dit.dit_testing import make_inputs, make_transformer

# The numbers of tokens are even, and two heads have a process each.
EVEN = {"sample_size": [6, 8]}
TEXT = {**EVEN, "num_classes": None, "joint_attention_dim": 7}
SHARED = {**TEXT, "shared_stream": True, "modulation": "shared"}
CASES = [
    (ContextParallelConfig, {"ulysses_degree": 2}, TEXT),
    (ContextParallelConfig, {"ulysses_degree": 2}, {**EVEN, "num_class_tokens": 2}),
    (ContextParallelConfig, {"ulysses_degree": 2}, SHARED),
    (TensorParallelConfig, {"tp_degree": 2}, TEXT),
    (TensorParallelConfig, {"tp_degree": 2}, SHARED),
    (TensorParallelConfig, {"tp_degree": 2}, EVEN),
]


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    # Where a GPU is missing diffusers divides by their number, and splits no layer: it does not say that it cannot.
    torch.accelerator.device_count = lambda: 2
    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)
    for kind, options, fields in CASES:
        model = make_transformer(**fields)
        inputs, seen = make_inputs(model), []
        expected = model(**inputs).sample
        model.enable_parallelism(config=kind(**options))
        layer = model.transformer_blocks[1].ff
        layer.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].shape[1]))
        torch.testing.assert_close(model(**inputs).sample, expected, atol=1e-5, rtol=1e-5)
        # half of the tokens, the 4 of the text among them in a shared stream, or of the columns of a weight
        tokens = 16 if fields is SHARED else 12
        if kind is ContextParallelConfig:
            assert seen == [tokens // 2], seen
        else:
            assert seen == [tokens] and layer.net[2].weight.to_local().shape == (16, 16)
    dist.destroy_process_group()
