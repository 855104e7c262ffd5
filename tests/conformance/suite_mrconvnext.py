"""MRConvNeXt and the feature extractor of MRConv under transformers' own tests."""

import unittest

import torch
from tests.test_image_processing_common import ImageProcessingTester
from tests.test_modeling_common import floats_tensor
from tests.test_sequence_feature_extraction_common import SequenceFeatureExtractionTestMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES

from hf_ext.mrconv import (
    MRConvFeatureExtractor,
    MRConvNextConfig,
    MRConvNextForImageClassification,
    MRConvNextImageProcessor,
    MRConvNextModel,
)

from .suite_shared import ConvertedTests, ImageModelTests, OurImageProcessorTests

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
        sizes = {"image_size": self.image_size, "patch_size": 2, "hidden_sizes": self.hidden_sizes, "kernel_size": 4}
        return MRConvNextConfig(**sizes, depths=[1] * self.num_hidden_layers, num_labels=self.num_labels)

    def prepare_config_and_inputs_for_common(self) -> tuple[MRConvNextConfig, dict[str, torch.Tensor]]:
        pixel_values = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


class MRConvNextModelTest(ConvertedTests, ImageModelTests, unittest.TestCase):
    model_tester_class = MRConvNextModelTester
    all_model_classes = (MRConvNextModel, MRConvNextForImageClassification)
    config_class = MRConvNextConfig
    common_properties = ["hidden_sizes", "depths", "num_channels", "image_size"]
    small = {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 12], "depths": [1, 1]}

    def check_hidden_states(self, states: tuple[torch.Tensor, ...]) -> None:
        self.assertEqual([tuple(state.shape[1:]) for state in states], [(8, 8, 8), (8, 8, 8), (12, 4, 4)])


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


class MRConvNextImageProcessingTest(OurImageProcessorTests, unittest.TestCase):
    image_processor_tester_class = MRConvNextImageProcessorTester


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
