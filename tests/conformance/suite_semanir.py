"""SemanIR under transformers' own tests: model, configuration and image processor.

Not collected here: test_conformance.py copies this file into transformers' downloaded test tree and runs it there,
where `tests` is transformers' package and not this project's.
"""

import copy
import unittest
from unittest import mock

import numpy as np
import torch
from PIL import Image
from tests.test_configuration_common import ConfigTester
from tests.test_image_processing_common import ImageProcessingTester, ImageProcessingTestMixin
from tests.test_modeling_common import ModelTesterMixin, floats_tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor, SemanIRModel

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
        return SemanIRConfig(
            embed_dim=self.hidden_size,
            depths=[2] * self.num_hidden_layers,
            num_heads=[2] * self.num_hidden_layers,
            window_size=8,
            top_k=16,
            image_mean=[0.45, 0.44, 0.40],
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[SemanIRConfig, dict[str, torch.Tensor]]:
        pixel_values = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


class SemanIRModelTest(ModelTesterMixin, unittest.TestCase):
    model_tester_class = SemanIRModelTester
    all_model_classes = (SemanIRModel, SemanIRForImageRestoration)
    # Masked attention over windows has no matrix of a sequence to return.
    has_attentions = False
    # By default the strictest initialisation test runs only for models that transformers itself dates after 2023.
    test_can_init_all_missing_weights_before_2023 = True
    test_resize_embeddings = False

    def setUp(self) -> None:
        self.model_tester = self.model_tester_class()
        self.config_tester = ConfigTester(
            self,
            config_class=SemanIRConfig,
            has_text_modality=False,
            common_properties=["hidden_size", "num_channels", "window_size"],
            embed_dim=16,
            depths=[1],
            num_heads=[2],
        )

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = copy.deepcopy(inputs_dict)
        if return_labels and model_class is SemanIRForImageRestoration:
            inputs["labels"] = 1 - inputs["pixel_values"]
        return inputs

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_hidden_states_output(self) -> None:
        """As the shared test, but hidden states are feature maps, `(batch, channels, height, width)`."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        size = self.model_tester.image_size
        for model_class in self.all_model_classes:
            by_argument = model_class(config).eval()
            asking = copy.deepcopy(config)
            asking.output_hidden_states = True
            by_configuration = model_class(asking).eval()
            for model, options in ((by_argument, {"output_hidden_states": True}), (by_configuration, {})):
                with torch.no_grad():
                    hidden_states = model(**inputs, **options).hidden_states
                self.assertEqual(len(hidden_states), self.model_tester.expected_num_hidden_layers)
                first = (self.model_tester.batch_size, self.model_tester.hidden_size, size, size)
                self.assertEqual(hidden_states[0].shape, first)
                self.assertTrue(all(state.ndim == 4 for state in hidden_states))

    def test_init_weights_can_init_buffers(self) -> None:
        """The shared test sets `scale` to 0, taking it for the width of random numbers; here it enlarges images."""
        assign = SemanIRConfig.__setattr__

        def assign_unless_scale(config: SemanIRConfig, name: str, value: object) -> None:
            if (name, value) != ("scale", 0):
                assign(config, name, value)

        with mock.patch.object(SemanIRConfig, "__setattr__", assign_unless_scale):
            super().test_init_weights_can_init_buffers()

    @unittest.skip("images are not embedded by a table: there is none to set or resize")
    def test_model_get_set_embeddings(self) -> None:
        pass


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


class SemanIRImageProcessingTest(ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = SemanIRImageProcessorTester

    @unittest.skip("a rule of the transformers repository: hf_ext does not require torchvision")
    def test_new_models_require_torchvision_backend(self) -> None:
        pass
