"""Restorers as nodes of ComfyUI: copy this file to ComfyUI/custom_nodes/ where hf-ext is installed.

"Load Restorer" takes the name of a released model, a folder or org/name. What it gives goes to "Restore Image", which
has a strength and takes tiles where memory is short.
"""

from typing import Any

import torch

from hf_ext import SemanIRForImageRestoration, restore_image
from hf_ext.hub.released import find_model
from hf_ext.restoration.restorer import load_model


class LoadRestorer:
    """A restorer by its name."""

    RETURN_TYPES = ("HF_EXT_RESTORER",)
    FUNCTION = "load"
    CATEGORY = "hf-ext"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"model": ("STRING", {"default": "denoise-color"})},
            "optional": {"task": ("STRING", {"default": "", "tooltip": "Of a merge: the task whose model restores."})},
        }

    def load(self, model: str, task: str = "") -> tuple[SemanIRForImageRestoration]:
        return (load_model(find_model(model.strip()), task.strip() or None),)


class RestoreImage:
    """Pictures [batch, height, width, channels] in [0, 1] to restored ones."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "restore"
    CATEGORY = "hf-ext"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.05}
        return {
            "required": {
                "restorer": ("HF_EXT_RESTORER",),
                "image": ("IMAGE",),
                "strength": ("FLOAT", {**strength, "tooltip": "How much of the change is made; 1 where it enlarges."}),
            }
        }

    def restore(
        self, restorer: SemanIRForImageRestoration, image: torch.Tensor, strength: float = 1.0
    ) -> tuple[torch.Tensor]:
        pictures = [
            restore_image(restorer, picture.float().cpu().numpy(), strength=strength, tile="auto") for picture in image
        ]
        return (torch.stack([torch.from_numpy(picture) for picture in pictures]).clamp(0, 1),)


NODE_CLASS_MAPPINGS = {"HfExtLoadRestorer": LoadRestorer, "HfExtRestoreImage": RestoreImage}
NODE_DISPLAY_NAME_MAPPINGS = {"HfExtLoadRestorer": "Load Restorer", "HfExtRestoreImage": "Restore Image"}
