"""What the suites of our methods share: their models have no tokens of text and no matrix of attention to return.

Nothing is collected here: test_conformance.py copies this file and a suite into transformers' downloaded test tree and
runs them there, where `tests` is transformers' package and not this project's.
"""

import copy
import unittest
from typing import Any
from unittest import mock

import torch
from tests.test_configuration_common import ConfigTester
from tests.test_image_processing_common import ImageProcessingTestMixin
from tests.test_modeling_common import ModelTesterMixin

from tests import test_modeling_common


class OurModelTests(ModelTesterMixin):
    """A method gives its configuration's class, properties that all have, and the fields of a small one."""

    has_attentions = False
    # By default the strictest initialisation test runs only for models that transformers itself dates after 2023.
    test_can_init_all_missing_weights_before_2023 = True
    config_class: type
    common_properties: list[str]
    small: dict[str, Any]

    def setUp(self) -> None:
        self.model_tester = self.model_tester_class()
        options = {"common_properties": self.common_properties, **self.small}
        self.config_tester = ConfigTester(self, self.config_class, has_text_modality=False, **options)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class ConvertedTests:
    """Of models whose checkpoints are converted when they are loaded."""

    def test_reverse_loading_mapping(self) -> None:
        """Names stay and numbers change; each converter is tested on models that have the kernel it is for."""
        every = test_modeling_common.get_model_conversion_mapping

        def those_of(model, **options):
            return [item for item in every(model, **options) if any(map(item._scoped_match, model.state_dict()))]

        with mock.patch.object(test_modeling_common, "get_model_conversion_mapping", those_of):
            super().test_reverse_loading_mapping(check_keys_were_modified=False)


class ImageModelTests(OurModelTests):
    """Of models of images; a suite has `check_hidden_states`."""

    test_resize_embeddings = False

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
                self.check_hidden_states(hidden_states)

    @unittest.skip("images are not embedded by a table: there is none to set or resize")
    def test_model_get_set_embeddings(self) -> None:
        pass


class OurImageProcessorTests(ImageProcessingTestMixin):
    @unittest.skip("a rule of the transformers repository: hf_ext does not require torchvision")
    def test_new_models_require_torchvision_backend(self) -> None:
        pass
