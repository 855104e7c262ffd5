"""Every model class on a device against the CPU, and on the meta device, where a tensor of the CPU is an error.

`pytest -m gpu tests/test_devices.py` compares on a GPU, the slow suite on the CPU: forward, backward, generation,
merging, restoring. The reference is the same model in float32; a distance is ‖found - wanted‖ / ‖wanted‖, of the
outputs and of all gradients. Half types round what decides which keys SemanIR chooses, hence their wide limit.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from diffusers import DDIMScheduler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import hf_ext
from hf_ext import mrconv as mrconv_room
from hf_ext import restore_image
from hf_ext import semanir as semanir_room
from hf_ext.emr import arithmetic
from hf_ext.pipelines import disentangled_dit as dit_room
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with float32 must be float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


LIMITS = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.05}
COLUMNAR = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "top_k": 16}
U_SHAPED = {"architecture": "u-shaped", "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "refinement_depth": 1}
SEQUENCES = {"hidden_size": 16, "num_hidden_layers": 2, "kernel_size": 8, "max_position_embeddings": 64}
TOKENS = {**SEQUENCES, "vocab_size": 32, "num_labels": 3}
IMAGES = {"image_size": 32, "patch_size": 4, "hidden_sizes": [8, 16], "depths": [1, 1], "kernel_size": 4}
TRANSFORMER = {"sample_size": 8, "in_channels": 3, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
DILATED = {"norm": "layer", "kernel_type": "dilated"}
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


def dit_inputs(**condition: torch.Tensor) -> dict[str, Any]:
    sizes = DisentangledDiTTransformer2DModel.CONTROL_SIZES
    controls = {name: draw(2, size, seed=size) for name, size in sizes.items()}
    mask = torch.tensor([True, False])
    inputs = {"hidden_states": draw(2, 3, 8, 8), "timestep": torch.tensor([20.0, 700.0])}
    return {**inputs, "controls": controls, "control_mask": mask, **condition}


@dataclass
class Model:
    """A class with a tiny configuration and inputs."""

    fields: dict[str, Any]
    inputs: dict[str, Any]
    # What the loss is taken of where the class has none itself.
    labels: torch.Tensor | None = None

    def build(self) -> torch.nn.Module:
        """The model, its parameters moved from where constants would hide a missing term."""
        torch.manual_seed(0)
        name = next(name for name, entry in MODELS.items() if entry is self).partition(",")[0]
        model_class = next(getattr(room, name) for room in ROOMS if hasattr(room, name))
        config = getattr(model_class, "config_class", None)
        model = model_class(config(**self.fields)) if config else model_class(**self.fields)
        with torch.no_grad():
            for index, value in enumerate(model.parameters()):
                value += 0.02 * draw(*value.shape, seed=index)
        return model.eval()

    def arguments(self) -> dict[str, Any]:
        return self.inputs | ({} if self.labels is None else {"labels": self.labels})


ROOMS = (semanir_room, mrconv_room, dit_room)
DIT = "DisentangledDiTTransformer2DModel"
IDS = {"input_ids": integers(32, 2, 48), "attention_mask": half_mask(2, 48)}
PAIR = {**IDS, "input_ids_2": integers(32, 2, 48, seed=1), "attention_mask_2": half_mask(2, 48)}
SOUND = {"input_values": draw(2, 48), "attention_mask": half_mask(2, 48)}
LABELS = torch.tensor([0, 2])


def pixels(batch: int, side: int) -> dict[str, Any]:
    return {"pixel_values": draw(batch, 3, side, side).sigmoid()}


MODELS = {
    "SemanIRModel": Model(COLUMNAR, pixels(1, 24)),
    "SemanIRForImageRestoration": Model(COLUMNAR, pixels(2, 24), draw(2, 3, 24, 24).sigmoid()),
    "SemanIRForImageRestoration, u-shaped": Model(U_SHAPED, pixels(1, 32), draw(1, 3, 32, 32).sigmoid()),
    "MRConvModel": Model({**TOKENS, "kernel_type": "sparse"}, IDS),
    "MRConvForSequenceClassification": Model({**TOKENS, "bidirectional": True}, IDS, LABELS),
    "MRConvForAudioClassification": Model({**SEQUENCES, "input_size": 1, "num_labels": 3}, SOUND, LABELS),
    "MRConvForRetrieval": Model({**TOKENS, "num_labels": 2, **DILATED}, PAIR, torch.tensor([0, 1])),
    "MRConvForCausalLM": Model(TOKENS, IDS, integers(32, 2, 48, seed=2)),
    "MRConvForTokenClassification": Model({**TOKENS, "bidirectional": True}, IDS, integers(3, 2, 48, seed=3)),
    "MRConvForMaskedLM": Model({**TOKENS, "bidirectional": True}, IDS, integers(32, 2, 48, seed=4)),
    "MRConvForImageClassification": Model({**SEQUENCES, "input_size": 3, "num_labels": 3}, pixels(2, 8), LABELS),
    "MRConvNextModel": Model(IMAGES, pixels(2, 32)),
    "MRConvNextForImageClassification": Model({**IMAGES, "num_labels": 3}, pixels(2, 32), LABELS),
    DIT: Model({**TRANSFORMER, "num_classes": 5}, dit_inputs(class_labels=torch.tensor([1, 5]))),
    f"{DIT}, texts": Model({**TRANSFORMER, **TEXTS}, dit_inputs(encoder_hidden_states=draw(2, 4, 7))),
}
# One of each family, where a case takes long.
FAMILIES = ("SemanIRForImageRestoration", "MRConvForCausalLM", "MRConvNextForImageClassification", DIT)


def main_output(output: Any) -> torch.Tensor:
    """The first output of a class beside its loss."""
    names = ("reconstruction", "logits", "last_hidden_state", "sample")
    return next(output[name] for name in names if output.get(name) is not None)


def loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss")
    return main_output(output).float().square().mean() if loss is None else loss


def distance(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """‖found - wanted‖ / ‖wanted‖ over all tensors, in double precision on the CPU."""
    pairs = [(x.detach().double().cpu(), y.detach().double().cpu()) for x, y in zip(found, wanted, strict=True)]
    difference = sum(float((x - y).square().sum()) for x, y in pairs)
    return (difference / max(sum(float(y.square().sum()) for _, y in pairs), 1e-300)) ** 0.5


def compare(model: torch.nn.Module, call: Callable[[], Any], wanted: dict[str, Any], dtype: str = "float32") -> None:
    """Outputs and all gradients are near those of the CPU."""
    model.zero_grad()
    output = call()
    loss_of(output).backward()
    named = {name.removeprefix("module."): value.grad for name, value in model.named_parameters()}
    found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}
    missing = [name for name in wanted["gradients"] if found.get(name) is None]
    assert not missing
    assert distance([main_output(output)], [wanted["output"]]) <= LIMITS[dtype]
    # Of a gradient sums run over everything; ten times as much is still far from a wrong term.
    gradients = [found[name] for name in wanted["gradients"]]
    assert distance(gradients, list(wanted["gradients"].values())) <= 10 * LIMITS[dtype]


def reference(entry: Model) -> dict[str, Any]:
    model = entry.build()
    output = model(**entry.arguments())
    loss_of(output).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"output": main_output(output), "gradients": gradients}


def on_device(entry: Model, device: str) -> tuple[torch.nn.Module, Callable[..., Any]]:
    model = entry.build().to(device)
    return model, partial(model, **send_to_device(entry.arguments(), device))


@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_each_type_as_weights_and_by_autocast(name: str, device: str):
    entry = MODELS[name]
    wanted = reference(entry)
    for dtype in LIMITS:
        model, call = on_device(entry, device)
        with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
            compare(model, call, wanted, dtype)
    model = entry.build().to(device, torch.bfloat16)
    names = inspect.signature(model.forward).parameters
    given = {
        # Controls and times stay as they are given.
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in send_to_device(entry.arguments(), device).items()
        if name in names
    }
    compare(model, partial(model, **given), wanted, "bfloat16")


@pytest.fixture
def group(device: str, tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Nothing is written to it.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_replicated_and_sharded(name: str, device: str, group: None):
    wanted, (model, _) = reference(MODELS[name]), on_device(MODELS[name], device)
    wrapped = DistributedDataParallel(model)
    compare(wrapped, partial(wrapped, **send_to_device(MODELS[name].arguments(), device)), wanted)
    model, call = on_device(MODELS[name], device)
    fully_shard(model, mesh=init_device_mesh(device, (1,)))
    compare(model, call, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled(name: str):
    wanted, (model, call) = reference(MODELS[name]), on_device(MODELS[name], "cuda")
    model.compile()
    compare(model, call, wanted)


@on_devices
@pytest.mark.parametrize("way", ["eager", "sdpa", "native", "triton"])
def test_ways_to_attend(way: str, device: str):
    if way == ("triton" if device == "cpu" else "native"):
        pytest.skip(f"not on {device}")
    entry = MODELS["SemanIRForImageRestoration"]
    wanted, (model, call) = reference(entry), on_device(entry, device)
    model.set_attn_implementation(way)
    compare(model, call, wanted)


MERGED = ("MRConvForSequenceClassification", "MRConvForAudioClassification", "MRConvForCausalLM")


@on_devices
@pytest.mark.parametrize("name", (*MERGED, "MRConvNextForImageClassification"))
@torch.no_grad()
def test_branches_are_merged(name: str, device: str):
    entry = MODELS[name]
    wanted = main_output(entry.build()(**entry.inputs))
    model = entry.build().to(device).reparameterize()
    found = main_output(model(**send_to_device(entry.inputs, device)))
    assert distance([found], [wanted]) <= LIMITS["float32"]


@on_devices
@torch.no_grad()
def test_the_same_tokens_are_generated(device: str):
    prompt, options = integers(32, 2, 7), {"max_new_tokens": 24, "do_sample": False}
    wanted = MODELS["MRConvForCausalLM"].build().generate(prompt, **options)
    model = MODELS["MRConvForCausalLM"].build().to(device)
    for _ in range(2):
        assert torch.equal(model.generate(prompt.to(device), **options).cpu(), wanted)
        model.reparameterize()


@on_devices
@torch.no_grad()
def test_a_picture_is_restored(device: str):
    image = np.random.default_rng(0).random((40, 24, 3), dtype=np.float32)
    entry = MODELS["SemanIRForImageRestoration"]
    wanted, found = (restore_image(entry.build().to(place), image) for place in ("cpu", device))
    assert np.abs(found - wanted).max() <= LIMITS["float32"]


@on_devices
def test_pictures_are_drawn_of_the_same_noise(device: str):
    found = []
    for place in ("cpu", device):
        network = MODELS[DIT].build().to(place)
        pipeline = DisentangledDiTPipeline(network, DDIMScheduler(clip_sample=False), None, None, None)
        options = {"num_inference_steps": 4, "guidance_scale": 2.0, "output_type": "latent"}
        found.append(pipeline([1, 2], latents=draw(2, 3, 8, 8).to(place), **options).images)
    assert distance([found[1]], [found[0]]) <= LIMITS["float32"]


def block(device: str, count: int = 3, n: int = 5000) -> list[Any]:
    """Arguments of a merge of one block, on a device."""
    base = draw(n, seed=9).to(device)
    tasks = [base + 0.1 * draw(n, seed=index).to(device) for index in range(count)]
    masks = torch.zeros(count, -(-n // 8), dtype=torch.uint8, device=device)
    sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((count, 10), (4,), (count, count))]
    return [base, tasks, torch.empty_like(base), masks, arithmetic.Sums(*sums)]


@on_devices
def test_merged_weights_have_the_bits_of_the_cpu(device: str):
    """EMR's election, masks and restored weights."""
    wanted, given = block("cpu"), block(device)
    # Sums of task vectors must be of the same weights.
    given[1] = [task.to(device) for task in wanted[1]]
    arithmetic.merge_block(*wanted)
    arithmetic.run_block(*given, 0, "zero")
    outs = [torch.empty_like(wanted[0]), torch.empty_like(given[0])]
    arithmetic.restore_block(wanted[0], wanted[2], wanted[3][1], 0.7, outs[0])
    arithmetic.restore(given[0], given[2], [given[3][1]], [0.7], [outs[1]])
    for found, expected in ((given[2], wanted[2]), (given[3], wanted[3]), (outs[1], outs[0])):
        assert torch.equal(found.cpu(), expected)
    assert distance(given[4], wanted[4]) <= 1e-9


@on_devices
def test_switched_tasks_have_the_bits_of_the_cpu(device: str, tmp_path: Path):
    tasks = {}
    for seed, name in enumerate(("base", "one", "two")):
        torch.manual_seed(seed)
        GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=1)).save_pretrained(tmp_path / name)
        tasks[name] = str(tmp_path / name)
    config = {"base": tasks.pop("base"), "tasks": tasks, "method": "emr"}
    artifact = hf_ext.merge_checkpoints(config, tmp_path / "out", progress=False).path
    states = []
    for place in ("cpu", device):
        model = hf_ext.EMRModel.from_pretrained(artifact, "one", device=place).set_task("two").model
        states.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_every_class_is_here():
    known = {name.partition(",")[0] for name in MODELS}
    for room in (semanir_room, mrconv_room):
        things = {name: getattr(room, name) for name in room.__all__}
        models = {name for name, it in things.items() if isinstance(it, type) and issubclass(it, PreTrainedModel)}
        assert {name for name in models if not name.endswith("PreTrainedModel")} <= known
    assert DIT in known


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_on_the_meta_device_with_and_without_masks(name: str, training: bool):
    """Nobody looks at the values of a mask: a GPU would have to be waited for."""
    model, arguments = MODELS[name].build().to("meta").train(training), MODELS[name].arguments()
    plain = {key: value for key, value in arguments.items() if not key.startswith("attention_mask")}
    for given in (plain, *([arguments] if len(plain) < len(arguments) else [])):
        model.zero_grad()
        loss_of(model(**send_to_device(given, "meta"))).backward()
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        assert gradients and all(value.is_meta for value in gradients)
