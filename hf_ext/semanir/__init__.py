# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR: key-semantic attention for image restoration. Importing it registers the Auto classes.

The files beside this one travel with every checkpoint and need nothing else of hf_ext. `hf_ext.fast.semanir` and
`hf_ext.restoration.pipeline`, which `hf_ext` imports, enter faster ways and files of all kinds in their tables.
"""

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageToImage

from .configuration_semanir import SemanIRConfig
from .image_processing_semanir import SemanIRImageProcessor
from .modeling_semanir import SemanIRForImageRestoration, SemanIRModel, SemanIRPreTrainedModel

AutoConfig.register("semanir", SemanIRConfig)
AutoModel.register(SemanIRConfig, SemanIRModel)
AutoModelForImageToImage.register(SemanIRConfig, SemanIRForImageRestoration)
AutoImageProcessor.register(SemanIRConfig, image_processor_classes={"pil": SemanIRImageProcessor})

# save_pretrained then copies the code, and the folder loads without hf_ext.
SemanIRConfig.register_for_auto_class()
SemanIRModel.register_for_auto_class("AutoModel")
SemanIRForImageRestoration.register_for_auto_class("AutoModelForImageToImage")
SemanIRImageProcessor.register_for_auto_class()

__all__ = [
    "SemanIRConfig",
    "SemanIRForImageRestoration",
    "SemanIRImageProcessor",
    "SemanIRModel",
    "SemanIRPreTrainedModel",
]
