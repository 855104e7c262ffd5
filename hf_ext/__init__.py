"""hf_ext: NeurIPS 2024 methods as Hugging Face plugins. Importing it registers the models with transformers."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from .lazy import make_lazy

if TYPE_CHECKING:
    from .emr import EMRModel
    from .hub.checkpoints import open_checkpoint
    from .hub.publish import push, stage
    from .hub.released import released
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
    "released",
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
    "released": ".hub.released",
    "stage": ".hub.publish",
}


__getattr__, __dir__ = make_lazy(globals(), _MODULES)


def _wants_models() -> bool:
    """
    Whether this process wants the models registered: everyone, but for programs that read first what they were given.

    Half of the time of an import goes into transformers, which registration needs. HF_EXT_REGISTER_MODELS=0 leaves it
    out, for a Hub or a merge; each name above still imports what it needs, and a method is registered when its task is
    imported. `python -m hf_ext.training` cannot set it in time: Python imports this package, to find the program,
    before any line of the program runs. While it looks, it has put "-m" in place of the program's path, and only then;
    what follows "-m" on the command line is the module that is being looked for.
    """
    if os.environ.get("HF_EXT_REGISTER_MODELS", "1") == "0":
        return False
    words = sys.orig_argv
    looks_for = words[words.index("-m") + 1 :][:1] if sys.argv[:1] == ["-m"] and "-m" in words else []
    return looks_for != ["hf_ext.training"]


if _wants_models():
    import_module(".mrconv", __name__)
    import_module(".semanir", __name__)
