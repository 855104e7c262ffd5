"""Adapters and frozen parts: what is saved is what was trained, running statistics included."""

import copy

import peft
import pytest
import torch

from hf_ext.mrconv import MRConvForSequenceClassification
from tests.mrconv.mrconv_testing import SIZES, make_model, make_signal

# LNTuning warns of every norm that is no nn.LayerNorm.
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")


def shifted_data(length: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Waves that lie where no batch lay before: their statistics are far from the running ones."""
    waves = 3 + 2 * make_signal(24, length, 1, dtype=torch.float32)
    return waves, (waves.mean((1, 2)) > 3).long()


@torch.no_grad()
def make_base(**fields) -> MRConvForSequenceClassification:
    model = make_model(**{**SIZES, "hidden_size": 8, **fields}).train()
    for _ in range(3):
        model(input_values=make_signal(8, 30, 1, dtype=torch.float32))
    return model.eval()


def train(model: torch.nn.Module, steps: int = 12) -> None:
    waves, labels = shifted_data()
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=3e-2)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_values=waves, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_values=shifted_data()[0]).logits


def running(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def moved(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in running(model).items() if not value.equal(before[name])}


CLASSIFIER = {"modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}
POINTWISE = {"target_modules": ["pointwise"], **CLASSIFIER}
ADAPTERS = {
    "lora": peft.LoraConfig(**POINTWISE),
    "dora": peft.LoraConfig(use_dora=True, **POINTWISE),
    # Trains the shifts of the normalisations too, and saves them without their statistics.
    "lora and all biases": peft.LoraConfig(bias="all", **POINTWISE),
    "ia3": peft.IA3Config(feedforward_modules=["pointwise"], **POINTWISE),
    "loha": peft.LoHaConfig(**POINTWISE),
    "lora and norms": peft.LoraConfig(**{**POINTWISE, "modules_to_save": ["norm", "final_norm", "classifier"]}),
    "norms": peft.LNTuningConfig(target_modules=["norm", "final_norm"], **CLASSIFIER),
}


@pytest.mark.parametrize(
    ("kind", "fields"), [*((kind, {}) for kind in ADAPTERS), ("lora", {"bidirectional": True, "prenorm": False})]
)
def test_an_adapter_gives_the_same_answers_after_reload(kind, fields, tmp_path):
    make_base(**fields).save_pretrained(tmp_path / "base")
    load = MRConvForSequenceClassification.from_pretrained
    model = peft.get_peft_model(load(tmp_path / "base"), copy.deepcopy(ADAPTERS[kind]))
    before = running(model)
    train(model)
    # Where the norms are trained, their statistics move, and are saved with them.
    trained = {name for name in before if "modules_to_save" in name or "ln_tuning_layers" in name}
    assert moved(model, before) == trained and bool(trained) == (kind in ("lora and norms", "norms"))
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    assert (logits(load(tmp_path / "base")) - expected).abs().max() > 0.1
    if kind != "norms":
        # Merged into a plain model, and from there through the disk.
        plain = loaded.merge_and_unload()
        torch.testing.assert_close(logits(plain), expected, atol=1e-4, rtol=1e-4)
        plain.save_pretrained(tmp_path / "plain")
        torch.testing.assert_close(logits(load(tmp_path / "plain")), logits(plain), atol=1e-5, rtol=1e-5)


def test_norms_wrapped_by_peft_are_trained_as_norms_of_a_whole_model():
    """In training mode they take the statistics of the batch; switched off, they are the base's again."""
    config = peft.LoraConfig(target_modules=["pointwise"], modules_to_save=["norm", "final_norm"])
    model = peft.get_peft_model(make_base(), config).train()
    whole = make_base().train()
    waves = shifted_data()[0]
    torch.testing.assert_close(model(input_values=waves).logits, whole(input_values=waves).logits)
    found = {name.replace(".modules_to_save.default", ""): value for name, value in running(model).items()}
    for name, value in running(whole).items():
        torch.testing.assert_close(found[f"base_model.model.{name}"], value)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(make_base()))


@pytest.mark.parametrize("merged", [False, True])
def test_a_frozen_model_keeps_its_statistics_and_trains_as_it_predicts(merged):
    model = make_base()
    if merged:
        model.reparameterize()
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_buffers()}
    waves, labels = shifted_data()
    torch.testing.assert_close(model.train()(input_values=waves, labels=labels).logits, logits(model))
    train(model)
    assert all(value.equal(before[name]) for name, value in model.named_buffers())


def test_each_normalisation_is_frozen_or_trained_by_itself():
    model = make_base()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    # A shift alone does not bring the statistics along.
    model.model.layers[1].norm.weight.requires_grad_(False)
    before = running(model)
    train(model)
    prefixes = {name.rpartition(".")[0] for name in moved(model, before)}
    assert prefixes == {"model.layers.1.convolution.norm", "model.final_norm"}
    # Statistics are settled by passes without gradients in training mode, as of a weight average.
    model, before = make_base().train(), running(make_base())
    with torch.no_grad():
        model(input_values=shifted_data()[0])
    assert moved(model, before) == before.keys()


def test_adapters_train_through_frozen_branches_as_through_merged_kernels():
    """The kept kernel of a frozen layer gives the gradients that the branches would give."""
    config = peft.LoraConfig(target_modules=["pointwise"], init_lora_weights=False)
    waves, labels = shifted_data()
    found = []
    for merged in (False, True):
        torch.manual_seed(0)
        base = make_base().double()
        model = peft.get_peft_model(base.reparameterize() if merged else base, config).double().train()
        model(input_values=waves.double(), labels=labels).loss.backward()
        found.append([value.grad for value in model.parameters() if value.requires_grad])
    torch.testing.assert_close(*found, atol=1e-10, rtol=1e-8)
    assert all(gradient.abs().max() > 1e-6 for gradient in found[0])
