"""A run of two processes whose weights FSDP2 shards, on CPUs: `main FOLDER DATA`, under `fork_two`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from hf_ext.training import TrainingArguments, build_task, train
from hf_ext.training.arguments import build
from tests.process_state import forget_accelerate

# What `examples/accelerate/fsdp2.yaml` says, as the launcher hands it on.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
SIZES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "top_k": 4}


def shard_on_processors() -> None:
    """Lets accelerate take gloo and CPUs for FSDP2; by itself it takes them for DDP."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(FSDP2)
    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU)

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState.set_device = set_device


def make_arguments(output: Path, data: str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "method": "semanir",
        "output_dir": str(output),
        "data": {"train": {"path": data}, "eval": {"path": data, "split": "train"}},
        "task": {"patch_size": 8},
        "model": {"architecture": "columnar", "num_channels": 1, **SIZES},
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "eval_steps": 2,
        "save_steps": 2,
        "ema_decay": 0.9,
        "logging_steps": 1,
        "report_to": "none",
    }
    return build(TrainingArguments, {**values, **changes})


def main() -> None:
    root, data = Path(sys.argv[1]), sys.argv[2]
    PartialState.destroy_process_group = lambda self, group=None: None
    arguments = make_arguments(root / "ddp", data)
    train(build_task(arguments), arguments)
    forget_accelerate()
    shard_on_processors()
    for name in ("fsdp", "fsdp-halves"):
        # The second is stopped after its first half, and goes on.
        for clock in ({"deadline_minutes": 1e-9}, {}) if name == "fsdp-halves" else ({},):
            forget_accelerate()
            arguments = make_arguments(root / name, data, **clock)
            try:
                train(build_task(arguments), arguments)
            except KeyboardInterrupt:
                assert clock
            assert AcceleratorState().distributed_type == DistributedType.FSDP
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
