"""Perceptual loss: distance of two pictures in the features of a trained network."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel

from hf_ext.hub.checkpoints import split_revision
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration
from hf_ext.training.models import pin_revision

from ..errors import DataError, UsageError

logger = logging.getLogger(__name__)


class FeatureLoss(torch.nn.Module):
    """
    Distance of two pictures for a frozen network: the mean over its feature maps of the distance of two maps, relative
    to the size of the target's. So each map has equal weight, whatever its scale and size.

    Args:
        source (`str`): An image model of hf-ext or transformers whose `AutoModel` returns hidden states: the name of a
            released restorer, a folder or `org/name[@revision]`.

    Raises:
        ValueError: If the network cannot be loaded, or takes no pictures in colours.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, source: str):
        super().__init__()
        pinned = pin_revision(source)
        if pinned.startswith(f"{source}@"):
            logger.warning("task.perceptual_model is %s at present; give this name to keep the same loss.", pinned)
        name, revision = split_revision(pinned)
        config = AutoConfig.from_pretrained(name, revision=revision)
        ours = config.model_type == "semanir"
        # Ours as a whole, of which all but the last layers is taken: nothing is left over that a report names.
        kind: Any = SemanIRForImageRestoration if ours else AutoModel
        try:
            loaded = kind.from_pretrained(name, revision=revision, dtype=torch.float32)
        except RuntimeError as error:
            raise UsageError(f"task.perceptual_model {source} cannot be loaded: {error}") from error
        network = loaded.model if ours else loaded
        if network.main_input_name != "pixel_values" or getattr(config, "num_channels", 3) != 3:
            raise DataError(
                f"task.perceptual_model {source} ({type(network).__name__}) does not take pictures of three channels: "
                "give a restorer of colour pictures, such as denoise-color, or an image model of transformers."
            )
        self.source, self.network = source, network.eval().requires_grad_(False)
        # Ours takes [0, 1] as it is.
        processor = None if ours else AutoImageProcessor.from_pretrained(name, revision=revision)
        normalizes = getattr(processor, "do_normalize", False)
        for buffer, usual in (("mean", [0.0] * 3), ("std", [1.0] * 3)):
            values = getattr(processor, f"image_{buffer}") if normalizes else usual
            self.register_buffer(buffer, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def check(self, side: int) -> None:
        """
        Lets the network see a picture.

        Args:
            side (`int`): Height and width of the pictures of a training.

        Raises:
            ValueError: If it takes none of that size, or gives no hidden states.
        """
        try:
            with torch.no_grad():
                self.features(torch.zeros(1, 3, side, side))
        # Each network has words of its own for a size that it does not take.
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"task.perceptual_model {self.source} ({type(self.network).__name__}) gives no hidden states of "
                f"pictures of {side} x {side} pixels, as the training has them: {error}. Set task.patch_size, times "
                "the scale, to a size that it takes, or give another network."
            ) from error

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        """The distance of two batches `[batch, 1 or 3, height, width]` in [0, 1]; its gradient is that of `made`."""
        with torch.no_grad():
            targets = self.features(wanted)
        pairs = zip(self.features(made), targets, strict=True)
        distances = [(one - target).abs().mean() / target.abs().mean().clamp_min(1e-6) for one, target in pairs]
        return torch.stack(distances).mean()

    def features(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """The hidden states of the network."""
        colours = pictures.expand(-1, 3, -1, -1)
        maps = self.network(pixel_values=(colours - self.mean) / self.std, output_hidden_states=True).hidden_states
        if not maps:
            raise ValueError("its output has none")
        return tuple(maps)
