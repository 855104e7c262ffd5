"""FSDP2 on two processes: the weights of DDP, pictures at evaluations, and a run that was stopped goes on exactly."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from .launching import fork_two


@pytest.mark.slow
def test_sharded_weights_are_those_of_two_whole_copies(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for index, pixels in enumerate(np.random.default_rng(0).integers(256, size=(6, 16, 16), dtype=np.uint8)):
        Image.fromarray(pixels).save(images / f"{index}.png")
    fork_two("tests.training.sharded", str(tmp_path), str(images))
    whole, sharded, halves = (
        load_file(tmp_path / name / "snapshot" / "model.safetensors") for name in ("ddp", "fsdp", "fsdp-halves")
    )
    assert whole.keys() == sharded.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=1e-6, msg=name)
        assert torch.equal(halves[name], sharded[name]), name
    assert (tmp_path / "fsdp" / "samples" / "step-4.png").is_file()
    states = {path.name for path in (tmp_path / "fsdp-halves" / "state").iterdir()}
    assert states & {"step-1", "step-2"} and "step-4" in states
