"""MRConvNeXt and the feature extractor of MRConv under transformers' own tests.

Not collected here: test_conformance.py copies this file into transformers' downloaded test tree and runs it there,
where `tests` is transformers' package and not this project's.
"""

import copy
import unittest
from unittest import mock

import torch
from tests.test_configuration_common import ConfigTester
from tests.test_image_processing_common import ImageProcessingTester, ImageProcessingTestMixin
from tests.test_modeling_common import ModelTesterMixin, floats_tensor
from tests.test_sequence_feature_extraction_common import SequenceFeatureExtractionTestMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from hf_ext.mrconv import (
    MRConvFeatureExtractor,
    MRConvNextConfig,
    MRConvNextForImageClassification,
    MRConvNextImageProcessor,
    MRConvNextModel,
)
from tests import test_modeling_common

# The suite asks these tables which classes have no loss, and what labels the others want.
MODEL_MAPPING_NAMES["mrconvnext"] = "MRConvNextModel"
MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["mrconvnext"] = "MRConvNextForImageClassification"


class MRConvNextModelTester:
    """A tiny model and its inputs, as the shared tests ask for them."""

    batch_size = 2
    image_size = 16
    num_channels = 3
    num_labels = 3
    num_hidden_layers = 2
    hidden_sizes = [8, 12]
    hidden_size = 12
    is_training = True
    # The input of the first stage and the output of each.
    expected_num_hidden_layers = 3

    def get_config(self) -> MRConvNextConfig:
        return MRConvNextConfig(
            image_size=self.image_size,
            patch_size=2,
            hidden_sizes=self.hidden_sizes,
            depths=[1] * self.num_hidden_layers,
            kernel_size=4,
            num_labels=self.num_labels,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[MRConvNextConfig, dict[str, torch.Tensor]]:
        pixel_values = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


class MRConvNextModelTest(ModelTesterMixin, unittest.TestCase):
    model_tester_class = MRConvNextModelTester
    all_model_classes = (MRConvNextModel, MRConvNextForImageClassification)
    # Convolutions have no matrix of attention to return.
    has_attentions = False
    # By default the strictest initialisation test runs only for models that transformers itself dates after 2023.
    test_can_init_all_missing_weights_before_2023 = True
    test_resize_embeddings = False

    def setUp(self) -> None:
        self.model_tester = self.model_tester_class()
        self.config_tester = ConfigTester(
            self,
            config_class=MRConvNextConfig,
            has_text_modality=False,
            common_properties=["hidden_sizes", "depths", "num_channels", "image_size"],
            image_size=16,
            patch_size=2,
            hidden_sizes=[8, 12],
            depths=[1, 1],
        )

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_hidden_states_output(self) -> None:
        """As the shared test, but hidden states are feature maps, `(batch, channels, height, width)`."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            by_argument = model_class(config).eval()
            asking = copy.deepcopy(config)
            asking.output_hidden_states = True
            by_configuration = model_class(asking).eval()
            for model, options in ((by_argument, {"output_hidden_states": True}), (by_configuration, {})):
                with torch.no_grad():
                    hidden_states = model(**inputs, **options).hidden_states
                self.assertEqual(len(hidden_states), self.model_tester.expected_num_hidden_layers)
                self.assertEqual(
                    [tuple(state.shape[1:]) for state in hidden_states], [(8, 8, 8), (8, 8, 8), (12, 4, 4)]
                )

    @unittest.skip("images are not embedded by a table: there is none to set or resize")
    def test_model_get_set_embeddings(self) -> None:
        pass

    def test_reverse_loading_mapping(self) -> None:
        """Names stay and numbers change; each converter is tested on models that have the kernel it is for."""
        every = test_modeling_common.get_model_conversion_mapping

        def those_of(model, **options):
            return [item for item in every(model, **options) if any(map(item._scoped_match, model.state_dict()))]

        with mock.patch.object(test_modeling_common, "get_model_conversion_mapping", those_of):
            super().test_reverse_loading_mapping(check_keys_were_modified=False)


class MRConvNextMergedModelTester(MRConvNextModelTester):
    """A model whose convolutions are merged: their kernels are buffers."""

    def get_config(self) -> MRConvNextConfig:
        config = super().get_config()
        config.reparameterized = True
        return config


class MRConvNextMergedModelTest(MRConvNextModelTest):
    model_tester_class = MRConvNextMergedModelTester


class MRConvNextImageProcessorTester(ImageProcessingTester):
    """Options of the processor and the shapes that it must return, as the shared tests ask for them."""

    def __init__(self, parent, **kwargs):
        super().__init__(parent, max_resolution=40, size={"shortest_edge": 18}, **kwargs)

    def _get_image_processing_classes(self):
        return {"pil": MRConvNextImageProcessor}

    def expected_output_image_shape(self, images) -> tuple[int, int, int]:
        return self.num_channels, 18, 18


class MRConvNextImageProcessingTest(ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = MRConvNextImageProcessorTester

    @unittest.skip("a rule of the transformers repository: hf_ext does not require torchvision")
    def test_new_models_require_torchvision_backend(self) -> None:
        pass


class MRConvFeatureExtractionTester:
    """Lengths of the waveforms that the shared tests pad and cut."""

    batch_size = 7
    min_seq_length = 400
    max_seq_length = 2000
    seq_length_diff = (max_seq_length - min_seq_length) // (batch_size - 1)
    feature_size = 1

    def prepare_feat_extract_dict(self) -> dict:
        return {"feature_size": 1, "padding_value": 0.0, "sampling_rate": 16000, "do_normalize": True}

    def prepare_inputs_for_common(self, equal_length: bool = False, numpify: bool = False) -> list:
        lengths = [
            self.max_seq_length if equal_length else length
            for length in range(self.min_seq_length, self.max_seq_length, self.seq_length_diff)
        ]
        waves = [floats_tensor((length,)) for length in lengths]
        return [wave.numpy() if numpify else wave.tolist() for wave in waves]


class MRConvFeatureExtractionTest(SequenceFeatureExtractionTestMixin, unittest.TestCase):
    feature_extraction_class = MRConvFeatureExtractor

    def setUp(self) -> None:
        self.feat_extract_tester = MRConvFeatureExtractionTester()
