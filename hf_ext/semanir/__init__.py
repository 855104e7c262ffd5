# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR: key-semantic attention for image restoration. Importing it registers the Auto classes."""

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageToImage
from transformers.pipelines import PIPELINE_REGISTRY

import hf_ext.fast.semanir_operators  # noqa: F401  registers the faster ways

from .configuration_semanir import SemanIRConfig
from .image_processing_semanir import SemanIRImageProcessor
from .modeling_semanir import SemanIRForImageRestoration, SemanIRModel, SemanIRPreTrainedModel
from .pipeline_semanir import ImageRestorationPipeline
from .restoring_semanir import restore_image

AutoConfig.register("semanir", SemanIRConfig)
AutoModel.register(SemanIRConfig, SemanIRModel)
AutoModelForImageToImage.register(SemanIRConfig, SemanIRForImageRestoration)
AutoImageProcessor.register(SemanIRConfig, image_processor_classes={"pil": SemanIRImageProcessor})
PIPELINE_REGISTRY.register_pipeline(
    "image-restoration", ImageRestorationPipeline, pt_model=AutoModelForImageToImage, type="image"
)

# With these, save_pretrained copies the code, and the folder loads where hf_ext is not installed.
SemanIRConfig.register_for_auto_class()
SemanIRModel.register_for_auto_class("AutoModel")
SemanIRForImageRestoration.register_for_auto_class("AutoModelForImageToImage")
SemanIRImageProcessor.register_for_auto_class()

__all__ = [
    "ImageRestorationPipeline",
    "SemanIRConfig",
    "SemanIRForImageRestoration",
    "SemanIRImageProcessor",
    "SemanIRModel",
    "SemanIRPreTrainedModel",
    "restore_image",
]
