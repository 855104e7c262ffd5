"""Packages of `pip install "hf-ext[...]"`, beyond those that load and run a model."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# Optional modules and the extras that install them.
EXTRAS = {
    "av": "audio",
    "gradio": "app",
    "matplotlib": "plots",
    "numba": "fast",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pillow_heif": "images",
    "rawpy": "images",
    "soundfile": "audio",
    "soxr": "audio",
    "starlette": "hub",
    "tensorboard": "train",
    "uvicorn": "hub",
}


def check_installed(*modules: str) -> None:
    """Looks for modules of extras before long work begins; the `ImportError` of one has the command to install it."""
    for module in modules:
        if find_spec(module) is None:
            raise ImportError(explain_missing(module))


def import_extra(module: str) -> ModuleType:
    """A module of an extra, or the `ImportError` of [`check_installed`]."""
    check_installed(module)
    return import_module(module)


def explain_missing(module: str | None) -> str | None:
    """The extra to install for a module, or one inside of it, that could not be imported; `None` if none brings it."""
    package = (module or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"this needs {package}, which is not installed: pip install 'hf-ext[{EXTRAS[package]}]'"
