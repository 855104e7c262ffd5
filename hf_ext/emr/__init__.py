"""EMR-Merging (Huang et al., NeurIPS 2024): one model and a 1-bit mask per task, as arithmetic, format and use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .using_emr import EMRModel

__all__ = ["EMRModel"]


def __getattr__(name: str) -> Any:
    # Arithmetic and format, which merging uses, need no model and so no transformers.
    if name == "EMRModel":
        from .using_emr import EMRModel

        return EMRModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
