"""Pictures of what merged classifiers see: t-SNE of the features that heads get, and Grad-CAM of a ViT."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from matplotlib import pyplot
from PIL import Image
from sklearn.manifold import TSNE
from torch.utils.data import default_collate

from hf_ext.training import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import save_figure

FEATURE_METHODS = {"individual": "individual", "average": "average", "emr": "EMR", "onebit": "1-bit deltas"}
FEATURES, SEED = 200, 0
Models = Mapping[str, Callable[[str], Any]]
Examples = Mapping[str, tuple[Task, datasets.Dataset]]


@torch.no_grad()
def read_features(model: Any, task: Task, data: datasets.Dataset) -> np.ndarray:
    """Inputs of a classifier's head, `[examples, hidden]`."""
    found: list[torch.Tensor] = []
    hook = model.classifier.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    for start in range(0, len(data), 50):
        examples = data.select(range(start, min(start + 50, len(data))))
        batch = default_collate([task.training_sample(row, np.random.default_rng(0)) for row in examples])
        model(**{name: values for name, values in batch.items() if name != "labels"})
    hook.remove()
    return torch.cat(found).float().numpy()


def draw_features(models: Models, tasks: Examples, path: Path) -> None:
    """A column of t-SNE pictures for each task, a row for each method; colours are the true classes."""
    figure, axes = pyplot.subplots(len(models), len(tasks), figsize=(1.5 * len(tasks), 1.55 * len(models)))
    for row, (method, model_of) in enumerate(models.items()):
        for column, (name, (task, data)) in enumerate(tasks.items()):
            chosen = data.select(np.random.default_rng(SEED).permutation(len(data))[:FEATURES])
            features = read_features(model_of(name), task, chosen)
            perplexity = min(30, len(features) / 4)
            points = TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)
            axis = axes[row, column]
            axis.scatter(*points.T, c=chosen["label"], cmap="tab10", vmin=0, vmax=9, s=3)
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(name, fontsize=9)
            if column == 0:
                axis.set_ylabel(FEATURE_METHODS[method], fontsize=9)
    save_figure(figure, path, dpi=72)


def grad_cam(model: Any, pixels: torch.Tensor, label: int) -> np.ndarray:
    """
    Places of a class in a ViT: Grad-CAM (Selvaraju et al., https://arxiv.org/abs/1610.02391) at the input of the last
    block, `[patches, patches]` in [0, 1].
    """
    kept: list[torch.Tensor] = []
    # after the last block only the first token counts, so the others are looked at before it
    hook = model.vit.layers[-1].register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    with torch.enable_grad():
        logits = model(pixel_values=pixels[None].requires_grad_()).logits
        (slope,) = torch.autograd.grad(logits[0, label], kept[0])
    hook.remove()
    tokens, slope = kept[0][0, 1:].detach(), slope[0, 1:]
    found = (tokens * slope.mean(0)).sum(1).relu()
    side = int(len(found) ** 0.5)
    return (found / found.max().clamp_min(1e-12)).reshape(side, side).numpy()


def draw_attention_maps(models: Models, tasks: Examples, path: Path) -> None:
    """Of each task one test picture that its own model recognises, and beside it where each method's model looks."""
    figure, axes = pyplot.subplots(len(tasks), len(models) + 1, figsize=(1.5 * (len(models) + 1), 1.5 * len(tasks)))
    for row, (name, (task, data)) in enumerate(tasks.items()):
        picture, sample = find_recognised(models["individual"](name), task, data)
        axes[row, 0].imshow(picture)
        axes[row, 0].set_ylabel(name, fontsize=9)
        for column, (method, model_of) in enumerate(models.items(), 1):
            heat = grad_cam(model_of(name), sample["pixel_values"], int(sample["labels"]))
            heat = np.asarray(Image.fromarray(heat).resize(picture.size, Image.Resampling.BILINEAR))
            axes[row, column].imshow(picture.convert("L"), cmap="gray")
            axes[row, column].imshow(heat, cmap="jet", alpha=0.5, vmin=0, vmax=1)
            if row == 0:
                axes[row, column].set_title(FEATURE_METHODS[method], fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    save_figure(figure, path, dpi=70)


def find_recognised(model: Any, task: Task, data: datasets.Dataset) -> tuple[Image.Image, dict[str, Any]]:
    """The first picture that a model recognises, otherwise the first."""
    for index in range(len(data)):
        sample = task.training_sample(data[index], np.random.default_rng(0))
        with torch.no_grad():
            if model(pixel_values=sample["pixel_values"][None]).logits.argmax() == sample["labels"]:
                return data[index]["image"], sample
    return data[0]["image"], task.training_sample(data[0], np.random.default_rng(0))
