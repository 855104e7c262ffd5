"""Loads what was published as those do who pull it. Run by `load_check` in a process of its own, never imported.

Arguments: "absent" or "installed"; the repository, which is in the cache; for an artifact of EMR-Merging the folder of
its base, unless that is inside. Where hf_ext is absent it cannot be imported, so the code beside the weights is what
loads; where it is installed, its classes load and no code is trusted.
"""

import importlib
import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any

IS_ABSENT = sys.argv[1:2] != ["installed"]


class _Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("hf_ext", "hf_ext_cli"):
            raise ModuleNotFoundError(f"{name}: a checkpoint must load where hf_ext is not installed", name=name)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _load_model(loader: Any, source: Any, complete: bool, allowed: Any = "", **options: Any) -> None:
    _, info = loader.from_pretrained(source, output_loading_info=True, **options)
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value and key != allowed}
    if complete and problems:
        raise SystemExit(f"{loader.__name__} does not load every weight of the folder: {problems}")


def _find_class(library: Any, names: Any) -> tuple[str, Any]:
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or not hasattr(library, name):
        told = "so it cannot be loaded to see if it is whole; --no-check (check=False) uploads it without that"
        raise SystemExit(f"config.json names {names!r} in place of one class of {library.__name__}, {told}")
    return name, getattr(library, name)


def _load_transformers(repo_id: str, folder: Path, trust: dict[str, bool]) -> None:
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = _read(folder / "config.json")
    if "_class_name" in config:
        import diffusers

        _load_model(_find_class(diffusers, config["_class_name"])[1], repo_id, True, allowed="unexpected_keys")
        return
    auto_map = config.get("auto_map", {})
    saved = (config["architectures"] if auto_map else _find_class(transformers, config.get("architectures")))[0]
    for name, reference in auto_map.items():
        loader = getattr(transformers, name)
        if name == "AutoConfig":
            loader.from_pretrained(repo_id, **trust)
        elif name == "AutoModel" or reference.endswith(f".{saved}"):
            _load_model(loader, repo_id, reference.endswith(f".{saved}"), **trust)
        elif trust:
            # another head may refuse this one's configuration, but its code must be there
            get_class_from_dynamic_module(reference, repo_id)
    if not auto_map:
        # such as those of the heads that BERT was trained with
        _load_model(getattr(transformers, saved), repo_id, True, allowed="unexpected_keys")


def _load_processors(repo_id: str, folder: Path, trust: dict[str, bool]) -> None:
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    if (path := folder / "preprocessor_config.json").exists():
        is_sound = "feature_extractor_type" in _read(path)
        loader: Any = AutoFeatureExtractor if is_sound else AutoImageProcessor
        loader.from_pretrained(repo_id, **trust)
    if (folder / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(repo_id, **trust)


def _load_tasks(repo_id: str, folder: Path, trust: dict[str, bool]) -> None:
    """The pipelines of transformers: those whose code came along, and the one that our card names."""
    from huggingface_hub import ModelCard
    from transformers import pipeline

    tasks = list(_read(folder / "config.json").get("custom_pipelines") or {})
    card = ModelCard.load(folder / "README.md")
    named = card.data.get("pipeline_tag")
    # a card that somebody wrote may say what a website shows; ours says what pipeline(...) runs
    if "<!-- Written by hf-ext." in card.text and card.data.get("library_name") == "transformers" and named:
        tasks.append(named)
    make: Any = pipeline
    for task in dict.fromkeys(tasks):
        make(task, model=repo_id, **trust)


def _load_merged(repo_id: str, folder: Path, base: str | None, trust: dict[str, bool]) -> None:
    """The merged model by its class, and the first task: by the loader that travels with it, or by `EMRModel`."""
    import runpy

    import transformers

    config, manifest = _read(folder / "config.json"), _read(folder / "emr.json")
    if manifest.get("deltas"):
        # nothing at the root
        pass
    elif "_class_name" in config or config.get("auto_map"):
        _load_transformers(repo_id, folder, trust)
    else:
        # a base may leave weights of its class to be made anew, and so does what was merged on it
        _load_model(getattr(transformers, (config.get("architectures") or ["AutoModel"])[0]), repo_id, False)
    task = next(iter(manifest["tasks"]))
    if IS_ABSENT:
        # load_check has verified that it is the installed package's
        loader = runpy.run_path(str(folder / "emr_loader.py"))
        if not loader["restore"](folder, task, base):
            raise SystemExit(f"the task {task} has no weights")
    elif manifest["library"] != "peft":
        # the model that an adapter is for is not in this cache
        from hf_ext import EMRModel

        EMRModel.from_pretrained(repo_id, task)


def _load_pipeline(repo_id: str, folder: Path, trust: dict[str, bool]) -> None:
    """A diffusers pipeline by its code, and then its networks once more, to see that they are complete."""
    from diffusers import DiffusionPipeline

    if not IS_ABSENT:
        importlib.import_module("hf_ext.pipelines")
    pipeline = DiffusionPipeline.from_pretrained(repo_id, **trust)
    for name, part in pipeline.components.items():
        if hasattr(part, "state_dict"):
            _load_model(type(part), folder / name, True)


def main(repo_id: str, base: str | None = None) -> None:
    """Loads the repository by each way that there is for its kind."""
    from huggingface_hub import snapshot_download

    directory = Path(snapshot_download(repo_id))
    # load_check has verified that all code in the folder is that of the installed package
    trust = {"trust_remote_code": True} if IS_ABSENT and any(directory.rglob("*.py")) else {}
    if (directory / "emr.json").exists():
        _load_merged(repo_id, directory, base, trust)
    elif (directory / "adapter_config.json").exists():
        import peft

        peft.PeftConfig.from_pretrained(str(directory))
        if not peft.load_peft_weights(str(directory), device="cpu"):
            raise SystemExit("the adapter holds no weights")
    elif (directory / "model_index.json").exists():
        _load_pipeline(repo_id, directory, trust)
    else:
        _load_transformers(repo_id, directory, trust)
        _load_tasks(repo_id, directory, trust)
    _load_processors(repo_id, directory, trust)


if __name__ == "__main__":
    if IS_ABSENT:
        sys.meta_path.insert(0, _Absent())
    else:
        importlib.import_module("hf_ext")
    try:
        main(*sys.argv[2:])
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
