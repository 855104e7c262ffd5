"""hf_ext: NeurIPS 2024 methods as Hugging Face plugins. Importing it registers the models with transformers."""

from .emr import EMRModel, MergeConfig, merge_checkpoints
from .hub.checkpoints import open_checkpoint
from .hub.publish import push, stage
from .semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor, SemanIRModel

__version__ = "0.1.0"

__all__ = [
    "EMRModel",
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
