"""The pipeline against plain sampling, and what a user of diffusers expects of it."""

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from diffusers.callbacks import SDCFGCutoffCallback

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, record, sample_plainly, start
from tests.kit.models import assert_same_answers, assert_same_picture
from tests.kit.refusals import refused

CONTROLS = {"original_size": [(30, 40), (6, 10)], "crop": [(0, 3), (2, 1)], "target_size": [(6, 10), (12, 20)]}
CONTROLS["flip"] = [True, False]
# The same as the transformer takes them.
VALUES = CONTROLS | {"flip": [[1], [0]], "aspect_ratio": np.log([[40 / 30], [10 / 6]]).tolist()}
FEW = {"num_inference_steps": 3, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipeline() -> DisentangledDiTPipeline:
    return make_pipeline()


def test_pictures_equal_those_of_plain_sampling():
    pipeline = make_pipeline(EulerDiscreteScheduler())
    seen, noise = record(pipeline), start(pipeline, 2)
    # Of two guidance scales, the branches that they need.
    needed = {(1, 1): 1, (0.5, 1): 1, (3, 1): 2, (1, 2): 2, (3, 2): 3, (3, 0): 2, (1, 0): 1}
    for (scale, control_scale), branches in needed.items():
        seen.images.clear()
        options = {"guidance_scale": scale, "control_guidance_scale": control_scale, **FEW}
        images = pipeline(class_labels=[1, "hen"], latents=noise, **CONTROLS, **options).images
        assert seen.images == [2 * branches] * 3
        expected = sample_plainly(pipeline, noise, [1, 2], VALUES, max(scale, 1), control_scale)
        torch.testing.assert_close(images, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_negative_classes_equal_plain_sampling(pipeline):
    noise = start(pipeline, 2)
    options = {"class_labels": [1, 2], "latents": noise, "guidance_scale": 3.0, **CONTROLS, **FEW}
    plain = {"latents": noise, "given": [1, 2], "controls": VALUES, "scale": 3.0}
    usual = pipeline(**options).images
    away = pipeline(negative_class_labels="ostrich", **options).images
    torch.testing.assert_close(away, sample_plainly(pipeline, **plain, null=[3, 3]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(away, usual, atol=1e-3)
    each = pipeline(negative_class_labels=[3, pipeline.transformer.config.num_classes], **options).images
    torch.testing.assert_close(each[0], away[0])
    torch.testing.assert_close(each[1], usual[1])


def test_the_table_of_adaln_numbers_is_made_in_blocks(pipeline):
    options = {"class_labels": [1, 2], "latents": start(pipeline, 2), "control_guidance_scale": 2.0, **CONTROLS}
    images = []
    # Two kinds of controls, and none.
    for rows, tables in ((pipeline.TABLE_ROWS, [30]), (13, [12, 12, 6])):
        own = make_pipeline()
        own.TABLE_ROWS, seen = rows, record(own)
        # The order of sums depends on the number of rows, and ten steps make more of it.
        own.transformer.double()
        images.append(own(num_inference_steps=10, output_type="latent", **options).images)
        assert seen.tables == tables
    torch.testing.assert_close(images[1], images[0], rtol=1e-4, atol=1e-4)


def test_guidance_needs_a_network_that_was_trained_for_it():
    bare, uncontrolled = make_pipeline(condition_dropout=0.0), make_pipeline(control_dropout=0.0)
    with pytest.raises(ValueError, match="guidance_scale=4.0 needs a network that was trained with condition_dropout"):
        bare(class_labels=0, **FEW)
    with pytest.raises(ValueError, match="control_guidance_scale=2.0 needs control_dropout"):
        uncontrolled(class_labels=0, control_guidance_scale=2.0, **FEW)
    for options in ({"guidance_scale": 1.0}, {"negative_class_labels": 1}):
        bare(class_labels=0, **options, **FEW)
    uncontrolled(class_labels=0, **FEW)


def test_the_default_controls_are_those_of_a_whole_picture(pipeline):
    noise = start(pipeline, 1)
    usual = pipeline(class_labels=0, latents=noise, **FEW).images
    named = {"original_size": (6, 10), "crop": (0, 0), "target_size": (6, 10), "flip": False}
    assert_same_answers(pipeline(class_labels=0, latents=noise, **named, **FEW).images, usual)
    for name, value in {"original_size": (20, 5), "crop": (0, 4), "flip": True, "target_size": (9, 9)}.items():
        changed = pipeline(class_labels=0, latents=noise, **{name: value}, **FEW).images
        assert not torch.allclose(changed, usual, rtol=1e-3, atol=1e-3), name


@pytest.mark.parametrize(("height", "width"), [(4, 6), (12, 8), (6, 2)])
def test_other_sizes(pipeline, height, width):
    images = pipeline(class_labels=[0, 1], height=height, width=width, num_inference_steps=2, output_type="np").images
    assert images.shape == (2, height, width, 3) and np.isfinite(images).all()
    latents = torch.zeros(1, 3, height, width)
    assert pipeline(class_labels=0, latents=latents, **FEW).images.shape == latents.shape


def test_several_pictures_of_each_class_and_a_generator_for_each(pipeline):
    generators = [generator(seed) for seed in range(4)]
    options = {"guidance_scale": 2.0, "original_size": [(6, 10), (60, 100)], **FEW}
    images = pipeline(class_labels=[1, 2], num_images_per_prompt=2, generator=generators, **options).images
    assert images.shape == (4, 3, 6, 10)
    last = pipeline(class_labels=2, generator=generator(3), guidance_scale=2.0, original_size=(60, 100), **FEW).images
    torch.testing.assert_close(images[3:], last, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a list of 4, is needed"):
        pipeline(class_labels=[1, 2], num_images_per_prompt=2, generator=generators[:3], **FEW)


def test_output_types(pipeline):
    options = {"class_labels": [0, 1], "num_inference_steps": 2}
    latents, tensors, arrays, pictures = (
        pipeline(output_type=kind, generator=generator(), **options).images for kind in ("latent", "pt", "np", "pil")
    )
    expected = (latents / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(tensors, expected)
    np.testing.assert_allclose(arrays, expected.permute(0, 2, 3, 1).numpy(), atol=1e-6)
    assert [picture.size for picture in pictures] == [(10, 6)] * 2
    assert_same_picture(np.asarray(pictures[0]), (arrays[0] * 255).round().astype("uint8"))
    again = pipeline(output_type="np", return_dict=False, generator=generator(), **options)
    assert isinstance(again, tuple)
    np.testing.assert_allclose(again[0], arrays, atol=1e-5)
    assert make_pipeline(in_channels=1)(class_labels=0, num_inference_steps=1).images[0].mode == "L"


def test_labels_are_numbers_names_or_tensors(pipeline):
    assert pipeline.get_label_ids("goldfish") == [1]
    assert pipeline.get_label_ids(["Tinca tinca", "hen", "tench"]) == [0, 2, 0]
    options = {"latents": start(pipeline, 2), **FEW}
    assert_same_answers(
        *(pipeline(class_labels=it, **options).images for it in (["tench", "hen"], torch.tensor([0, 2])))
    )
    with pytest.raises(ValueError, match="No single class is 'goldfisch'"):
        pipeline(class_labels="goldfisch", **FEW)
    with pytest.raises(ValueError):
        DisentangledDiTPipeline(pipeline.transformer, DDIMScheduler()).get_label_ids("hen")


def test_callbacks_see_and_change_every_step(pipeline):
    noise = start(pipeline, 2)
    steps = []

    def note(pipe, step, timestep, tensors):
        steps.append((step, int(timestep), sorted(tensors), tensors["prompt_embeds"].shape[0]))
        return {"latents": torch.zeros_like(tensors["latents"]).half()} if step == 2 else None

    images = pipeline(
        class_labels=[0, 1], latents=noise, callback_on_step_end=note,
        callback_on_step_end_tensor_inputs=["latents", "noise_pred", "prompt_embeds"], **FEW,
    ).images  # fmt: skip
    assert steps == [(i, t, ["latents", "noise_pred", "prompt_embeds"], 4) for i, t in enumerate((666, 333, 0))]
    assert not images.any() and images.dtype == torch.float32
    with pytest.raises(ValueError, match="modulation"):
        pipeline(class_labels=0, callback_on_step_end=note, callback_on_step_end_tensor_inputs=["modulation"], **FEW)


def test_a_callback_may_change_the_guidance_at_every_step():
    pipeline = make_pipeline()
    seen = record(pipeline)

    def change(pipe, step, timestep, tensors):
        pipe._guidance_scale, pipe._control_guidance_scale = [(1.0, 1.0), (4.0, 2.0), (4.0, 1.0), (1.0, 1.0)][step]
        return {}

    pipeline(class_labels=0, num_inference_steps=4, output_type="latent", callback_on_step_end=change)
    assert seen.images == [2, 1, 3, 2]
    assert (pipeline.guidance_scale, pipeline.control_guidance_scale) == (1.0, 1.0)
    assert not pipeline.do_classifier_free_guidance


def test_a_callback_of_diffusers_ends_the_guidance():
    pipeline = make_pipeline()
    seen = record(pipeline)
    cutoff = SDCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=1)
    pipeline(class_labels=2, num_inference_steps=4, output_type="latent", callback_on_step_end=cutoff)
    assert seen.images == [2, 2, 1, 1]
    # it keeps the last row only, which is right for one picture
    with pytest.raises(ValueError, match="The context has 1 rows for 2 pictures"):
        pipeline(class_labels=[2, 3], num_inference_steps=4, output_type="latent", callback_on_step_end=cutoff)


def test_interrupt(pipeline):
    steps = []

    def stop(pipe, step, timestep, tensors):
        steps.append(step)
        pipe._interrupt = step == 1
        return {}

    pipeline(class_labels=0, num_inference_steps=8, output_type="latent", callback_on_step_end=stop)
    assert steps == [0, 1] and pipeline.interrupt
    pipeline(class_labels=0, **FEW)
    assert not pipeline.interrupt


def test_input_that_the_model_cannot_take_is_refused(pipeline):
    for given in ({"prompt": "a hen"}, {"max_sequence_length": 4}):
        with refused(ValueError, "class model"):
            pipeline(class_labels=0, **given, **FEW)
    few = make_pipeline(control_alpha={"original_size": 8.0})
    with refused(ValueError, "flip", "original_size"):
        few(class_labels=0, flip=True, **FEW)
    text = make_text_pipeline()
    for options in ({"class_labels": 1}, {"prompt": "a hen", "negative_class_labels": 1}, {}):
        with refused(ValueError, "text model"):
            text(**options, **FEW)
    with refused(ValueError, "negative text"):
        text(prompt=["a", "a", "a"], negative_prompt=["a", "a"], **FEW)
    text.text_encoder = None
    with refused(ValueError, "text_encoder"):
        text(prompt="a hen", **FEW)
    with refused(ValueError, "'none'", "noisy_replicate"):
        make_text_pipeline(text_padding="none")
    wide = make_text_pipeline()
    wide.transformer.register_to_config(joint_attention_dim=7)
    with refused(ValueError, "8 numbers", "joint_attention_dim"):
        wide(prompt="a hen", **FEW)


NAMES = {0: "crane", 1: "tench, Tinca tinca", 2: "crane", 3: "cat", 4: "cat, black", 5: "dog, black", 6: "7"}


def test_a_name_stands_for_one_class_or_is_refused(pipeline):
    named = DisentangledDiTPipeline(pipeline.transformer, DDIMScheduler(), id2label=NAMES)
    meant = {"tench, Tinca tinca": 1, "Tinca tinca": 1, "cat": 3, "cat, black": 4, "dog": 5, "7": 6}
    assert named.get_label_ids([*meant]) == [*meant.values()]
    # Two classes have it, whole or as a part.
    for name in ("crane", "black", "tench,"):
        with pytest.raises(ValueError):
            named.get_label_ids(name)
    for names in (["hen"], {0: None}, {"a": "hen"}, {-1: "hen"}):
        with pytest.raises(ValueError):
            DisentangledDiTPipeline(pipeline.transformer, DDIMScheduler(), id2label=names)
