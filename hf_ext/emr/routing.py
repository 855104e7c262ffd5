"""Which task a sample is of, when nobody says: the nearest centroid of the tasks in features of the base."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import AutoConfig, AutoModel

from ..files import whole_file
from .artifact import ROUTER_FILE
from .weights import TaskWeights


def check_examples(examples: Collection[str], tasks: list[str], is_saved: bool) -> None:
    """Refuses examples of unknown tasks, and a router to be saved that would not know all."""
    if unknown := sorted(set(examples) - set(tasks)):
        raise ValueError(f"there are examples of {unknown}; the tasks are {tasks}")
    if is_saved and (missing := sorted(set(tasks) - set(examples))):
        raise ValueError(
            f"there are no examples of {missing}; a router that is saved needs some of {tasks}: give them, or set "
            "save=False."
        )


class TaskRouter:
    """Nearest centroid of tasks: argmin_t Σ_j ((f_j - c_tj) / s_j)²."""

    def __init__(self, tasks: list[str], centroids: torch.Tensor, scale: torch.Tensor) -> None:
        fits = scale.ndim == 1 and centroids.shape == (len(tasks), *scale.shape) and bool((scale > 0).all())
        if not tasks or not fits:
            raise ValueError(
                f"a router of {len(tasks)} tasks has centroids {tuple(centroids.shape)} and a scale "
                f"{tuple(scale.shape)}: (tasks, features) and positive (features,) are needed; fit it again"
            )
        self.tasks = tasks
        self.centroids = centroids
        self.scale = scale

    @classmethod
    def fit(cls, features: Mapping[str, torch.Tensor]) -> TaskRouter:
        """Learns the centroids from a few samples of each task."""
        shapes = {task: tuple(values.shape) for task, values in features.items()}
        fits = all(len(shape) == 2 and shape[0] > 0 for shape in shapes.values())
        if not shapes or not fits or len({shape[1] for shape in shapes.values()}) != 1:
            raise ValueError(f"features have the shapes {shapes}; (samples, features) is needed, with samples of each")
        values = {task: value.float().cpu() for task, value in features.items()}
        centroids = torch.stack([value.mean(0) for value in values.values()])
        spread = torch.cat([value - value.mean(0) for value in values.values()]).square().mean(0).sqrt()
        # With one sample of each task there is no spread; a feature that never varies tells nothing.
        typical = spread.mean() if bool(spread.any()) else torch.tensor(1.0)
        return cls(list(values), centroids, spread.clamp(min=float(typical) * 1e-3))

    def predict(self, features: torch.Tensor) -> list[str]:
        """Chooses a task for each sample."""
        if features.ndim != 2 or features.shape[1] != len(self.scale):
            raise ValueError(f"features have shape {tuple(features.shape)}; (samples, {len(self.scale)}) is needed")
        scaled, centroids = features.float().cpu() / self.scale, self.centroids / self.scale
        nearest = torch.cdist(scaled, centroids).argmin(1)
        return [self.tasks[index] for index in nearest.tolist()]

    def save(self, folder: str | Path) -> Path:
        """Writes `router.safetensors`, complete or not at all."""
        path = Path(folder) / ROUTER_FILE
        tensors = {"centroids": self.centroids.contiguous(), "scale": self.scale.contiguous()}
        with whole_file(path) as file:
            file.write(save(tensors, metadata={"format": "pt", "tasks": json.dumps(self.tasks)}))
        return path

    def require_tasks(self, tasks: list[str]) -> TaskRouter:
        """Refuses to tell apart other tasks than there are: it would never answer some, or name one that is gone."""
        if set(self.tasks) != set(tasks):
            raise ValueError(f"the router tells apart {self.tasks}, the artifact has {tasks}: call fit_router again")
        return self

    @classmethod
    def load(cls, folder: str | Path) -> TaskRouter:
        """Reads what [`~TaskRouter.save`] wrote."""
        path = Path(folder) / ROUTER_FILE
        if not path.is_file():
            raise ValueError(f"{folder}: there is no {ROUTER_FILE}; fit a router first, or name the tasks")
        try:
            with safe_open(path, framework="pt") as file:
                tasks = json.loads((file.metadata() or {})["tasks"])
                centroids, scale = file.get_tensor("centroids"), file.get_tensor("scale")
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: not a router ({error!r}); fit and save it again") from error
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise ValueError(f"{path}: the names of the tasks are {tasks!r:.80}; fit and save it again")
        return cls(tasks, centroids.clone(), scale.clone())


class BaseFeatures:
    """Features of the base: its last hidden state, averaged over tokens or places. The base was trained on more than
    the tasks, and tells them apart better than the elected model: of ten TweetEval tasks 61 % of the tweets found
    their own by features of the base, 34 % by those of the elected model."""

    def __init__(
        self,
        weights: TaskWeights,
        *,
        trust_remote_code: bool,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        if (library := weights.manifest.library) != "transformers":
            raise ValueError(
                f"the router needs a transformers model, this is one of {library}: name the tasks instead"
            )
        config = AutoConfig.from_pretrained(weights.folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            kind = type(AutoModel.from_config(config, trust_remote_code=trust_remote_code))
        state = {name: tensor.clone() for name, tensor in weights.base_tensors().items()}
        model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype or "auto")
        self._model: Any = model.to(device).eval()

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Computes features."""
        output = self._model(**{name: value for name, value in batch.items() if name != "labels"})
        hidden: torch.Tensor = output.last_hidden_state.float()
        if hidden.ndim == 4:  # [samples, channels, height, width]
            return hidden.mean((2, 3)).cpu()
        mask = batch.get("attention_mask")  # [samples, tokens]
        if mask is None or mask.shape != hidden.shape[:2]:
            return hidden.mean(1).cpu()
        weights: torch.Tensor = mask[..., None].to(hidden)
        return ((hidden * weights).sum(1) / weights.sum(1).clamp(min=1)).cpu()
