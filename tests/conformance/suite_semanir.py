"""SemanIR under transformers' own tests: model, configuration and image processor."""

import copy
import unittest
from unittest import mock

import numpy as np
import torch
from PIL import Image
from tests.test_image_processing_common import ImageProcessingTester
from tests.test_modeling_common import floats_tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor, SemanIRModel

from .suite_shared import ImageModelTests, OurImageProcessorTests

# The suite asks this table which classes have no loss.
MODEL_MAPPING_NAMES["semanir"] = "SemanIRModel"


class SemanIRModelTester:
    """A tiny columnar model and its inputs, as the shared tests ask for them."""

    batch_size = 2
    image_size = 16
    num_channels = 3
    num_hidden_layers = 2
    hidden_size = 16
    # Tokens of a window: what the shared tests call a sequence.
    seq_length = 64
    is_training = True
    # The input of the first stage and the output of each.
    expected_num_hidden_layers = 3

    def get_config(self) -> SemanIRConfig:
        twos = [2] * self.num_hidden_layers
        sizes = {"embed_dim": self.hidden_size, "depths": twos, "num_heads": twos, "window_size": 8, "top_k": 16}
        return SemanIRConfig(**sizes, image_mean=[0.45, 0.44, 0.40])

    def prepare_config_and_inputs_for_common(self) -> tuple[SemanIRConfig, dict[str, torch.Tensor]]:
        pixel_values = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


class SemanIRModelTest(ImageModelTests, unittest.TestCase):
    model_tester_class = SemanIRModelTester
    all_model_classes = (SemanIRModel, SemanIRForImageRestoration)
    config_class = SemanIRConfig
    common_properties = ["hidden_size", "num_channels", "window_size"]
    small = {"embed_dim": 16, "depths": [1], "num_heads": [2]}

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = copy.deepcopy(inputs_dict)
        if return_labels and model_class is SemanIRForImageRestoration:
            inputs["labels"] = 1 - inputs["pixel_values"]
        return inputs

    def check_hidden_states(self, states: tuple[torch.Tensor, ...]) -> None:
        tester = self.model_tester
        first = (tester.batch_size, tester.hidden_size, tester.image_size, tester.image_size)
        self.assertEqual(states[0].shape, first)
        self.assertTrue(all(state.ndim == 4 for state in states))

    def test_init_weights_can_init_buffers(self) -> None:
        """The shared test sets `scale` to 0, taking it for the width of random numbers; here it enlarges images."""
        assign = SemanIRConfig.__setattr__

        def assign_unless_scale(config: SemanIRConfig, name: str, value: object) -> None:
            if (name, value) != ("scale", 0):
                assign(config, name, value)

        with mock.patch.object(SemanIRConfig, "__setattr__", assign_unless_scale):
            super().test_init_weights_can_init_buffers()


class SemanIRUShapeModelTester(SemanIRModelTester):
    """A tiny U-shaped model."""

    # The input, two levels on the way down, one on the way up, and the final stage.
    expected_num_hidden_layers = 5

    def get_config(self) -> SemanIRConfig:
        config = super().get_config()
        config.architecture = "u-shaped"
        config.refinement_depth = 1
        return config


class SemanIRUShapeModelTest(SemanIRModelTest):
    model_tester_class = SemanIRUShapeModelTester


class SemanIRImageProcessorTester(ImageProcessingTester):
    """Options of the processor and the shapes that it must return, as the shared tests ask for them."""

    def __init__(self, parent, **kwargs):
        super().__init__(parent, max_resolution=40, size_divisor=8, **kwargs)

    def _get_image_processing_classes(self):
        return {"pil": SemanIRImageProcessor}

    def expected_output_image_shape(self, images) -> tuple[int, int, int]:
        """All images of a batch are padded to the largest, and that to a multiple of `size_divisor`."""
        sizes = [self._size(image) for image in images]
        height, width = (-(-max(sides) // self.size_divisor) * self.size_divisor for sides in zip(*sizes, strict=True))
        return self.num_channels, height, width

    @staticmethod
    def _size(image) -> tuple[int, int]:
        if isinstance(image, Image.Image):
            return image.height, image.width
        # The shared tests give arrays with channels last and tensors with channels first.
        return tuple(image.shape[:2] if isinstance(image, np.ndarray) else image.shape[1:])


class SemanIRImageProcessingTest(OurImageProcessorTests, unittest.TestCase):
    image_processor_tester_class = SemanIRImageProcessorTester
