"""Diffusers pipelines of hf-ext; importing this package registers their names with diffusers.

After `import hf_ext.pipelines`, `DiffusionPipeline.from_pretrained` and the `AutoPipelineFor...` classes load our
pipelines without `trust_remote_code`.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from transformers.utils import logging

from . import disentangled_dit
from .disentangled_dit import DisentangledDiTImg2ImgPipeline, DisentangledDiTInpaintPipeline, DisentangledDiTPipeline

__all__ = ["DisentangledDiTImg2ImgPipeline", "DisentangledDiTInpaintPipeline", "DisentangledDiTPipeline"]


_verbosity = logging.get_verbosity()
# Of all pipelines of diffusers: without what transformers says of image processors that we do not use.
logging.set_verbosity_error()
try:
    auto_pipeline: Any = import_module("diffusers.pipelines.auto_pipeline")
finally:
    logging.set_verbosity(_verbosity)


def _register(place: ModuleType, name: str, value: Any) -> None:
    """Makes a name of ours one of diffusers', unless it has that name itself."""
    present = getattr(place, name, value)
    # The origin of a module or a class stays the same after a reload.
    if any(getattr(present, part, None) != getattr(value, part, None) for part in ("__module__", "__name__")):
        told = (
            f"diffusers {diffusers.__version__} has a {place.__name__}.{name}, {present!r}, and hf_ext one of its own"
        )
        raise ImportError(f"{told}; install a version of hf_ext that knows this diffusers.", name=place.__name__)
    setattr(place, name, value)


# What diffusers looks up when it loads a folder or a repository: the pipeline's class, and the room of its component.
_register(diffusers.pipelines, "disentangled_dit", disentangled_dit)
for _task, _class in (
    ("TEXT2IMAGE", DisentangledDiTPipeline),
    ("IMAGE2IMAGE", DisentangledDiTImg2ImgPipeline),
    ("INPAINT", DisentangledDiTInpaintPipeline),
):
    _register(diffusers, _class.__name__, _class)
    # What `AutoPipelineFor...` look up; `from_pipe` goes from each to the others.
    getattr(auto_pipeline, f"AUTO_{_task}_PIPELINES_MAPPING")["disentangled-dit"] = _class


def _prefer_installed(place: Any) -> None:
    """
    Lets `from_pretrained` of a class of diffusers load our pipelines by the installed class.

    `model_index.json` names file and class, `["pipeline", "DisentangledDiTPipeline"]`. That is the form in which
    diffusers finds the code in a repository by `trust_remote_code=True` alone, and with which it never looks among its
    own classes. Where the class is registered here, the list is read as its name: the installed code runs, no flag is
    needed, and code that came along is not run. The tests load both ways, which is how we see it if diffusers comes to
    read the file elsewhere.
    """
    if "_dict_from_json_file" in vars(place):
        # this package was reloaded
        return
    original = place._dict_from_json_file.__func__

    def read_index(cls: type, json_file: Any) -> dict[str, Any]:
        content: dict[str, Any] = original(cls, json_file)
        for name in __all__:
            if content.get("_class_name") == ["pipeline", name]:
                content["_class_name"] = name
        return content

    place._dict_from_json_file = classmethod(read_index)


for _place in ("Text2Image", "Image2Image", "Inpainting"):
    _prefer_installed(getattr(auto_pipeline, f"AutoPipelineFor{_place}"))
_prefer_installed(DiffusionPipeline)
