"""SemanIR in the training loop: samples and scores, fine-tuning, adapters, compilation, the perceptual loss."""

import contextlib
import json
import logging

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, ConvNextImageProcessor, ResNetConfig, ResNetModel, ViTConfig, ViTModel

from hf_ext.errors import DataError, MissingColumn, UsageError
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor
from hf_ext.tasks import restoration
from hf_ext.tasks.degradations import jpeg, matlab_luma
from hf_ext.tasks.made_pictures import KINDS
from hf_ext.tasks.restoration import FeatureLoss, SemanIRTask
from hf_ext.training.models import initialize_from, refuse_lost_fields
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer
from tests.kit.studies import write_photos
from tests.training import tiny

from .diffusion_testing import losses, make_arguments

MODEL = {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4, "top_k": 8, "train_top_k": []}


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos", range(3), (20, 24, 3))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint to start from."""
    folder = tmp_path_factory.mktemp("base")
    SemanIRForImageRestoration(SemanIRConfig(**MODEL)).save_pretrained(folder)
    SemanIRImageProcessor().save_pretrained(folder)
    return folder


def run(tmp_path, photos, name="run", task=None, **changes):
    values = {"method": "semanir", "model": MODEL, "learning_rate": 2e-4, "per_device_train_batch_size": 2, **changes}
    metrics = tiny.run(task or SemanIRTask(patch_size=8), make_arguments(tmp_path / name, photos, **values))
    return metrics, losses(tmp_path / name)


def colour_picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8))


def restore(model):
    pixels = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(pixel_values=pixels).reconstruction


def test_bf16_and_checkpointing_train_near_the_plain_run(tmp_path, photos):
    scores, plain = run(tmp_path, photos, "plain")
    metrics, found = run(tmp_path, photos, "checkpointed", activation_checkpointing=True)
    assert metrics == pytest.approx(scores, rel=1e-4) and found == pytest.approx(plain, rel=1e-5)
    _, halved = run(tmp_path, photos, "halved", mixed_precision="bf16")
    assert halved != pytest.approx(plain, rel=1e-5)
    np.testing.assert_allclose(halved, plain, rtol=0.02)


@pytest.mark.slow
# torch's compiler reads deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_training_is_near_the_plain_one(tmp_path, photos):
    _, plain = run(tmp_path, photos, "plain")
    _, compiled = run(tmp_path, photos, "compiled", torch_compile=True)
    np.testing.assert_allclose(compiled, plain, rtol=1e-3)
    SemanIRForImageRestoration.from_pretrained(tmp_path / "compiled" / "snapshot")


def test_wrong_adapter_sections_are_refused(tmp_path, photos, base):
    for kind, section, fact in (
        (UsageError, {"peft_type": "LORRA"}, "LORRA"),
        (UsageError, {"peft_type": "LORA", "rank": 2}, "peft"),
        (ValueError, {"peft_type": "LORA", "target_modules": ["nothing_like_it"]}, "nothing_like_it"),
    ):
        with refused(kind, fact):
            run(tmp_path, photos, init_from=str(base), model={}, peft=section)


def test_an_adapter_changes_no_field_of_its_base_that_it_does_not_save(tmp_path, photos, base):
    base, peft = str(base), {"peft_type": "LORA", "r": 2, "target_modules": ["query_key_value"]}
    changes = {"top_k": 4, "image_mean": [0.5, 0.5, 0.5], "embed_dim": 8, "train_top_k": [2, 4]}
    with refused(DataError, "image_mean", "[0.5", "0.5"):
        run(tmp_path, photos, "changed", init_from=base, peft=peft, model=changes)
    assert not (tmp_path / "changed").exists()
    # As the base has them, or for the training alone.
    kept = {**MODEL, "train_top_k": [2, 4], "reconstruction_loss": "charbonnier", "interpolated_base": False}
    refuse_lost_fields(SemanIRTask(patch_size=8).build_model(kept, base), kept, base)
    # Without an adapter all of it is saved.
    model = SemanIRTask(patch_size=8).build_model(changes, base)
    assert (model.config.top_k, list(model.config.image_mean)) == (4, [0.5, 0.5, 0.5])


def test_a_field_that_an_older_base_lacks_has_its_default(tmp_path):
    base, changes = tmp_path / "base", {"interpolated_base": True}
    SemanIRForImageRestoration(SemanIRConfig(**MODEL, scale=2)).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    assert config.pop("interpolated_base") is False
    (base / "config.json").write_text(json.dumps(config))
    model = SemanIRTask(degradation={"kind": "bicubic"}, patch_size=8).build_model(changes, str(base))
    with refused(DataError, "model", "interpolated_base"):
        refuse_lost_fields(model, changes, str(base))


def test_weights_come_from_a_folder(tmp_path, base, caplog):
    task = SemanIRTask(patch_size=8)
    expected = SemanIRForImageRestoration.from_pretrained(base)
    built = task.build_model({}, str(base))
    assert_same_weights(built, expected)
    assert_same_answers(restore(built), restore(expected))
    with refused(DataError, "tensors", "section"):
        task.build_model({"mlp_ratio": 3.0}, str(base))
    # Only the head depends on the scale.
    with caplog.at_level(logging.WARNING):
        model = SemanIRTask({"kind": "bicubic"}, patch_size=8).build_model({"scale": 2}, str(base))
    assert "tensors are new" in caplog.text
    assert torch.equal(model.model.extractor.weight, expected.model.extractor.weight)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with refused(DataError, "SemanIRForImageRestoration"):
        initialize_from(model, str(tmp_path))


def test_a_strength_of_its_own_is_measured_and_ends_with_training(tmp_path, base):
    tuned = SemanIRForImageRestoration.from_pretrained(base)
    tuned.config.restoration_strength = "auto"
    tuned.save_pretrained(tmp_path)
    task = SemanIRTask(patch_size=8)
    model = task.build_model({}, str(tmp_path))
    assert model.config.restoration_strength == "auto"
    pixels = torch.rand(1, 3, 8, 8)
    task.loss(model, {"pixel_values": pixels, "labels": pixels}, 0)
    task.save_model(model, model.state_dict(), tmp_path / "trained")
    assert "restoration_strength" not in (tmp_path / "trained" / "config.json").read_text()


def test_samples_are_functions_of_the_generator():
    task = SemanIRTask({"kind": "gaussian_noise", "sigma": 50.0}, patch_size=8)
    seeds, example = [3, *range(40)], {"image": colour_picture()}
    again, *samples = (task.training_sample(example, np.random.default_rng(seed)) for seed in seeds)
    assert all(torch.equal(samples[3][name], again[name]) for name in again)
    assert not torch.equal(samples[4]["labels"], again["labels"])
    assert again["labels"].shape == again["pixel_values"].shape == (3, 8, 8)
    noise = torch.stack([sample["pixel_values"] - sample["labels"] for sample in samples])
    assert abs(float(noise.std()) * 255 - 50) < 2 and abs(float(noise.mean()) * 255) < 2


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_a_grey_picture_has_one_noise_in_a_colour_model(mode):
    """Three noises on one picture can be averaged: a score 1.9 dB too high on Set12."""
    task = SemanIRTask({"kind": "gaussian_noise", "sigma": 50.0}, patch_size=16)
    example = {"image": colour_picture().convert("L").convert(mode)}
    degraded, clean = task.degraded_example(example, 0)
    sample = task.training_sample(example, np.random.default_rng(0))
    for noise in (degraded - clean, (sample["pixel_values"] - sample["labels"]).permute(1, 2, 0).numpy()):
        assert noise.shape[2] == 3 and abs(noise.std() * 255 - 50) < 5
        assert np.ptp(noise, axis=2).max() < 1e-6
    noise = np.subtract(*task.degraded_example({"image": colour_picture()}, 0))
    assert abs(np.corrcoef(noise[..., 0].ravel(), noise[..., 1].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_made_pictures_are_functions_of_the_generator(kind):
    first, again, other = (np.asarray(KINDS[kind](40, np.random.default_rng(seed))) for seed in (1, 1, 2))
    assert first.shape == (40, 40, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    colours = len({tuple(colour) for colour in first.reshape(-1, 3)})
    assert (colours == 1) == (kind == "flat")
    # Blacks, whites and full colours are what they are drawn for.
    drawn = [np.asarray(KINDS[kind](40, np.random.default_rng(seed))) for seed in range(40)]
    assert {0, 255} <= {int(value) for image in drawn for value in (image.min(), image.max())}


@pytest.mark.parametrize(
    ("fields", "model", "made"),
    [
        ({"made_pictures": 0.5}, {}, (50, 110)),
        ({"made_pictures": 1.0}, {"num_channels": 1}, (160, 160)),
        ({"made_pictures": 1.0, "degradation": {"kind": "bicubic"}}, {"scale": 2}, (160, 160)),
        ({"permute_channels": True}, {}, (0, 0)),
    ],
)
def test_training_draws_made_pictures_and_orders_of_channels(fields, model, made):
    """The example has one colour that is hardly drawn otherwise."""
    example = {"image": Image.new("RGB", (40, 40), (250, 120, 3))}
    task = SemanIRTask(patch_size=8, **fields)
    task.build_model({**MODEL, **model}, None)
    labels = []
    for seed in range(160):
        sample, again = (task.training_sample(example, np.random.default_rng(seed)) for _ in range(2))
        assert torch.equal(sample["pixel_values"], again["pixel_values"])
        labels.append((255 * sample["labels"]).round().int())
    orders = [tuple(label[:, 0, 0].tolist()) for label in labels]
    own = [order for order in orders if sorted(order) == [3, 120, 250]]
    assert made[0] <= len(labels) - len(own) <= made[1]
    assert len(set(own)) == (6 if task.permute_channels else len(set(own[:1])))


def test_made_content_goes_on_exactly(tmp_path, photos):
    def steps(name, count):
        noise = {"kind": "gaussian_noise", "sigma": [0, 55], "clip": 0.5}
        task = SemanIRTask(noise, patch_size=8, made_pictures=0.5, permute_channels=True)
        return run(tmp_path, photos, name, task, max_steps=count, lr_scheduler_type="constant", save_steps=3)[1]

    whole, _, halves = steps("whole", 6), steps("halves", 3), steps("halves", 6)
    assert halves == whole and len(set(whole)) == 6


def test_grey_models_see_colour_as_matlab_does_where_that_is_asked_for():
    picture, options = colour_picture(), {"degradation": {"kind": "jpeg", "quality": 10}, "patch_size": 16}
    task, plain = SemanIRTask(**options, gray_from="matlab_y"), SemanIRTask(**options)
    for each in (task, plain):
        each.build_model({**MODEL, "num_channels": 1}, None)
    degraded, clean = task.degraded_example({"image": picture}, 0)
    luma = matlab_luma(np.asarray(picture))
    np.testing.assert_array_equal(np.rint(clean * 255), luma)
    np.testing.assert_array_equal(np.rint(degraded * 255), jpeg(luma, 10))
    gray = picture.convert("L")
    _, clean = task.degraded_example({"image": gray}, 0)
    np.testing.assert_array_equal(np.rint(clean[..., 0] * 255), np.asarray(gray))
    titles = dict.fromkeys(("degradation", "evaluation"), ["JPEG quality 10"])
    assert task.describe() == {**titles, "gray_from": "matlab_y"}
    _, clean = plain.degraded_example({"image": picture}, 0)
    np.testing.assert_array_equal(np.rint(clean[..., 0] * 255), np.asarray(gray))
    assert "gray_from" not in plain.describe()


@pytest.mark.parametrize(("step", "scale", "told"), [(1000, 0, True), (1000, 1, False), (100, 0, False)])
def test_a_training_that_learned_nothing_says_so(step, scale, told, caplog):
    """A correction of zero, after steps enough; the correction of a random model is no improvement, and is one."""
    task = SemanIRTask(patch_size=8)
    model = task.build_model(MODEL, None)
    batch = {name: torch.rand(1, 3, 8, 8) for name in ("pixel_values", "labels")}
    task.loss(model, batch, step)
    with torch.no_grad():
        model.reconstruction[0].weight.mul_(30 * scale)
    with caplog.at_level(logging.WARNING):
        task.evaluate_batch(model.eval(), [{"image": colour_picture()}], [0])
    assert [record.name for record in caplog.records] == ["hf_ext.tasks.restoration"] * told


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("kind", "fact", "error"), [("jpeg", "11x11", DataError), ("paired", "(20, 24)", UsageError)])
def test_an_example_that_cannot_be_scored_is_named(kind, fact, error, tmp_path, photos):
    task = SemanIRTask({"kind": kind, "quality": 10} if kind == "jpeg" else {"kind": kind})
    small = write_photos(tmp_path / "small", [0], (30, 9, 3)) / "0.png"
    example = {"image": Image.open(small), "lq": Image.open(small), "hq": Image.open(photos / "0.png")}
    assert all(image.load() for image in example.values())
    with refused(error, "example 7", small, fact):
        task.evaluate_batch(task.build_model(MODEL, None).eval(), [example], [7])


def test_evaluation_compiles_nothing():
    calls = []
    torch._dynamo.reset()
    task = SemanIRTask(patch_size=8)
    model = task.build_model({**MODEL, "depths": [1]}, None).eval()
    image = np.random.default_rng(0).random((12, 12, 3), dtype=np.float32)
    expected = task.restore(model, image)
    model.compile(backend=lambda module, inputs: calls.append(module) or module)
    np.testing.assert_allclose(task.restore(model, image), expected, atol=1e-6)
    assert not calls
    restore(model)
    assert calls


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_grey_of_16_bits_keeps_them_in_pairs_and_noise(mode, channels):
    """Steps smaller than 1/255 reach the model; degradations that are defined for 8 bits get 8."""
    deep = np.random.default_rng(0).integers(0, 65536, (24, 20), dtype=np.uint16)
    picture = Image.fromarray(deep) if mode == "I;16" else Image.fromarray(deep).convert("I").convert(mode)
    task = SemanIRTask({"kind": "paired"}, patch_size=8)
    task.config = SemanIRConfig(**MODEL, num_channels=channels)
    shallow = Image.fromarray(np.uint8(deep // 257))
    degraded, clean = task.degraded_example({"lq": shallow, "hq": picture}, 0)
    assert degraded.shape == clean.shape == (24, 20, channels)
    np.testing.assert_array_equal(clean, np.repeat(deep[..., None].astype(np.float32) / 65535, channels, axis=-1))
    np.testing.assert_array_equal(degraded[..., 0], np.asarray(shallow) / np.float32(255))
    sample = task.training_sample({"lq": shallow, "hq": picture}, np.random.default_rng(1))
    assert np.isin(np.rint(sample["labels"].numpy() * 65535).astype(int), deep.astype(int)).all()
    noise, compression = {"kind": "gaussian_noise", "sigma": 1.0}, {"kind": "jpeg", "quality": 100}
    for degradation, whole in ((noise, True), (compression, False)):
        noisy = SemanIRTask(degradation, patch_size=8)
        noisy.config = task.config
        _, target = noisy.degraded_example({"image": picture}, 0)
        assert (len(np.unique(target)) > 256) == whole
        assert np.abs(target[..., 0] - deep / 65535).max() <= (1e-7 if whole else 0.5 / 255 + 1e-6)


def test_the_data_must_have_the_columns_and_a_known_range():
    picture, pairs = Image.new("RGB", (9, 9)), SemanIRTask({"kind": "paired"}, patch_size=8)
    pairs.config = SemanIRConfig(**MODEL)
    for values in (np.float32([[0, 1]]), np.int32([[0, 65536]])):
        with refused(DataError, "65535"):
            pairs.degraded_example({"lq": Image.fromarray(values), "hq": Image.fromarray(values)}, 0)
    with refused(MissingColumn, "image", column="photo", option="task.image_column"):
        SemanIRTask(image_column="photo").training_sample({"image": picture}, np.random.default_rng(0))
    with refused(UsageError, "differs", "size"):
        pairs.training_sample({"lq": picture, "hq": Image.new("RGB", (9, 8))}, np.random.default_rng(0))


# The perceptual loss

SMALL = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "top_k": 8}


@pytest.fixture
def restorer(tmp_path):
    tiny_restorer(**SMALL).save_pretrained(tmp_path / "restorer")
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


def test_the_perceptual_loss_is_the_distance_of_feature_maps_relative_to_their_size(restorer):
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
def test_a_training_lowers_the_perceptual_loss(tmp_path, restorer):
    for path in write_photos(tmp_path / "photos", range(3), (24, 24, 3)).iterdir():
        Image.open(path).resize((48, 48), Image.Resampling.BICUBIC).save(path)
    measured, values = {}, {"model": SMALL, "max_steps": 30, "learning_rate": 3e-3}
    values["data"] = {"train": {"path": str(tmp_path / "photos")}}
    for weight in (1e-3, 10.0):
        task = SemanIRTask(patch_size=16, perceptual_model=str(restorer), perceptual_weight=weight)
        run(tmp_path, tmp_path / "photos", f"run-{weight}", task, **values)
        snapshot = tmp_path / f"run-{weight}" / "snapshot"
        model = SemanIRForImageRestoration.from_pretrained(snapshot).eval()
        clean = torch.nn.functional.interpolate(pictures(5), scale_factor=2, mode="bicubic").clamp(0, 1)
        noisy = clean + 25 / 255 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(6))
        with torch.no_grad():
            measured[weight] = float(FeatureLoss(str(restorer))(model(pixel_values=noisy).reconstruction, clean))
        assert not [name for name in model.state_dict() if "feature" in name]
        assert json.loads((snapshot / "training.json").read_text())["arguments"]["method"] == "semanir"
    assert measured[10.0] < 0.97 * measured[1e-3]


def test_a_network_that_sees_no_pictures_in_colours_is_refused(tmp_path):
    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    gray = tiny_restorer(**SMALL, num_channels=1)
    for name, network, facts in (("bert", BertModel(config), ["BertModel"]), ("gray", gray, ["pictures", "channels"])):
        network.save_pretrained(tmp_path / name)
        with refused(DataError, *facts):
            FeatureLoss(str(tmp_path / name))


def test_a_name_without_a_commit_is_told_its_commit(restorer, monkeypatch, caplog):
    FeatureLoss(str(restorer))
    # Others may have told transformers to say more.
    assert not [record for record in caplog.records if record.name.startswith("hf_ext")]
    monkeypatch.setattr(restoration, "pin_revision", lambda source: f"{source}@5c9e")
    monkeypatch.setattr(restoration, "split_revision", lambda pinned: (str(restorer), None))
    FeatureLoss("org/sees")
    assert "task.perceptual_model is org/sees@5c9e at present" in caplog.text
