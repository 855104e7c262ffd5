"""The classifier that measures generated images: its task trains, and what it publishes measures as it was trained."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_ext.metrics import ClassifierFeatures
from hf_ext.training import TrainingArguments, train
from hf_ext.training.arguments import build, read_yaml
from tests.kit.studies import EXAMPLES, module_loader

FOLDER = EXAMPLES / "disentangled_dit"
load = module_loader(FOLDER)
SIZES = {"widths": [8, 12, 16]}


@pytest.fixture
def classifier(load):
    return load("classifier")


def picture(label: int, seed: int, size: int = 16) -> Image.Image:
    """Class 0 is reddish, class 1 blueish."""
    pixels = np.random.default_rng(seed).integers(100, size=(size, size, 3), dtype=np.uint8)
    pixels[:, :, 2 * label] += 120
    return Image.fromarray(pixels)


def test_it_trains_and_its_snapshot_tells_classes_apart(classifier, tmp_path):
    rows = {"image": [picture(index % 2, index) for index in range(64)], "label": [index % 2 for index in range(64)]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "rows.parquet"))
    source = {"path": str(tmp_path / "rows.parquet")}
    arguments = TrainingArguments(
        method="classifier",
        output_dir=str(tmp_path / "run"),
        data={"train": source, "eval": source},
        task={"image_size": 16, "part": 16, "num_labels": 2},
        model=SIZES,
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        report_to="none",
    )
    metrics = train(classifier.ClassifierTask(**arguments.task), arguments)
    assert metrics["accuracy"] > 0.9
    network = ClassifierFeatures(str(tmp_path / "run" / "snapshot"))
    made = [picture(index % 2, 100 + index) for index in range(20)]
    features, classes = network.classify(made)
    assert features.shape == (20, 16)
    assert np.mean(classes == np.arange(20) % 2) > 0.9
    # Images of another size are resized.
    assert network.classify([picture(0, 7, size=24)])[0].shape == (1, 16)


def test_what_it_sees_in_training_is_what_its_processor_makes(classifier, tmp_path):
    task = classifier.ClassifierTask(image_size=16, part=13, smallest=16, num_labels=2)
    task.processor().save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for size in (16, 20):
        example = {"image": picture(1, 3, size), "label": 1}
        expected = processor(example["image"], return_tensors="pt")["pixel_values"][0]
        # The processor rounds as the resized image does.
        torch.testing.assert_close(task.encode(example)["pixel_values"], expected, atol=1e-5, rtol=0)
    batch = default_collate([task.training_sample(example, np.random.default_rng(index)) for index in range(8)])
    assert batch["pixel_values"].shape == (8, 3, 13, 13) and batch["pixel_values"].std(0).max() > 0.1
    # One image of three has lost detail on its way through a smaller one.
    task = classifier.ClassifierTask(image_size=16, part=16, smallest=4, num_labels=2)
    seen = [task.training_sample(example, np.random.default_rng(index))["pixel_values"] for index in range(20)]
    sharp = task.encode(example)["pixel_values"]
    assert 8 < sum(torch.equal(image, sharp) or torch.equal(image.flip(-1), sharp) for image in seen) < 20
    with pytest.raises(ValueError, match="smallest must be from 1 to image_size, 16; got 17"):
        build(classifier.ClassifierTask, {"image_size": 16, "part": 16, "smallest": 17}, "task")


@pytest.mark.parametrize("recipe", ["classifier", "judge"])
def test_a_recipe_builds_a_network_that_transformers_loads(classifier, tmp_path, recipe):
    arguments = build(TrainingArguments, read_yaml(FOLDER / f"{recipe}.yaml"))
    task = build(classifier.ClassifierTask, arguments.task, "task")
    model = task.build_model(arguments.model, None)
    assert model.num_parameters() < 2_000_000
    task.save_model(model, model.state_dict(), tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixels).logits, model.eval()(pixels).logits)
    assert loaded.config.id2label[6] == "frog"
    # Smoothed labels cost in training alone; of what is not training only the middle counts.
    labels = torch.tensor([1, 2])
    network = classifier.JudgeForImageClassification(classifier.JudgeConfig(widths=[4, 4], num_labels=3)).eval()
    found = network(pixels, labels=labels)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(found.logits, labels))
    border = pixels.clone()
    border[:, :, :2] = 0
    torch.testing.assert_close(network(border).logits, found.logits)
    assert not torch.allclose(network.train()(border).logits, network(pixels).logits)
    # Ten views: mirroring changes nothing, corners count, and the features that are kept are the middle's.
    network.eval().config.views = True
    seen = network(pixels).logits
    torch.testing.assert_close(network(pixels.flip(3)).logits, seen)
    assert not torch.allclose(network(border).logits, seen)
    with pytest.raises(ValueError, match="part must be from 8 to image_size, 32; got 33"):
        build(classifier.ClassifierTask, {"part": 33}, "task")
