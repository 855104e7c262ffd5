# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv: multi-resolution long convolutions for sequences and images. Importing it registers the Auto classes."""

from typing import Any

import transformers
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor
from transformers.models.auto.video_processing_auto import AutoVideoProcessor

from .configuration_mrconv import AUTO_MAP_OF_POSITIONS, MRConvConfig
from .configuration_mrconvnext import AUTO_MAP, MRConvNextConfig
from .feature_extraction_mrconv import MRConvFeatureExtractor
from .image_processing_mrconvnext import MRConvNextImageProcessor
from .modeling_layers_mrconv import MRConvLayer, MRConvPreTrainedModel
from .modeling_mrconv import (
    MRConvForAudioClassification,
    MRConvForImageClassification,
    MRConvForRetrieval,
    MRConvForSequenceClassification,
    MRConvModel,
)
from .modeling_mrconvnext import MRConvNextForImageClassification, MRConvNextModel, MRConvNextPreTrainedModel
from .modeling_positions_mrconv import MRConvForCausalLM, MRConvForMaskedLM, MRConvForTokenClassification
from .streaming_mrconv import MRConvCache

AutoConfig.register("mrconv", MRConvConfig)
AutoConfig.register("mrconvnext", MRConvNextConfig)
AutoFeatureExtractor.register(MRConvConfig, MRConvFeatureExtractor)
# Of models on pixels: without it, the code beside the weights would be asked for.
AutoImageProcessor.register(MRConvConfig, image_processor_classes={"pil": MRConvNextImageProcessor})
AutoImageProcessor.register(MRConvNextConfig, image_processor_classes={"pil": MRConvNextImageProcessor})
# Pipelines of pictures look for one of videos too: there is none, neither here nor beside the weights.
AutoVideoProcessor.register(MRConvConfig, None)
AutoVideoProcessor.register(MRConvNextConfig, None)

for _auto, _path in [*AUTO_MAP_OF_POSITIONS.items(), *AUTO_MAP.items()]:
    if _auto != "AutoConfig":
        _head: Any = globals()[_path.rpartition(".")[2]]
        getattr(transformers, _auto).register(_head.config_class, _head)
        # With this, save_pretrained copies the code, and the folder loads where hf_ext is not installed.
        _head.register_for_auto_class(_auto)
for _part in (MRConvConfig, MRConvFeatureExtractor, MRConvNextConfig, MRConvNextImageProcessor):
    _part.register_for_auto_class()

__all__ = [
    "MRConvCache",
    "MRConvConfig",
    "MRConvFeatureExtractor",
    "MRConvForAudioClassification",
    "MRConvForCausalLM",
    "MRConvForImageClassification",
    "MRConvForMaskedLM",
    "MRConvForRetrieval",
    "MRConvForSequenceClassification",
    "MRConvForTokenClassification",
    "MRConvLayer",
    "MRConvModel",
    "MRConvNextConfig",
    "MRConvNextForImageClassification",
    "MRConvNextImageProcessor",
    "MRConvNextModel",
    "MRConvNextPreTrainedModel",
    "MRConvPreTrainedModel",
]
