"""Settings of tasks that cannot be are refused by their names."""

import pytest

from hf_ext.errors import UsageError
from hf_ext.settings import build
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.precompute_settings import Precompute
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.series import SeriesClassificationTask, SeriesRegressionTask
from hf_ext.tasks.signals import AudioTask, ImageTask, PixelTask
from hf_ext.tasks.texts import TextTask
from tests.kit.refusals import refused

NAN, INFINITE = float("nan"), float("inf")
MADE_OF_NOTHING = [("num_train_timesteps", -5), ("beta_start", "x"), ("beta_schedule", "x"), ("beta_end", 2**2000)]
# Of each task the settings, and what a refusal names.
WRONG = {
    DisentangledDiTTask: [
        ({"objective": "sample"}, ["objective", "sample"]),
        ({"noise_schedule": {"betas": 3}}, ["betas", "task.noise_schedule"]),
        *(({"noise_schedule": {name: x}}, ["noise_schedule"]) for name, x in MADE_OF_NOTHING),
        ({"sample_steps": 0}, ["sample_steps", "least 1"]),
        ({"sample_steps": 1001}, ["sample_steps", "1000"]),
        *(({"sample_guidance": scale}, ["sample_guidance"]) for scale in (NAN, INFINITE)),
        ({"image_size": [8, 8, 8]}, ["image_size", "[height, width]"]),
        ({"posterior": True}, ["posterior", "task.vae"]),
        *(({"text_column": names}, ["above 0"]) for names in ({}, *({"a": x} for x in (0, -1, None, "much")))),
        ({"crops": {"flip": 1.5}}, ["crops.flip", "1.5"]),
        *(({"crops": {f"{kind}_prob": 0.5}}, [f"crops.{kind}_size"]) for kind in ("local", "shrink")),
        ({"crops": {"centre": True}}, ["centre", "task.crops"]),
        ({"timesteps": {"distribution": "cosine"}}, ["distribution"]),
        ({"timesteps": {"loss_weight": "snr"}}, ["loss_weight"]),
        ({"timesteps": {"gamma": -1.0}}, ["gamma", "-1.0"]),
        ({"timesteps": {"shift": 3}}, ["shift", "task.timesteps"]),
        ({"transfer": {"position": False}}, ["position", "task.transfer"]),
    ],
    Precompute: [({"data": {"path": "x"}, "vae": "x", "image_size": 8, "workers": 0}, ["workers", "least 1"])],
    SemanIRTask: [
        ({"top_k": 0}, ["top_k", "least 1"]),
        ({"made_pictures": 1.5}, ["made_pictures", "1.5"]),
        ({"eval_degradation": [{"kind": "jpeg", "quality": 101}]}, ["quality", "101"]),
        *(({"perceptual_weight": weight}, ["perceptual_weight"]) for weight in (0, -1, NAN, INFINITE)),
    ],
    TextTask: [
        ({"num_labels": 1}, ["num_labels", "least 2"]),
        ({"num_labels": 3, "label_names": ["a", "b"]}, ["label_names", "3"]),
        ({"label_smoothing": 1.0}, ["label_smoothing", "1.0"]),
        ({"max_length": 1}, ["max_length", "least 2"]),
        *(({"kernel_learning_rate": rate}, ["kernel_learning_rate"]) for rate in (0.0, NAN, INFINITE)),
    ],
    PixelTask: [
        ({"mean": [0.0, 0.0], "std": [1.0, 1.0]}, ["mean", "std"]),
        *(({"std": [value]}, ["std"]) for value in (0.0, NAN, INFINITE)),
    ],
    AudioTask: [({"decimation": 3}, ["decimation", "3"])],
    ImageTask: [({"min_scale": 0.0}, ["min_scale", "0.0"])],
    SeriesClassificationTask: [
        ({"columns": ["x", "x"]}, ["columns", "different"]),
        ({"columns": ["x", "y"], "num_channels": 1}, ["num_channels", "2 columns"]),
        ({"max_length": 0}, ["max_length", "least 1"]),
        *(({"crop": crop}, ["crop"]) for crop in (-0.1, 1.0, NAN, "much")),
    ],
    SeriesRegressionTask: [({"target_columns": []}, ["target_columns"])],
}


@pytest.mark.parametrize(
    ("kind", "fields", "facts"), [(kind, *case) for kind, cases in WRONG.items() for case in cases]
)
def test_what_cannot_be_is_refused(kind, fields, facts):
    with refused(UsageError, *facts):
        build(kind, fields, "task")
