# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv: multi-resolution long convolutions for sequences and images. Importing it registers the Auto classes."""

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForNextSentencePrediction,
    AutoModelForSequenceClassification,
)

from .configuration_mrconv import MRConvConfig
from .configuration_mrconvnext import MRConvNextConfig
from .feature_extraction_mrconv import MRConvFeatureExtractor
from .image_processing_mrconvnext import MRConvNextImageProcessor
from .modeling_layers_mrconv import MRConvLayer, MRConvPreTrainedModel
from .modeling_mrconv import (
    MRConvForAudioClassification,
    MRConvForCausalLM,
    MRConvForImageClassification,
    MRConvForRetrieval,
    MRConvForSequenceClassification,
    MRConvModel,
)
from .modeling_mrconvnext import MRConvNextForImageClassification, MRConvNextModel, MRConvNextPreTrainedModel
from .streaming_mrconv import MRConvCache

from hf_ext.fast import mrconv_gradients, mrconv_kept_kernels  # isort: skip  # noqa: F401 (they enter themselves)

AutoConfig.register("mrconv", MRConvConfig)
AutoModel.register(MRConvConfig, MRConvModel)
AutoModelForSequenceClassification.register(MRConvConfig, MRConvForSequenceClassification)
AutoModelForImageClassification.register(MRConvConfig, MRConvForImageClassification)
# Whether two documents belong together: the Auto class of a pair of texts.
AutoModelForNextSentencePrediction.register(MRConvConfig, MRConvForRetrieval)
AutoModelForAudioClassification.register(MRConvConfig, MRConvForAudioClassification)
AutoModelForCausalLM.register(MRConvConfig, MRConvForCausalLM)
AutoFeatureExtractor.register(MRConvConfig, MRConvFeatureExtractor)
# Of models on pixels: without it, the code beside the weights would be asked for.
AutoImageProcessor.register(MRConvConfig, image_processor_classes={"pil": MRConvNextImageProcessor})

AutoConfig.register("mrconvnext", MRConvNextConfig)
AutoModel.register(MRConvNextConfig, MRConvNextModel)
AutoModelForImageClassification.register(MRConvNextConfig, MRConvNextForImageClassification)
AutoImageProcessor.register(MRConvNextConfig, image_processor_classes={"pil": MRConvNextImageProcessor})

# With these, save_pretrained copies the code, and the folder loads where hf_ext is not installed.
MRConvConfig.register_for_auto_class()
MRConvModel.register_for_auto_class("AutoModel")
MRConvForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
MRConvForImageClassification.register_for_auto_class("AutoModelForImageClassification")
MRConvForRetrieval.register_for_auto_class("AutoModelForNextSentencePrediction")
MRConvForAudioClassification.register_for_auto_class("AutoModelForAudioClassification")
MRConvForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MRConvFeatureExtractor.register_for_auto_class()
MRConvNextConfig.register_for_auto_class()
MRConvNextModel.register_for_auto_class("AutoModel")
MRConvNextForImageClassification.register_for_auto_class("AutoModelForImageClassification")
MRConvNextImageProcessor.register_for_auto_class()

__all__ = [
    "MRConvCache",
    "MRConvConfig",
    "MRConvFeatureExtractor",
    "MRConvForAudioClassification",
    "MRConvForCausalLM",
    "MRConvForImageClassification",
    "MRConvForRetrieval",
    "MRConvForSequenceClassification",
    "MRConvLayer",
    "MRConvModel",
    "MRConvNextConfig",
    "MRConvNextForImageClassification",
    "MRConvNextImageProcessor",
    "MRConvNextModel",
    "MRConvNextPreTrainedModel",
    "MRConvPreTrainedModel",
]
