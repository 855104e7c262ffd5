"""MRConv on a Hub: pushed with its feature extractor or tokenizer, pulled with and without hf_ext, equal results."""

import json
from pathlib import Path

import pytest
import torch

from hf_ext.errors import DataError
from hf_ext.hub.publish import push, stage
from hf_ext.mrconv import MRConvForImageClassification
from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.tasks.texts import LanguageModelTask, ListOpsTask, RetrievalTask
from tests.kit.hub import run_python
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import generator, make_model, shake

SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "kernel_size": 5, "bidirectional": False}


def save_task(task, folder: Path) -> Path:
    """A model away from its initial values and what reads its input, as a training saves them."""
    torch.manual_seed(0)
    model = task.build_model(SIZES, None)
    shake(model)
    task.save_model(model.eval(), model.state_dict(), folder)
    return folder


# Runs as somebody without hf_ext and then as somebody with it. Arguments: tasks by repository as JSON; output.
TASKS = """
import json, sys
tasks, out = json.loads(sys.argv[1]), sys.argv[2]
sys.modules["hf_ext"] = None
import numpy as np
from PIL import Image
from transformers import pipeline
inputs = {
    "image-classification": Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)),
    "audio-classification": {"raw": np.sin(np.arange(64)).astype(np.float32), "sampling_rate": 8000},
    "text-classification": "[MAX 2 [MIN 4 7 ] 0 ]",
    "text-generation": "Once",
}
options = {"text-generation": {"max_new_tokens": 5, "do_sample": False}}

def run(prefix, **trust):
    results = {}
    for name, task in tasks.items():
        # what the card names is what is guessed
        pipe = pipeline(model=name, **trust)
        assert pipe.task == task, (pipe.task, task)
        for part in filter(None, (pipe.model, pipe.image_processor, pipe.feature_extractor)):
            assert type(part).__module__.startswith(prefix), type(part)
        results[name] = pipe(inputs[task], **options.get(task, {}))
        pipe.model.reparameterize()
        results[f"{name}, merged"] = pipe(inputs[task], **options.get(task, {}))
        assert results[name], name
    return results

strange = run("transformers_modules.", trust_remote_code=True)
del sys.modules["hf_ext"]
import hf_ext
# False: transformers itself looks for a video processor beside every image processor, and would ask for trust in it.
json.dump([strange, run("hf_ext.mrconv.", trust_remote_code=False)], open(out, "w"))
"""


@pytest.mark.slow
def test_the_task_that_a_card_names_is_what_pipelines_run(hub, options, api, tmp_path):
    made = {
        "org/pixels": (PixelTask(image_size=8), "image-classification"),
        "org/sounds": (AudioTask(sampling_rate=8000, max_length=64), "audio-classification"),
        "org/lists": (ListOpsTask(max_length=32), "text-classification"),
        "org/words": (LanguageModelTask(max_length=64), "text-generation"),
        "org/pairs": (RetrievalTask(max_length=32), None),
    }
    tasks = {}
    for name, (task, expected) in made.items():
        folder = save_task(task, tmp_path / name.partition("/")[2])
        push(folder, name, **options)
        tag = api.model_info(name).pipeline_tag
        assert tag == expected, name
        if tag is not None:
            tasks[name] = tag
    run_python(TASKS, hub.url, tmp_path / "home", json.dumps(tasks), str(tmp_path / "out.json"))
    strange, ours = json.loads((tmp_path / "out.json").read_text())
    assert strange.keys() == ours.keys() == {*tasks, *(f"{name}, merged" for name in tasks)}
    for name in tasks:
        for one, other in ((strange[name], ours[name]), (strange[name], strange[f"{name}, merged"])):
            if name == "org/words":
                assert one == other
            else:
                assert {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in one} == {
                    each["label"]: each["score"] for each in other
                }


def test_pixels_and_their_sequences_are_one_input():
    model = make_model(MRConvForImageClassification, input_size=3, num_labels=2, max_position_embeddings=16).eval()
    pixels = torch.randn(2, 3, 4, 4, generator=generator(0))
    sequence = pixels.flatten(2).transpose(1, 2)
    labels = torch.tensor([0, 1])
    with torch.no_grad():
        first = model(pixel_values=pixels, labels=labels)
        second = model(input_values=sequence, labels=labels)
        assert torch.equal(first.logits, second.logits) and first.loss.isfinite()
        torch.testing.assert_close(first.loss, torch.nn.functional.cross_entropy(first.logits, labels))
    both = {"pixel_values": pixels, "input_values": sequence}
    for wrong in ({"pixel_values": sequence}, {"pixel_values": pixels[:, :1]}, both):
        with refused(ValueError, "images"):
            model(**wrong)


def test_a_processor_of_another_kind_is_refused(tmp_path):
    folder = save_task(PixelTask(image_size=8), tmp_path / "digits")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    with refused(DataError, "ViTImageProcessor"):
        stage(folder, tmp_path / "staged")
