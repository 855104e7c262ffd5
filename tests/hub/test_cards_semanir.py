"""Cards of SemanIR: finished for every task, with what the model takes and a snippet that runs."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext.hub.cards import write_card
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.tasks.restoration import SemanIRTask
from tests.hub.test_cards import assert_finished

TINY = {"embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 4, "top_k": 8}
MODELS = {
    "colour": ({}, "restores colour images without changing their size"),
    "grey": ({"num_channels": 1, "train_top_k": [4, 12]}, "restores grey images without changing their size"),
    "enlarging": ({"scale": 3}, "enlarges colour images 3 times"),
    "demosaicking": ({"num_channels": 4, "num_channels_out": 3, "scale": 2}, "raw RGGB Bayer mosaics into RGB images"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_card_says_what_the_model_takes_and_its_snippet_runs(name, tmp_path, monkeypatch):
    options, summary = MODELS[name]
    config = SemanIRConfig(**TINY, **options)
    model = SemanIRForImageRestoration(config).eval()
    task = SemanIRTask()
    task.config = config
    task.save_model(model, model.state_dict(), tmp_path)
    card = write_card(tmp_path, repo_id=str(tmp_path)).read_text()
    assert_finished(card)
    assert summary in " ".join(card.split())
    assert f"multiples of {config.multiple_of} are not padded" in card
    assert f"| keys per token | `top_k` 8; trained with {'4 to 12' if name == 'grey' else '8'}, of 16" in card
    snippet, by_pipeline = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(256, size=(12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("degraded.png")
    Image.fromarray(pixels[..., 0]).save("mosaic.png")
    scope: dict = {}
    exec(snippet, scope)
    assert type(scope["model"]).__name__ == "SemanIRForImageRestoration"
    assert torch.equal(scope["model"].model.extractor.weight, model.model.extractor.weight)
    with Image.open("restored.png") as restored:
        scale = 1 if name == "demosaicking" else config.scale
        assert (restored.size, restored.mode) == ((10 * scale, 12 * scale), "L" if name == "grey" else "RGB")
    Path("restored.png").unlink()
    exec(by_pipeline, scope)
    with Image.open("restored.png") as restored:
        assert (restored.size, restored.mode) == ((10 * scale, 12 * scale), "RGB")
