"""Training in two processes is training in one, on batches of twice the size or, of several sizes, in two passes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.tasks.precompute import precompute
from tests.kit.process_state import forget_accelerate
from tests.training.launching import launch_two

from .diffusion_testing import losses, settings, write_pictures
from .two_processes import STEPS, train_on


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "batch", "passes"), [("one", 6, 1), ("one", 3, 2), ("several", 3, 2)])
def test_two_processes_train_as_one_on_the_joined_batches(tmp_path, vae, sizes, batch, passes):
    task = {"image_size": 8}
    data = write_pictures(tmp_path / "pictures", side_column=[(12, 10), (20, 10), (12, 10)] * 4)
    if sizes == "several":
        task = {"image_size": 16, "vae": str(vae)}
        data = precompute(settings(data, vae, max_ratio=2.0, bucket_step=4), tmp_path / "latents")
    launch_two("tests.tasks.two_processes", str(data), str(tmp_path / "two"), "3", json.dumps(task))
    first, second = ((tmp_path / f"two-{rank}-of-2").read_text() for rank in (0, 1))
    assert first == second
    train_on(data, tmp_path / "one", batch, task, passes)
    forget_accelerate()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert len(losses(tmp_path / "two")) == STEPS
    weights = "snapshot/transformer/diffusion_pytorch_model.safetensors"
    found, expected = (load_file(tmp_path / name / weights) for name in ("two", "one"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)
