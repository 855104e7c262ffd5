"""Cards of methods: chosen by the configuration, finished, with snippets that run."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext import mrconv
from hf_ext.hub.cards import write_card
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.series import PositionsTask, SeriesRegressionTask
from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.tasks.texts import LanguageModelTask, ListOpsTask, MaskedLanguageModelTask, RetrievalTask
from tests.hub.test_cards import assert_finished

TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}


def from_task(task, **fields):
    return lambda: (task.build_model({**TINY, **fields}, None), task.processor())


MODELS = {
    "audio": from_task(AudioTask(sampling_rate=8000, max_length=64)),
    "tokens": from_task(ListOpsTask(max_length=32)),
    "pairs": from_task(RetrievalTask(max_length=32)),
    "language": from_task(LanguageModelTask(max_length=32)),
    "pixels": from_task(PixelTask(image_size=8)),
    "values": lambda: (mrconv.MRConvForSequenceClassification(mrconv.MRConvConfig(**TINY, input_size=2)), None),
    "masked language": from_task(MaskedLanguageModelTask(max_length=32), bidirectional=True),
    "positions": from_task(PositionsTask(max_length=32, num_labels=3, num_channels=2)),
    "regression": from_task(SeriesRegressionTask(max_length=32, target_columns=["rate", "depth"])),
    "backbone": lambda: (mrconv.MRConvModel(mrconv.MRConvConfig(**TINY, max_position_embeddings=32)), None),
    "images": lambda: (
        mrconv.MRConvNextForImageClassification(mrconv.MRConvNextConfig(image_size=16, hidden_sizes=[4], depths=[1])),
        mrconv.MRConvNextImageProcessor(size={"shortest_edge": 16}),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("merged", [False, True])
def test_the_snippet_runs(name, merged, tmp_path, capsys):
    model, processor = MODELS[name]()
    if merged:
        model.reparameterize()
    model.save_pretrained(tmp_path)
    if processor is not None:
        processor.save_pretrained(tmp_path)
    card = write_card(tmp_path, repo_id=str(tmp_path)).read_text()
    assert_finished(card)
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert ("model.reparameterize()" in snippet) == (not merged and name != "backbone")
    capsys.readouterr()
    scope = {}
    exec(snippet, scope)
    assert capsys.readouterr().out.strip()
    loaded = scope["model"].state_dict()
    assert type(scope["model"]) is type(model)
    for key, value in model.reparameterize().state_dict().items():
        if key in loaded and (merged or "backbone" not in key):
            torch.testing.assert_close(loaded[key], value)


SEMANIR = {"embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 4, "top_k": 8}
RESTORERS = {
    "colour": ({}, "restores colour images without changing their size"),
    "grey": ({"num_channels": 1, "train_top_k": [4, 12]}, "restores grey images without changing their size"),
    "enlarging": ({"scale": 3}, "enlarges colour images 3 times"),
    "demosaicking": ({"num_channels": 4, "num_channels_out": 3, "scale": 2}, "raw RGGB Bayer mosaics into RGB images"),
}


@pytest.mark.parametrize("name", RESTORERS)
def test_the_card_of_a_restorer_says_what_it_takes_and_its_snippets_run(name, tmp_path, monkeypatch):
    options, summary = RESTORERS[name]
    config = SemanIRConfig(**SEMANIR, **options)
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
