"""The task of transformers that a folder's model runs: `pipeline(task, model=...)` must load and feed it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..files import read_json_object
from .load_check import installed_room

# The tasks of our methods. A bare model runs some of transformers' too, but nobody means these.
_OWN = "image-restoration image-classification audio-classification text-generation text-classification fill-mask"
# What a kind of pipeline reads its input with, as the files beside the weights name it.
_READERS = {"audio": "feature_extractor_type", "image": "image_processor_type"}


def runnable_task(folder: Path, config: dict[str, Any], named: Iterable[str | None]) -> str | None:
    """The task that a card may promise: the first of those named that transformers can load and feed."""
    from transformers.pipelines import PIPELINE_REGISTRY

    tasks = [task for task in named if task is not None]
    if installed_room(str(config.get("model_type"))) is not None:
        tasks += _OWN.split()
    for task in tasks:
        about = PIPELINE_REGISTRY.supported_tasks.get(task)
        if about is not None and _loads(about["pt"], config) and _reads(folder, str(about.get("type"))):
            return task
    return None


def _loads(loaders: Iterable[Any], config: dict[str, Any]) -> bool:
    """True if an Auto class of a pipeline loads the saved class, or one of ours that is made of it."""
    from transformers import CONFIG_MAPPING

    model_type, names = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING or not isinstance(names, list):
        return False
    own = installed_room(model_type) is not None
    for loader in loaders:
        found = loader._model_mapping.get(CONFIG_MAPPING[model_type], ())
        for kind in found if isinstance(found, tuple) else (found,):
            # of our heads on other inputs each has the weights of the one that it extends
            made_of = {base.__name__ for base in (kind.__mro__ if own else (kind,))}
            if made_of & set(names):
                return True
    return False


def _reads(folder: Path, kind: str) -> bool:
    """True if a folder has a tokenizer, feature extractor or processor for the input of its model."""
    if kind == "text":
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    path = folder / "preprocessor_config.json"
    if kind not in _READERS:
        return path.is_file() or (folder / "processor_config.json").is_file()
    return path.is_file() and _READERS[kind] in read_json_object(path)
