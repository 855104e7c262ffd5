"""A restorer for programs that call any image model the same way: loaded by name, described, tensors in and out."""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_ext.emr.weights import task_checkpoint
from hf_ext.errors import DataError, UsageError
from hf_ext.hub.checkpoints import split_revision
from hf_ext.hub.released import find_model
from hf_ext.semanir import SemanIRForImageRestoration

logger = logging.get_logger(__name__)


class SizeRequirements(NamedTuple):
    """
    Sizes that suit a model.

    Args:
        minimum (`int`): Smallest height and width in pixels.
        multiple_of (`int`): A grid of tiles that keeps to it cuts no window. Other sizes work as well.
        square (`bool`): Whether height and width must be equal.
    """

    minimum: int
    multiple_of: int
    square: bool = False


class Restorer:
    """
    A restorer with the fields and methods of spandrel's `ImageModelDescriptor`, without spandrel. ComfyUI's node
    "Upscale Image (using Model)" works with it.

    Args:
        model ([`SemanIRForImageRestoration`]): The model; it is set to evaluation.

    Attributes:
        purpose (`str`): `"SR"` if it enlarges, else `"Restoration"`.
        scale (`int`): Height and width of the output divided by those of the input.
        input_channels, output_channels (`int`): 3 for RGB, 1 for grey.
        size_requirements ([`SizeRequirements`]): Any size works; these suit tiles.
        tiling (`str`): `"internal"`: the model bounds its own temporary memory, so pass whole pictures.
        supports_half, supports_bfloat16 (`bool`): Precisions; float16 may overflow.
        tags (`list[str]`): Its layout, such as `["u-shaped"]`.

    Example:
        >>> import torch
        >>> from hf_ext import Restorer
        >>> restorer = Restorer.from_pretrained("denoise-color")
        >>> restorer(torch.rand(1, 3, 40, 50)).shape, restorer.scale
        (torch.Size([1, 3, 40, 50]), 1)
    """

    def __init__(self, model: SemanIRForImageRestoration):
        self.model = model.eval()
        descriptor = model.config.descriptor
        self.purpose: str = descriptor.purpose
        self.scale: int = descriptor.scale
        self.input_channels: int = descriptor.input_channels
        self.output_channels: int = descriptor.output_channels
        self.size_requirements = SizeRequirements(descriptor.minimum, descriptor.multiple_of)
        self.tiling: str = descriptor.tiling
        self.supports_half: bool = descriptor.supports_half
        self.supports_bfloat16: bool = descriptor.supports_bfloat16
        self.tags: list[str] = [model.config.architecture]

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        task: str | None = None,
        device: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> "Restorer":
        """
        Load a restorer.

        Args:
            source (`str` or `Path`): Name of a released model, a folder, or `org/name[@revision]` with a checkpoint,
                an adapter or a merge.
            task (`str`, *optional*): The task of a merge.
            device (`str`, *optional*): The GPU if there is one, else the CPU.
            dtype (`torch.dtype` or `str`, *optional*): Precision; that of the checkpoint if not given.

        Returns:
            [`Restorer`]: The restorer, in evaluation.

        Raises:
            DataError: The checkpoint holds another kind of model.
            UsageError: The device cannot be used.
            OSError: There is no such folder or repository.
        """
        return cls(load_model(find_model(os.fspath(source)), task, device, dtype))

    @property
    def device(self) -> torch.device:
        """`torch.device`: Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """`torch.dtype`: Precision of the model."""
        return self.model.dtype

    def to(self, *args: Any, **kwargs: Any) -> "Restorer":
        """Move the model, or change its precision, as `torch.nn.Module.to` does."""
        torch.nn.Module.to(self.model, *args, **kwargs)
        return self

    def cpu(self) -> "Restorer":
        """Move the model to the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> "Restorer":
        """Move the model to a GPU."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def half(self) -> "Restorer":
        """Compute in float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> "Restorer":
        """Compute in bfloat16."""
        return self.to(torch.bfloat16)

    def float(self) -> "Restorer":
        """Compute in float32."""
        return self.to(torch.float32)

    def eval(self) -> "Restorer":
        """It always is in evaluation."""
        return self

    @torch.inference_mode()
    def __call__(self, image: Tensor) -> Tensor:
        """
        Restore a batch of pictures.

        Args:
            image (`torch.Tensor` of shape `(batch_size, input_channels, height, width)`): Floats in [0, 1], on the
                device of the model.

        Returns:
            `torch.Tensor` of shape `(batch_size, output_channels, height * scale, width * scale)`: In [0, 1], in the
            precision of the input. [`restore_image`] has more: grey, alpha, strength, tiles.

        Raises:
            UsageError: The input is no tensor, has NaN or infinite values, or is far from [0, 1].
            ValueError: The input has another shape.
        """
        if not isinstance(image, Tensor) or (image.numel() and not image.abs().max() <= 4):
            raise UsageError("the input is no tensor of floats in [0, 1]; divide pixels of 0 to 255 by 255.")
        restored: Tensor = self.model(pixel_values=image).reconstruction
        return restored.clamp(0, 1).to(image.dtype)


def load_model(
    source: str, task: str | None = None, device: str | None = None, dtype: torch.dtype | str | None = None
) -> SemanIRForImageRestoration:
    """The model of a folder or org/name[@revision], an adapter with its base, or one task of a merge; on the GPU if
    there is one."""
    with task_checkpoint(source, task) as checkpoint:
        base = None
        if not os.path.isdir(checkpoint) or os.path.exists(os.path.join(checkpoint, "adapter_config.json")):
            # peft is imported for adapters alone.
            from hf_ext.training.models import adapter_base, load_adapter

            base = adapter_base(checkpoint)
        name, revision = split_revision(base or checkpoint)
        kind = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
        if kind != "semanir":
            raise DataError(f"{checkpoint} contains a {kind} model, not SemanIR.")
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        model: Any = SemanIRForImageRestoration.from_pretrained(name, revision=revision, **options)
        if base is not None:
            model = load_adapter(model, checkpoint).merge_and_unload()
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            if torch.device(place).type == "meta":
                raise RuntimeError("it computes nothing")
            restorer: SemanIRForImageRestoration = model.eval().to(place)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device {device} cannot be used: {error}") from error
        if restorer.device.type == "cpu" and restorer.dtype == torch.float16:
            logger.warning(
                "float16 takes four times as long as float32 on a CPU, which lacks float16 arithmetic; use bfloat16, "
                "which is about as fast as float32 and needs as little memory as float16."
            )
        return restorer
