"""hf_ext: NeurIPS 2024 methods as Hugging Face plugins. Importing it registers the models with transformers."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .emr import EMRModel
    from .hub.checkpoints import open_checkpoint
    from .hub.publish import push, stage
    from .merging import MergeConfig, merge_checkpoints
    from .mrconv import (
        MRConvCache,
        MRConvConfig,
        MRConvFeatureExtractor,
        MRConvForAudioClassification,
        MRConvForCausalLM,
        MRConvForRetrieval,
        MRConvForSequenceClassification,
        MRConvModel,
        MRConvNextConfig,
        MRConvNextForImageClassification,
        MRConvNextImageProcessor,
        MRConvNextModel,
    )
    from .semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor, SemanIRModel

__version__ = "0.1.0"

__all__ = [
    "EMRModel",
    "MRConvCache",
    "MRConvConfig",
    "MRConvFeatureExtractor",
    "MRConvForAudioClassification",
    "MRConvForCausalLM",
    "MRConvForRetrieval",
    "MRConvForSequenceClassification",
    "MRConvModel",
    "MRConvNextConfig",
    "MRConvNextForImageClassification",
    "MRConvNextImageProcessor",
    "MRConvNextModel",
    "MergeConfig",
    "SemanIRConfig",
    "SemanIRForImageRestoration",
    "SemanIRImageProcessor",
    "SemanIRModel",
    "__version__",
    "merge_checkpoints",
    "open_checkpoint",
    "push",
    "stage",
]

# What is imported when it is first used.
_MODULES = {
    "EMRModel": ".emr",
    "MRConvCache": ".mrconv",
    "MRConvConfig": ".mrconv",
    "MRConvFeatureExtractor": ".mrconv",
    "MRConvForAudioClassification": ".mrconv",
    "MRConvForCausalLM": ".mrconv",
    "MRConvForRetrieval": ".mrconv",
    "MRConvForSequenceClassification": ".mrconv",
    "MRConvModel": ".mrconv",
    "MRConvNextConfig": ".mrconv",
    "MRConvNextForImageClassification": ".mrconv",
    "MRConvNextImageProcessor": ".mrconv",
    "MRConvNextModel": ".mrconv",
    "MergeConfig": ".merging",
    "SemanIRConfig": ".semanir",
    "SemanIRForImageRestoration": ".semanir",
    "SemanIRImageProcessor": ".semanir",
    "SemanIRModel": ".semanir",
    "merge_checkpoints": ".merging",
    "open_checkpoint": ".hub.checkpoints",
    "push": ".hub.publish",
    "stage": ".hub.publish",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _reads_first() -> bool:
    """
    Whether this process is a program of ours that wants the models later, or never.

    `hf-ext` says so itself. `python -m hf_ext.training` cannot: Python imports this package, to find the program in
    it, before any line of the program runs. While it looks, it has put "-m" in place of the program's path, and only
    then; what follows "-m" on the command line is the module that is being looked for.
    """
    main = sys.modules.get("hf_ext_cli.main")
    if main is not None:
        return not main.builds_models
    words = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in words and words[words.index("-m") + 1 :][:1] == ["hf_ext.training"]


# Importing the package registers the models with transformers, but for programs that read what they were given first,
# and find its mistakes in a tenth of the time. A method of theirs is registered when its task is imported.
if not _reads_first():
    import_module(".mrconv", __name__)
    import_module(".semanir", __name__)
