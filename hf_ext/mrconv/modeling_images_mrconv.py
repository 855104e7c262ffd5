# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv on images: the pixels of an image, row by row, are the sequence."""

from typing import Any

import torch
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from .configuration_mrconv import MRConvConfig
from .modeling_mrconv import MRConvForSequenceClassification


class MRConvForImageClassification(MRConvForSequenceClassification):
    """
    [`MRConvForSequenceClassification`] that takes images as image processors make them; the weights are the same.

    Args:
        config ([`MRConvConfig`]): The model configuration, without vocabulary; `input_size` is the number of channels.
    """

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        # The name of the class does not say it.
        self.loss_type = "ForSequenceClassification"

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        pixel_values: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, input_size, height, width)`, *optional*):
                Images as the image processor returns them.
            input_values (`torch.Tensor` of shape `(batch_size, height * width, input_size)`, *optional*):
                The same as sequences, instead of `pixel_values`.
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Classes from 0; or as `config.problem_type` says, float targets of shape `(batch_size, num_labels)`.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: `logits` of shape `(batch_size, num_labels)`;
            `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError, TypeError: If both inputs are given, the images have another shape, or an input does not fit
                as in [`MRConvModel`].
        """
        if pixel_values is not None:
            if input_values is not None or pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.input_size:
                raise ValueError(
                    f"`pixel_values` has shape {tuple(pixel_values.shape)}, `input_values` is "
                    f"{'not ' if input_values is None else ''}given; give one of them, images as (batch_size, "
                    f"{self.config.input_size}, height, width)."
                )
            input_values = pixel_values.flatten(2).transpose(1, 2)
        return super().forward(input_values=input_values, labels=labels, **kwargs)


__all__ = ["MRConvForImageClassification"]
