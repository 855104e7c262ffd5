"""The perceptual loss: against its definition written out, its gradient, in a training, and what is refused."""

import contextlib
import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, ConvNextImageProcessor, ResNetConfig, ResNetModel, ViTConfig, ViTModel

from hf_ext.errors import DataError, UsageError
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.tasks import restoration
from hf_ext.tasks.restoration import FeatureLoss, SemanIRTask
from hf_ext.training import train
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused
from tests.kit.studies import write_photos

from .diffusion_testing import make_arguments

SMALL = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "top_k": 8}


@pytest.fixture
def restorer(tmp_path):
    torch.manual_seed(0)
    SemanIRForImageRestoration(SemanIRConfig(**SMALL)).save_pretrained(tmp_path / "restorer")
    return tmp_path / "restorer"


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(tmp_path / "resnet")
    ConvNextImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]).save_pretrained(tmp_path / "resnet")
    return tmp_path / "resnet"


def pictures(seed: int, channels: int = 3) -> torch.Tensor:
    return torch.rand(2, channels, 16, 24, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def distance_by_definition(network, made: torch.Tensor, wanted: torch.Tensor) -> float:
    """The mean over the feature maps of ‖a - b‖₁ / ‖b‖₁."""
    maps = [network(pixel_values=one, output_hidden_states=True).hidden_states for one in (made, wanted)]
    assert len(maps[0]) == 3
    return np.mean([float((a - b).abs().sum() / b.abs().sum()) for a, b in zip(*maps, strict=True)])


def test_it_is_the_distance_of_feature_maps_relative_to_their_size(restorer):
    loss = FeatureLoss(str(restorer))
    model = SemanIRForImageRestoration.from_pretrained(restorer).eval()
    made, wanted = pictures(0), pictures(1)
    assert float(loss(made, wanted)) == pytest.approx(distance_by_definition(model, made, wanted), rel=1e-5)
    assert float(loss(wanted, wanted)) == pytest.approx(0, abs=1e-6)
    # A grey picture is seen as one in colours.
    gray = pictures(2, 1)
    assert float(loss(gray, wanted)) == pytest.approx(float(loss(gray.repeat(1, 3, 1, 1), wanted)), rel=1e-5)


def test_its_gradient_is_that_of_finite_differences_and_the_network_stays_as_it_is(restorer):
    loss = FeatureLoss(str(restorer)).double()
    made, wanted = pictures(0).double().requires_grad_(), pictures(1).double()
    loss(made, wanted).backward()
    direction = torch.randn(made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        step = 1e-6
        ahead, back = (float(loss(made + sign * step * direction, wanted)) for sign in (1, -1))
    assert float((made.grad * direction).sum()) == pytest.approx((ahead - back) / (2 * step), rel=1e-4)
    assert all(parameter.grad is None for parameter in loss.network.parameters())


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_network_of_transformers_sees_what_its_processor_makes(classifier, normalizes):
    """In whole precision, also where it was saved in half."""
    network = ResNetModel.from_pretrained(classifier)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    if not normalizes:
        mean, std = 0, 1
        network.half().save_pretrained(classifier)
        ConvNextImageProcessor(do_normalize=False).save_pretrained(classifier)
    made, wanted = pictures(0).requires_grad_(), pictures(1)
    expected = distance_by_definition(network.float().eval(), (made - mean) / std, (wanted - mean) / std)
    distance = FeatureLoss(str(classifier))(made, wanted)
    distance.backward()
    assert distance.item() == pytest.approx(expected, rel=1e-5) and made.grad.isfinite().all()


def test_an_evaluation_needs_no_network_and_a_training_refuses_one_before_its_first_step(tmp_path, restorer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    ConvNextImageProcessor().save_pretrained(tmp_path / "vit")
    data = datasets.Dataset.from_dict({})
    SemanIRTask(perceptual_model=str(tmp_path / "nothing")).build_model({}, str(restorer))
    sides = {"patch_size": 16, "degradation": {"kind": "bicubic"}, "perceptual_model": str(tmp_path / "vit")}
    for scale, words in ((2, None), (3, r"of pictures of 48 x 48 pixels.*Input image size")):
        task = SemanIRTask(**sides)
        task.read_data(data)
        with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
            task.build_model({**SMALL, "scale": scale}, None)
    # A configuration of other sizes than the weights.
    values = json.loads((restorer / "config.json").read_text())
    (restorer / "config.json").write_text(json.dumps({**values, "embed_dim": 16}))
    with refused(UsageError, "task.perceptual_model"):
        FeatureLoss(str(restorer))


@pytest.mark.slow
def test_a_training_lowers_it(tmp_path, restorer):
    for path in write_photos(tmp_path / "photos", range(3), (24, 24, 3)).iterdir():
        Image.open(path).resize((48, 48), Image.Resampling.BICUBIC).save(path)
    losses = {}
    for weight in (1e-3, 10.0):
        forget_accelerate()
        task = SemanIRTask(patch_size=16, perceptual_model=str(restorer), perceptual_weight=weight)
        folder, values = tmp_path / f"run-{weight}", {"method": "semanir", "model": SMALL, "max_steps": 30}
        values |= {"data": {"train": {"path": str(tmp_path / "photos")}}, "per_device_train_batch_size": 2}
        train(task, make_arguments(folder, tmp_path / "photos", learning_rate=3e-3, **values))
        model = SemanIRForImageRestoration.from_pretrained(folder / "snapshot").eval()
        clean = torch.nn.functional.interpolate(pictures(5), scale_factor=2, mode="bicubic").clamp(0, 1)
        noisy = clean + 25 / 255 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(6))
        with torch.no_grad():
            losses[weight] = float(FeatureLoss(str(restorer))(model(pixel_values=noisy).reconstruction, clean))
        assert not [name for name in model.state_dict() if "feature" in name]
        arguments = json.loads((folder / "snapshot" / "training.json").read_text())["arguments"]
        assert arguments["method"] == "semanir"
    assert losses[10.0] < 0.97 * losses[1e-3]


def test_what_cannot_be_is_refused_in_words(tmp_path):
    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with refused(DataError, "BertModel"):
        FeatureLoss(str(tmp_path / "bert"))
    gray = SemanIRForImageRestoration(SemanIRConfig(**SMALL, num_channels=1))
    gray.save_pretrained(tmp_path / "gray")
    with refused(DataError, "pictures", "channels"):
        FeatureLoss(str(tmp_path / "gray"))


def test_a_name_without_a_commit_is_told_its_commit(restorer, monkeypatch, caplog):
    FeatureLoss(str(restorer))
    # Others may have told transformers to say more.
    assert not [record for record in caplog.records if record.name.startswith("hf_ext")]
    monkeypatch.setattr(restoration, "pin_revision", lambda source: f"{source}@5c9e")
    monkeypatch.setattr(restoration, "split_revision", lambda pinned: (str(restorer), None))
    FeatureLoss("org/sees")
    assert "task.perceptual_model is org/sees@5c9e at present" in caplog.text
