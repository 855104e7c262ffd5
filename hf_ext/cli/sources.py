"""Parameter types for models: a folder, org/name[@revision], or the name of a released model."""

import difflib
from pathlib import Path
from typing import Any

import click

from .library import import_without_models

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


class Model(click.ParamType):  # type: ignore[type-arg]
    """A folder, org/name[@revision], or the name of a released model, which is converted to its folder."""

    name = "MODEL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return find_released(str(value))


class ModelFolder(click.Path):
    """A folder that exists, or the name of a released model."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(find_released(str(value)), param, ctx)


class NewFolder(click.Path):
    """A folder for a checkpoint; a name of a file of weights is refused, since a folder of that name helps no one."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        if path.suffix.lower() in WEIGHT_ENDINGS and not path.is_dir():
            self.fail(
                f"{path} has the name of a file, and a checkpoint is a folder: leave out {path.suffix}.", param, ctx
            )
        return super().convert(value, param, ctx)


def find_released(value: str) -> str:
    """
    The folder of a released model for its name; every other value unchanged, without an import if it is a path. A name
    similar to one of theirs is refused, since a request to a Hub may be slow.
    """
    if "/" in value or Path(value).exists():
        return value
    import_without_models()
    from hf_ext.hub.released import find_model, list_released

    found = find_model(value)
    names = [model.name for model in list_released()] if found == value else []
    if value not in names and (close := difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.85)):
        raise click.UsageError(
            f"no released model is called {value!r}; did you mean {close[0]!r}? `hf-ext models` lists them; give "
            "other models as a folder or org/name."
        )
    return found
