"""Every model class on the device against the CPU: forward, backward, generation, merging, restoring.

The reference is the same model in float32 on the CPU; `difference` and `gradient` are ‖found - wanted‖ / ‖wanted‖ of
the outputs and of all gradients. Half types round what decides which keys SemanIR chooses, hence their wide limit.
"""

import inspect
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from diffusers import DDIMScheduler
from emr_sets import write_base, write_task
from parts import Case, Values, autocast, read_words, relative, run_part
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hf_ext
from hf_ext import restore_image
from hf_ext.emr import ops
from hf_ext.mrconv import MRConvForImageClassification
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel

LIMITS = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.05}
COLUMNAR = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "top_k": 16}
U_SHAPED = {"architecture": "u-shaped", "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "refinement_depth": 1}
SEQUENCES = {"hidden_size": 16, "num_hidden_layers": 2, "kernel_size": 8, "max_position_embeddings": 64}
TOKENS = {**SEQUENCES, "vocab_size": 32, "num_labels": 3}
IMAGES = {"image_size": 32, "patch_size": 4, "hidden_sizes": [8, 16], "depths": [1, 1], "kernel_size": 4}
TRANSFORMER = {"sample_size": 8, "in_channels": 3, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
TEXTS = {"num_classes": None, "joint_attention_dim": 7}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def half_mask(batch: int, length: int) -> torch.Tensor:
    """The last row is padded from its middle on."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return mask


def text_inputs() -> dict[str, Any]:
    mask = half_mask(2, 48)
    return {"input_ids": integers(32, 2, 48), "attention_mask": mask}


def dit_inputs(**condition: torch.Tensor) -> dict[str, Any]:
    sizes = DisentangledDiTTransformer2DModel.CONTROL_SIZES
    controls = {name: draw(2, size, seed=size) for name, size in sizes.items()}
    mask = torch.tensor([True, False])
    inputs = {"hidden_states": draw(2, 3, 8, 8), "timestep": torch.tensor([20.0, 700.0])}
    return {**inputs, "controls": controls, "control_mask": mask, **condition}


@dataclass
class Model:
    """A class with a tiny configuration and inputs."""

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]
    # What the loss is taken of where the class has none itself.
    labels: dict[str, torch.Tensor] = field(default_factory=dict)

    def build(self) -> torch.nn.Module:
        """The model, its parameters moved from where constants would hide a missing term."""
        torch.manual_seed(0)
        model = self.make()
        with torch.no_grad():
            for index, value in enumerate(model.parameters()):
                value += 0.02 * draw(*value.shape, seed=index)
        return model.eval()

    def arguments(self) -> dict[str, Any]:
        """Inputs and labels, on the CPU."""
        return {**self.inputs(), **self.labels}


def semanir(name: str, **fields: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(hf_ext, name)(hf_ext.SemanIRConfig(**fields))


def mrconv(name: str, **fields: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(hf_ext, name)(hf_ext.MRConvConfig(**fields))


def pictures(batch: int, channels: int, side: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": draw(batch, channels, side, side).sigmoid()}


CLASSES = {"labels": torch.tensor([0, 2])}
MODELS: dict[str, Model] = {
    "SemanIRModel": Model(semanir("SemanIRModel", **COLUMNAR), pictures(1, 3, 24)),
    "SemanIRForImageRestoration": Model(
        semanir("SemanIRForImageRestoration", **COLUMNAR), pictures(2, 3, 24), {"labels": draw(2, 3, 24, 24).sigmoid()}
    ),
    "SemanIRForImageRestoration, u-shaped": Model(
        semanir("SemanIRForImageRestoration", **U_SHAPED), pictures(1, 3, 32), {"labels": draw(1, 3, 32, 32).sigmoid()}
    ),
    "MRConvModel": Model(mrconv("MRConvModel", **TOKENS, kernel_type="sparse"), text_inputs),
    "MRConvForSequenceClassification": Model(
        mrconv("MRConvForSequenceClassification", **TOKENS, bidirectional=True), text_inputs, CLASSES
    ),
    "MRConvForAudioClassification": Model(
        mrconv("MRConvForAudioClassification", **SEQUENCES, input_size=1, num_labels=3),
        lambda: {"input_values": draw(2, 48), "attention_mask": half_mask(2, 48)},
        CLASSES,
    ),
    "MRConvForRetrieval": Model(
        mrconv("MRConvForRetrieval", **{**TOKENS, "num_labels": 2}, norm="layer", kernel_type="dilated"),
        lambda: {**text_inputs(), "input_ids_2": integers(32, 2, 48, seed=1), "attention_mask_2": half_mask(2, 48)},
        {"labels": torch.tensor([0, 1])},
    ),
    "MRConvForCausalLM": Model(
        mrconv("MRConvForCausalLM", **TOKENS), text_inputs, {"labels": integers(32, 2, 48, seed=2)}
    ),
    "MRConvForTokenClassification": Model(
        mrconv("MRConvForTokenClassification", **{**TOKENS, "num_labels": 3}, bidirectional=True),
        text_inputs,
        {"labels": integers(3, 2, 48, seed=3)},
    ),
    "MRConvForMaskedLM": Model(
        mrconv("MRConvForMaskedLM", **TOKENS, bidirectional=True), text_inputs, {"labels": integers(32, 2, 48, seed=4)}
    ),
    "MRConvForImageClassification": Model(
        lambda: MRConvForImageClassification(hf_ext.MRConvConfig(**SEQUENCES, input_size=3, num_labels=3)),
        pictures(2, 3, 8),
        CLASSES,
    ),
    "MRConvNextModel": Model(lambda: hf_ext.MRConvNextModel(hf_ext.MRConvNextConfig(**IMAGES)), pictures(2, 3, 32)),
    "MRConvNextForImageClassification": Model(
        lambda: hf_ext.MRConvNextForImageClassification(hf_ext.MRConvNextConfig(**IMAGES, num_labels=3)),
        pictures(2, 3, 32),
        CLASSES,
    ),
    "DisentangledDiTTransformer2DModel": Model(
        lambda: DisentangledDiTTransformer2DModel(**TRANSFORMER, num_classes=5),
        lambda: dit_inputs(class_labels=torch.tensor([1, 5])),
    ),
    "DisentangledDiTTransformer2DModel, texts": Model(
        lambda: DisentangledDiTTransformer2DModel(**TRANSFORMER, **TEXTS),
        lambda: dit_inputs(encoder_hidden_states=draw(2, 4, 7)),
    ),
    "DisentangledDiTTransformer2DModel, masked": Model(
        lambda: DisentangledDiTTransformer2DModel(**TRANSFORMER, num_classes=5, num_decoder_layers=1),
        lambda: dit_inputs(class_labels=torch.tensor([1, 5]), keep_indices=torch.tensor([[0, 3, 7], [9, 2, 4]])),
    ),
}
# One of each family, where a case takes long.
FAMILIES = ("SemanIRForImageRestoration", "MRConvForCausalLM", "MRConvNextForImageClassification") + (
    "DisentangledDiTTransformer2DModel",
)


def main_output(output: Any) -> torch.Tensor:
    """The first output of a class beside its loss."""
    names = ("reconstruction", "logits", "last_hidden_state", "sample")
    return next(output[name] for name in names if output.get(name) is not None)


def loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss")
    return main_output(output).float().square().mean() if loss is None else loss


def halves(value: Any, dtype: torch.dtype) -> Any:
    """Inputs of a model of this type; controls and times stay as they are given."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def compare(model: torch.nn.Module, call: Callable[[], Any], wanted: dict[str, Any], dtype: str) -> Values:
    """A row; a difference above the limit is an error."""
    model.zero_grad()
    output = call()
    loss_of(output).backward()
    named = {name.removeprefix("module."): value.grad for name, value in model.named_parameters()}
    found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}
    missing = [name for name in wanted["gradients"] if found.get(name) is None]
    if missing:
        raise AssertionError(f"no gradient of {', '.join(missing[:5])}")
    row = {
        "dtype": dtype,
        "difference": relative([main_output(output)], [wanted["output"]]),
        "gradient": relative([found[name] for name in wanted["gradients"]], list(wanted["gradients"].values())),
        "limit": LIMITS[dtype],
    }
    # Of a gradient sums run over everything; ten times as much is still far from a wrong term.
    if not (row["difference"] <= row["limit"] and row["gradient"] <= 10 * row["limit"]):
        raise AssertionError(f"differs from the CPU: {row}")
    return row


def reference(entry: Model) -> dict[str, Any]:
    model = entry.build()
    output = model(**entry.arguments())
    loss_of(output).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"output": main_output(output), "gradients": gradients}


def on_device(entry: Model, device: str) -> tuple[torch.nn.Module, Callable[..., Any]]:
    model = entry.build().to(device)
    return model, partial(model, **send_to_device(entry.arguments(), device))


def plain(entry: Model, words: Any) -> dict[str, Values]:
    """Each type, as weights and by autocast."""
    wanted, rows = reference(entry), {}
    for dtype in LIMITS:
        model, call = on_device(entry, words.device)
        rows[f"autocast {dtype}" if dtype != "float32" else dtype] = compare(
            model, autocast(words, dtype, call), wanted, dtype
        )
    model = entry.build().to(words.device, torch.bfloat16)
    arguments = send_to_device(entry.arguments(), words.device)
    names = inspect.signature(model.forward).parameters
    given = {name: halves(value, torch.bfloat16) for name, value in arguments.items() if name in names}
    rows["bfloat16 weights"] = compare(model, partial(model, **given), wanted, "bfloat16")
    return rows


def compiled(entry: Model, words: Any) -> dict[str, Values]:
    """Without inductor in the rehearsal, where it takes most of a minute for each class."""
    wanted, (model, call) = reference(entry), on_device(entry, words.device)
    model.compile(backend="aot_eager" if words.tiny else "inductor")
    return {"": compare(model, call, wanted, "float32")}


def implementation(name: str, words: Any) -> dict[str, Values]:
    """SemanIR by one of its ways to attend."""
    entry = MODELS["SemanIRForImageRestoration"]
    wanted, (model, call) = reference(entry), on_device(entry, words.device)
    model.set_attn_implementation(name)
    return {"": compare(model, call, wanted, "float32")}


def one_process(words: Any) -> None:
    """A process group of this process alone."""
    if not dist.is_initialized():
        backend = "nccl" if words.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def replicated(entry: Model, words: Any) -> dict[str, Values]:
    one_process(words)
    wanted, (model, _) = reference(entry), on_device(entry, words.device)
    wrapped = DistributedDataParallel(model)
    arguments = send_to_device(entry.arguments(), words.device)
    return {"": compare(wrapped, partial(wrapped, **arguments), wanted, "float32")}


def sharded(entry: Model, words: Any) -> dict[str, Values]:
    one_process(words)
    wanted, (model, call) = reference(entry), on_device(entry, words.device)
    fully_shard(model, mesh=init_device_mesh(words.device, (1,)))
    return {"": compare(model, call, wanted, "float32")}


@torch.no_grad()
def merged(name: str, words: Any) -> dict[str, Values]:
    """Branches merged on the device give what they gave on the CPU."""
    entry = MODELS[name]
    wanted = main_output(entry.build()(**entry.inputs()))
    model = entry.build().to(words.device).reparameterize()
    found = main_output(model(**send_to_device(entry.inputs(), words.device)))
    row = {"dtype": "float32", "difference": relative([found], [wanted]), "limit": LIMITS["float32"]}
    if not row["difference"] <= row["limit"]:
        raise AssertionError(f"differs from the CPU: {row}")
    return {"": row}


@torch.no_grad()
def generated(words: Any) -> dict[str, Values]:
    """The same tokens, of the model as it is and merged."""
    prompt, options = integers(32, 2, 7), {"max_new_tokens": 24, "do_sample": False}
    wanted = MODELS["MRConvForCausalLM"].build().generate(prompt, **options)
    rows = {}
    for name in ("branches", "merged"):
        model = MODELS["MRConvForCausalLM"].build().to(words.device)
        model = model.reparameterize() if name == "merged" else model
        found = model.generate(prompt.to(words.device), **options).cpu()
        if not torch.equal(found, wanted):
            raise AssertionError(f"{name}: {found.tolist()} instead of {wanted.tolist()}")
        rows[name] = {"dtype": "float32", "equal": True}
    return rows


@torch.no_grad()
def restored(words: Any) -> dict[str, Values]:
    """A picture by SemanIR."""
    image = np.random.default_rng(0).random((40, 24, 3), dtype=np.float32)
    entry = MODELS["SemanIRForImageRestoration"]
    wanted, found = (restore_image(entry.build().to(place), image) for place in ("cpu", words.device))
    difference = float(np.abs(found - wanted).max())
    if not difference <= LIMITS["float32"]:
        raise AssertionError(f"pictures differ by {difference}")
    return {"": {"dtype": "float32", "difference": difference, "limit": LIMITS["float32"]}}


def sampled(words: Any) -> dict[str, Values]:
    """Pictures by Disentangled DiT, from the same noise."""
    found = []
    for place in ("cpu", words.device):
        network = MODELS["DisentangledDiTTransformer2DModel"].build().to(place)
        pipeline = DisentangledDiTPipeline(network, DDIMScheduler(clip_sample=False), None, None, None)
        pipeline.set_progress_bar_config(disable=True)
        options = {"num_inference_steps": 4, "guidance_scale": 2.0, "output_type": "latent"}
        found.append(pipeline([1, 2], latents=draw(2, 3, 8, 8).to(place), **options).images)
    difference = relative([found[1]], [found[0]])
    if not difference <= LIMITS["float32"]:
        raise AssertionError(f"latents differ by {difference}")
    return {"": {"dtype": "float32", "difference": difference, "limit": LIMITS["float32"]}}


def block(device: str, count: int = 3, n: int = 5000) -> list[Any]:
    """Arguments of a merge of one block, on a device."""
    base = draw(n, seed=9).to(device)
    tasks = [base + 0.1 * draw(n, seed=index).to(device) for index in range(count)]
    masks = torch.zeros(count, -(-n // 8), dtype=torch.uint8, device=device)
    sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((count, 10), (4,), (count, count))]
    return [base, tasks, torch.empty_like(base), masks, ops.Sums(*sums)]


def merge_weights(words: Any) -> dict[str, Values]:
    """EMR's election, masks and restored weights: the bits of the CPU."""
    wanted, given = block("cpu"), block(words.device)
    # Sums of task vectors must be of the same weights.
    given[1] = [task.to(words.device) for task in wanted[1]]
    ops.merge_block(*wanted)
    ops.run_block(*given, 0, "zero")
    outs = [torch.empty_like(wanted[0]), torch.empty_like(given[0])]
    ops.restore_block(wanted[0], wanted[2], wanted[3][1], 0.7, outs[0])
    ops.restore(given[0], given[2], given[3][1], 0.7, outs[1])
    pairs = {"unified": (given[2], wanted[2]), "masks": (given[3], wanted[3]), "restored": (outs[1], outs[0])}
    different = [name for name, (found, expected) in pairs.items() if not torch.equal(found.cpu(), expected)]
    difference = relative(given[4], wanted[4])
    if different or difference > 1e-9:
        raise AssertionError(f"not the bits of the CPU: {different}; sums differ by {difference:.1e}")
    return {"": {"dtype": "float32", "equal": True, "difference": difference}}


def switched(words: Any) -> dict[str, Values]:
    """A merge of checkpoints, whose tasks are restored on the device with the bits of the CPU."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("base", "one", "two"):
            (folder / name).mkdir()
        write_base(folder / "base", 64, 1)
        for seed, name in enumerate(("one", "two"), 1):
            write_task(folder / "base", folder / name, seed)
        tasks = {name: str(folder / name) for name in ("one", "two")}
        config = {"base": str(folder / "base"), "tasks": tasks, "method": "emr"}
        artifact = hf_ext.merge_checkpoints(config, folder / "out", progress=False).path
        states = []
        for device in ("cpu", words.device):
            model = hf_ext.EMRModel.from_pretrained(artifact, "one", device=device).set_task("two").model
            states.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
    different = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    if different:
        raise AssertionError(f"not the bits of the CPU: {different[:5]}")
    return {"": {"equal": True}}


def make_cases(words: Any) -> dict[str, Case]:
    """Cheap and telling ones first."""
    cases: dict[str, Case] = {name: partial(plain, entry, words) for name, entry in MODELS.items()}
    ways = ["eager", "sdpa"] + (["flex_attention", "triton"] if words.device == "cuda" else ["native"])
    cases |= {f"SemanIR by {name}": partial(implementation, name, words) for name in ways}
    convolving = ("MRConvForSequenceClassification", "MRConvForAudioClassification", "MRConvForCausalLM")
    for name in (*convolving, "MRConvNextForImageClassification"):
        cases[f"{name}, merged"] = partial(merged, name, words)
    cases |= {"generate": partial(generated, words), "restore a picture": partial(restored, words)}
    cases |= {"sample": partial(sampled, words), "merge by torch": partial(merge_weights, words)}
    cases["switch tasks"] = partial(switched, words)
    names = FAMILIES if words.tiny else (*FAMILIES, *(name for name in MODELS if name not in FAMILIES))
    for way, check in (("DDP", replicated), ("FSDP2", sharded), ("compiled", compiled)):
        cases |= {f"{name}, {way}": partial(check, MODELS[name], words) for name in names}
    return cases


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given_words = read_words()
    run_part(given_words, make_cases(given_words))
