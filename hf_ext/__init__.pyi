from .emr import EMRModel as EMRModel
from .hub.checkpoints import open_checkpoint as open_checkpoint
from .hub.publish import push as push, stage as stage
from .hub.released import released as released
from .merging import MergeConfig as MergeConfig, merge_checkpoints as merge_checkpoints
from .mrconv import (
    MRConvCache as MRConvCache,
    MRConvConfig as MRConvConfig,
    MRConvFeatureExtractor as MRConvFeatureExtractor,
    MRConvForAudioClassification as MRConvForAudioClassification,
    MRConvForCausalLM as MRConvForCausalLM,
    MRConvForImageClassification as MRConvForImageClassification,
    MRConvForMaskedLM as MRConvForMaskedLM,
    MRConvForRetrieval as MRConvForRetrieval,
    MRConvForSequenceClassification as MRConvForSequenceClassification,
    MRConvForTokenClassification as MRConvForTokenClassification,
    MRConvModel as MRConvModel,
    MRConvNextConfig as MRConvNextConfig,
    MRConvNextForImageClassification as MRConvNextForImageClassification,
    MRConvNextImageProcessor as MRConvNextImageProcessor,
    MRConvNextModel as MRConvNextModel,
)
from .pipelines import DisentangledDiTPipeline as DisentangledDiTPipeline
from .restoration.tiles import restore_image as restore_image
from .semanir import (
    SemanIRConfig as SemanIRConfig,
    SemanIRForImageRestoration as SemanIRForImageRestoration,
    SemanIRImageProcessor as SemanIRImageProcessor,
    SemanIRModel as SemanIRModel,
)

__all__: list[str]
__version__: str
