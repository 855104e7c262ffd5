"""MRConv for sequences under transformers' own tests: tokens, language model, pairs of documents, waveforms."""

import copy
import unittest
from unittest import mock

import torch
from tests.test_modeling_common import floats_tensor, ids_tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from hf_ext.mrconv import (
    MRConvConfig,
    MRConvForAudioClassification,
    MRConvForCausalLM,
    MRConvForRetrieval,
    MRConvForSequenceClassification,
    MRConvModel,
)
from tests import test_modeling_common

from .suite_shared import ConvertedTests, OurModelTests

# The suite asks these tables which classes have no loss, and what labels the others want.
MODEL_MAPPING_NAMES["mrconv"] = "MRConvModel"
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["mrconv"] = "MRConvForSequenceClassification"
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["mrconv-pairs"] = "MRConvForRetrieval"
MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES["mrconv"] = "MRConvForAudioClassification"
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mrconv"] = "MRConvForCausalLM"


def start_small(config: MRConvConfig) -> MRConvConfig:
    """The suite's part, which takes `input_std`, a list of what was measured, for a number of the start."""
    config = copy.deepcopy(config)
    config.initializer_range = 1e-10
    return config


test_modeling_common._config_zero_init = start_small


class MRConvModelTester:
    """A tiny model and its inputs, as the shared tests ask for them."""

    batch_size = 3
    seq_length = 13
    vocab_size = 29
    hidden_size = 32
    num_hidden_layers = 2
    num_labels = 3
    is_training = True
    fields: dict = {"kernel_type": "fourier_sparse"}

    def get_config(self) -> MRConvConfig:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_labels")
        fields = {"kernel_size": 4, "max_position_embeddings": 40, **{name: getattr(self, name) for name in names}}
        return MRConvConfig(**{**fields, **self.fields})

    def prepare_config_and_inputs_for_common(self) -> tuple[MRConvConfig, dict[str, torch.Tensor]]:
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.int64)
        mask[0, :3] = 0
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": mask}


class MRConvModelTest(ConvertedTests, OurModelTests, unittest.TestCase):
    model_tester_class = MRConvModelTester
    all_model_classes = (MRConvModel, MRConvForSequenceClassification, MRConvForCausalLM)
    # Of the tests of generation, transformers distributes none: ours are in tests/mrconv/test_generation_mrconv.py.
    all_generative_model_classes = ()
    config_class = MRConvConfig
    common_properties = ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"]
    small = {"vocab_size": 29, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 40}


class MRConvMergedModelTester(MRConvModelTester):
    """A model whose convolutions are merged: their kernels are buffers."""

    fields = {"reparameterized": True}


class MRConvMergedModelTest(MRConvModelTest):
    model_tester_class = MRConvMergedModelTester


class MRConvBidirectionalModelTester(MRConvModelTester):
    """Two wings, blocks that are normalised after, over channels."""

    fields = {"bidirectional": True, "prenorm": False, "norm": "layer", "kernel_type": "fourier_sparse"}


class MRConvBidirectionalModelTest(MRConvModelTest):
    model_tester_class = MRConvBidirectionalModelTester
    all_model_classes = (MRConvModel, MRConvForSequenceClassification)


class MRConvPairTester(MRConvModelTester):
    """Pairs of documents."""

    fields = {"kernel_type": "dilated", "num_labels": 2}

    def prepare_config_and_inputs_for_common(self) -> tuple[MRConvConfig, dict[str, torch.Tensor]]:
        config, inputs = super().prepare_config_and_inputs_for_common()
        # The shared test that takes 15 rows from the table adapts the first document only.
        second = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 15)
        return config, {**inputs, "input_ids_2": second}


class MRConvPairTest(MRConvModelTest):
    model_tester_class = MRConvPairTester
    all_model_classes = (MRConvForRetrieval,)

    def test_batching_equivalence(self) -> None:
        """As the shared test, without hidden states: those of the second documents follow those of the first."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = MRConvForRetrieval(config).eval()
        with torch.no_grad():
            logits = model(**inputs).logits
            single = [model(**{name: value[[row]] for name, value in inputs.items()}).logits for row in range(3)]
        torch.testing.assert_close(torch.cat(single), logits, atol=1e-5, rtol=1e-5)

    def test_load_with_mismatched_shapes(self) -> None:
        """As the shared test, with the first documents: the Auto class makes a classifier of one text."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        inputs.pop("input_ids_2")
        first = {"prepare_config_and_inputs_for_common": lambda: (config, dict(inputs))}
        with mock.patch.multiple(self.model_tester, **first):
            super().test_load_with_mismatched_shapes()


class MRConvAudioTester(MRConvModelTester):
    """Waveforms."""

    fields = {"vocab_size": None, "kernel_type": "sparse"}

    def prepare_config_and_inputs_for_common(self) -> tuple[MRConvConfig, dict[str, torch.Tensor]]:
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.int64)
        mask[0, 9:] = 0
        waves = floats_tensor([self.batch_size, self.seq_length])
        return self.get_config(), {"input_values": waves, "attention_mask": mask}


class MRConvAudioTest(MRConvModelTest):
    model_tester_class = MRConvAudioTester
    all_model_classes = (MRConvForAudioClassification,)
    test_resize_embeddings = False

    @unittest.skip("waveforms are not embedded by a table: there is none to set or resize")
    def test_model_get_set_embeddings(self) -> None:
        pass
