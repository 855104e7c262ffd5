"""hf_ext: NeurIPS 2024 methods as Hugging Face plugins. Importing it registers the models with transformers."""

import os
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


# Registration needs transformers, which takes most of the time of the import. A process that builds no model, such as
# a Hub or a merge, may leave it out with HF_EXT_REGISTER_MODELS=0; each name above still imports what it needs.
if os.environ.get("HF_EXT_REGISTER_MODELS", "1") != "0":
    import_module(".mrconv", __name__)
    import_module(".semanir", __name__)
