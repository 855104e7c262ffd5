"""
Runs of two processes whose weights FSDP2 shards, on CPUs: `main FOLDER KIND CASE`, under `fork_two`; and the training
itself, `main FILE.yaml [--field value ...]`, as a launcher starts it.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from hf_ext.training import TrainingArguments, build_task, launch, launcher, train
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused

from . import tiny

# What `examples/accelerate/fsdp2.yaml` says, as the launcher hands it on, and its efficient loading, which it asks for
# where no file says otherwise.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
SEQUENCES = {"hidden_size": 8, "num_hidden_layers": 2, "kernel_size": 4}
SEMANIR = {"architecture": "columnar", "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
DIT = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "mlp_ratio": 2.0, "patch_size": 2}
DIT_TASK = {"image_size": 8, "sample_steps": 2, "samples_per_class": 1}
FLOW = {**DIT_TASK, "objective": "flow"}
CLASSES, TWO_TEXTS = {"num_labels": 3}, {"text_column": "text", "second_text_column": "text"}
IMAGES = {"hidden_sizes": [4, 8], "depths": [1, 1], "kernel_size": 4}
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["query_key_value", "projection"]}
# What each run says, of a method or with another part of the loop.
CASES: dict[str, dict[str, Any]] = {
    "semanir": {"task": {"patch_size": 8}, "model": {**SEMANIR, "top_k": 4}},
    # Its two names of one weight, and the bytes of its texts, which differ from process to process and pass to pass.
    "mrconv-lm": {"task": {"max_length": 12}, "model": SEQUENCES, "gradient_accumulation_steps": 2},
    "disentangled-dit": {"task": DIT_TASK, "model": DIT},
    "mrconv-text": {"task": {"max_length": 12, **CLASSES}, "model": SEQUENCES, "activation_checkpointing": True},
    "mrconv-retrieval": {"task": {"max_length": 12, **TWO_TEXTS, **CLASSES}, "model": SEQUENCES},
    "mrconv-audio": {"task": {"max_length": 16, **CLASSES}, "model": SEQUENCES},
    "mrconv-images": {"task": {"image_size": 16, **CLASSES}, "model": IMAGES},
    # Timesteps are no integers here: rounded to bf16 they would be others.
    "bf16": {"method": "disentangled-dit", "task": FLOW, "model": DIT, "mixed_precision": "bf16"},
    "lora": {"method": "semanir", "task": {"patch_size": 8}, "peft": LORA},
}


def shard_on_processors() -> None:
    """Lets accelerate take gloo and CPUs for FSDP2 and DeepSpeed; by itself it takes them for DDP."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU)

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState.set_device = set_device
    launcher.has_devices = lambda: True


def make_arguments(root: Path, case: str, name: str, **changes: Any) -> TrainingArguments:
    """Three steps with an evaluation after each; the last one and those that are the best so far are saved."""
    values: dict[str, Any] = {"method": case, "max_steps": 3, "eval_steps": 1, "save_steps": 3, "logging_steps": 1}
    # Gradients that are zero but for their rounding, which differs, become no steps of full size.
    values |= {"optim_args": {"eps": 1e-3}, "weight_decay": 0.0, "warmup_steps": 0, "gradient_accumulation_steps": 1}
    base = {"init_from": str(root / "base")} if "peft" in CASES[case] else {}
    data = tiny.evaluated(root / "data")
    return tiny.make_arguments(root / case / name, data, **{**values, **CASES[case], **base, **changes})


def run(arguments: TrainingArguments, killed_in: int = -1) -> None:
    """Trains, or kills the second process in a step."""
    forget_accelerate()
    task = build_task(arguments)
    loss = task.loss

    def deadly_loss(model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        if step == killed_in and PartialState().process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch, step)

    task.loss = deadly_loss  # type: ignore[method-assign]
    # What becomes better is worse here: mostly nothing is saved after the second evaluation. A save would undo what an
    # evaluation may leave behind.
    task.greater_is_better = not task.greater_is_better  # type: ignore[misc]
    train(task, arguments)


def compare(root: Path, case: str) -> None:
    """A sharded run, and one that goes on from its first state."""
    os.environ["FSDP_VERSION"] = "1"
    with refused(ValueError, "FSDP_VERSION"):
        run(make_arguments(root, case, "first-version"))
    os.environ.update(FSDP2)
    pushing = {"hub_model_id": "me/run", "hub_private_repo": True, "hub_strategy": "checkpoint"}
    with refused(ValueError, "FSDP", "hub_strategy"):
        run(make_arguments(root, case, "pushed", **pushing))
    with refused(ValueError, "Muon", "AdamW"):
        run(make_arguments(root, case, "muon", optim="Muon", optim_args={}))
    run(make_arguments(root, case, "fsdp"))
    assert AcceleratorState().distributed_type == DistributedType.FSDP
    go_on(root, case, "continued")


def go_on(root: Path, case: str, name: str, **changes: Any) -> None:
    """Continues the sharded run from its first state, as if it had been killed in its last step."""
    copy = root / case / name
    if os.environ["RANK"] == "0":
        shutil.copytree(root / case / "fsdp", copy)
        shutil.rmtree(copy / "state" / "step-3")
        (copy / ".copied").touch()
    while not (copy / ".copied").exists():
        time.sleep(0.01)
    run(make_arguments(root, case, name, **changes))


def main() -> None:
    if sys.argv[1].endswith(".yaml"):
        shard_on_processors()
        sys.exit(launch.main())
    root, kind, case = Path(sys.argv[1]), *sys.argv[2:]
    PartialState.destroy_process_group = lambda self, group=None: None
    if kind == "compare":
        run(make_arguments(root, case, "ddp"))
    shard_on_processors()
    os.environ.update(FSDP2)
    if kind == "compare":
        compare(root, case)
    elif kind == "four":
        # The same eight examples a step.
        go_on(root, case, "four", per_device_train_batch_size=1)
    else:
        run(make_arguments(root, case, "killed"), killed_in=2 if kind == "kill" else -1)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
