"""Loads a staged folder as a stranger would. Run by `load_check` in a process of its own, never imported.

In that process hf_ext cannot be imported, so the code beside the weights is what loads. Arguments: the folder, and for
an artifact of EMR-Merging the folder of its base, unless that is inside.
"""

import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any


class _Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("hf_ext", "hf_ext_cli"):
            raise ModuleNotFoundError(f"{name}: a checkpoint must load where hf_ext is not installed", name=name)


def _load_model(loader: Any, folder: Path, complete: bool, **options: Any) -> None:
    _, info = loader.from_pretrained(folder, output_loading_info=True, **options)
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if complete and problems:
        raise SystemExit(f"{loader.__name__} does not load every weight of the folder: {problems}")


def _load_transformers(folder: Path) -> None:
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "_class_name" in config:
        import diffusers

        _load_model(getattr(diffusers, config["_class_name"]), folder, True)
        return
    (saved,) = config["architectures"]
    # load_check has verified that all code in the folder is that of the installed package
    auto_map = config.get("auto_map", {})
    for name, reference in auto_map.items():
        loader = getattr(transformers, name)
        if name == "AutoConfig":
            loader.from_pretrained(folder, trust_remote_code=True)
        elif name == "AutoModel" or reference.endswith(f".{saved}"):
            _load_model(loader, folder, reference.endswith(f".{saved}"), trust_remote_code=True)
        else:
            # another head may refuse this one's configuration, but its code must be there
            get_class_from_dynamic_module(reference, folder)
    if not auto_map:
        _load_model(getattr(transformers, saved), folder, True)


def _load_processors(folder: Path) -> None:
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    trust = any(folder.glob("*.py"))
    if (path := folder / "preprocessor_config.json").exists():
        is_sound = "feature_extractor_type" in json.loads(path.read_text(encoding="utf-8"))
        loader: Any = AutoFeatureExtractor if is_sound else AutoImageProcessor
        loader.from_pretrained(folder, trust_remote_code=trust)
    if (folder / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)


def _load_merged(folder: Path, base: str | None) -> None:
    """The merged model by its class, and the first task by the loader that travels with it."""
    import runpy

    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "_class_name" in config or config.get("auto_map"):
        _load_transformers(folder)
    else:
        # a base may leave weights of its class to be made anew, and so does what was merged on it
        _load_model(getattr(transformers, (config.get("architectures") or ["AutoModel"])[0]), folder, False)
    # load_check has verified that it is the installed package's
    loader = runpy.run_path(str(folder / "emr_loader.py"))
    task = next(iter(json.loads((folder / "emr.json").read_text(encoding="utf-8"))["tasks"]))
    if not loader["restore"](folder, task, base):
        raise SystemExit(f"the task {task} has no weights")


def _load_pipeline(folder: Path) -> None:
    """A diffusers pipeline by the code beside it, and then its networks once more, to see that they are complete."""
    from diffusers import DiffusionPipeline

    # load_check has verified that all code in the folder is that of the installed package
    pipeline = DiffusionPipeline.from_pretrained(folder, custom_pipeline="pipeline", trust_remote_code=True)
    for name, part in pipeline.components.items():
        if hasattr(part, "state_dict"):
            _load_model(type(part), folder / name, True)


def _load_adapter(folder: Path) -> None:
    import peft

    peft.PeftConfig.from_pretrained(str(folder))
    if not peft.load_peft_weights(str(folder), device="cpu"):
        raise SystemExit("the adapter holds no weights")


if __name__ == "__main__":
    sys.meta_path.insert(0, _Absent())
    directory = Path(sys.argv[1])
    if (directory / "emr.json").exists():
        _load_merged(directory, sys.argv[2] if len(sys.argv) > 2 else None)
    elif (directory / "adapter_config.json").exists():
        _load_adapter(directory)
    elif (directory / "model_index.json").exists():
        _load_pipeline(directory)
    else:
        _load_transformers(directory)
    _load_processors(directory)
