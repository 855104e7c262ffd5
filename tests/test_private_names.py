"""Private names of other libraries: what to look at before an upper bound in pyproject.toml is raised."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
# Of each library the upper bound up to which its names were looked at. Read what the new version does with each name,
# run the tests on it, and raise both.
CHECKED = {"torch": "2.16", "transformers": "5.25", "diffusers": "0.43"}
# Where each name is found: a module, or one of its classes or functions.
NAMES = {
    "torch": "_assert_async _foreach_copy_ _foreach_lerp_",
    "torch:Tensor": "_version",
    "torch._C": "_are_functorch_transforms_active _current_graph_task_id",
    "torch.autograd.forward_ad": "_current_level",
    "torch.compiler": "_is_exporting_flag",
    "torch.nn:Module": "_apply _buffers _forward_hooks _forward_pre_hooks _load_from_state_dict _parameters "
    "_save_to_state_dict",
    "torch.nn.modules.conv": "_ConvNd",
    "torch.utils._pytree": "tree_flatten tree_unflatten",
    "transformers:GenerationMixin": "_prepare_cache_for_generation _prepare_position_ids_for_generation",
    "transformers:Pipeline": "_load_feature_extractor _load_image_processor _load_processor _load_tokenizer "
    "_load_video_processor",
    "transformers:PreTrainedConfig": "_attn_implementation _experts_implementation",
    "transformers:PreTrainedModel": "_can_record_outputs _can_set_attn_implementation _init_weights "
    "_input_embed_layer _no_split_modules _tied_weights_keys",
    "transformers:SequenceFeatureExtractor": "_truncate",
    "transformers.image_processing_backends:PilBackend": "_prepare_images_structure _preprocess",
    "transformers.initialization:zeros_": "_is_hf_initialized",
    "transformers.models.auto.auto_factory:_BaseAutoModelClass": "_model_mapping",
    "transformers.pipelines.base:PipelineRegistry.register_pipeline": "_registered_impl",
    "transformers.utils.output_capturing": "OutputRecorder capture_outputs",
    "diffusers:DiffusionPipeline": "_dict_from_json_file _execution_device _optional_components",
    "diffusers:ModelMixin": "_no_split_modules _repeated_blocks _skip_layerwise_casting_patterns "
    "_supports_gradient_checkpointing",
    "diffusers:ModelMixin.enable_gradient_checkpointing": "_set_gradient_checkpointing",
    "diffusers:ModelMixin._set_gradient_checkpointing": "_gradient_checkpointing_func",
    "diffusers.hooks._helpers": "TransformerBlockMetadata TransformerBlockRegistry",
    "diffusers.models.attention:AttentionModuleMixin": "_available_processors _default_processor_cls "
    "_supports_qkv_fusion",
    "diffusers.models.attention:AttentionModuleMixin.set_attention_backend": "_attention_backend",
    "diffusers.models.cache_utils:CacheMixin": "_reset_stateful_cache",
}


def is_found(place: str, name: str) -> bool:
    """An attribute, an annotated one that instances get, or a name or string in the code of a function."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    for part in path.split(".") if path else ():
        owner = getattr(owner, part)
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    code = getattr(owner, "__code__", None)
    return code is not None and name in (*code.co_names, *code.co_consts)


@pytest.mark.parametrize("library", CHECKED)
def test_private_names_are_where_they_were_and_a_bound_is_raised_with_a_look_at_them(library):
    requirements = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    requirement = next((item for item in requirements if re.match(rf"{library}\b(?!-)", item)), "")
    bound = re.search(r"<([\d.]+)", requirement)
    names = {place: found.split() for place, found in NAMES.items() if re.match(rf"{library}\b", place)}
    assert names and bound is not None
    assert bound[1] == CHECKED[library], f"Look at these names of {library}, then raise the bound in CHECKED: {names}"
    pytest.importorskip(library)
    assert not any(is_found(place, "_no_such_name") for place in names)
    assert [f"{place} {name}" for place in names for name in names[place] if not is_found(place, name)] == []
