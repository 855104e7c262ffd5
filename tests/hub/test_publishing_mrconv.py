"""MRConv on a Hub: pushed with its feature extractor or tokenizer, pulled with and without hf_ext, equal results."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, close_session, snapshot_download
from safetensors.torch import load_file, save_file
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification, AutoModelForCausalLM, AutoTokenizer

from hf_ext.errors import DataError
from hf_ext.hub.publish import push, stage
from hf_ext.mrconv import (
    MRConvFeatureExtractor,
    MRConvForAudioClassification,
    MRConvForCausalLM,
    MRConvForImageClassification,
)
from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.tasks.texts import LanguageModelTask, ListOpsTask, RetrievalTask
from tests.kit.hub import run_python
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import generator, make_model, shake

SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "kernel_size": 5, "bidirectional": False}
TEXTS = ["Once upon", "a time there"]
GENERATION = {"max_new_tokens": 12, "do_sample": False}

# Runs where hf_ext cannot be imported. Arguments: repositories with their commits as JSON, recordings, texts, output.
PULL = """
import json, sys
repositories, recordings, texts, out = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
sys.modules["hf_ext"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification, AutoModelForCausalLM, AutoTokenizer

recordings, results = list(load_file(recordings).values()), {}
options = {name: {"revision": commit, "trust_remote_code": True} for name, commit in repositories.items()}
extractor = AutoFeatureExtractor.from_pretrained("org/sounds", **options["org/sounds"])
inputs = extractor(recordings, sampling_rate=8000, padding=True, return_tensors="pt")
sounds = AutoModelForAudioClassification.from_pretrained("org/sounds", **options["org/sounds"])
tokenizer = AutoTokenizer.from_pretrained("org/words", padding_side="left", **options["org/words"])
words = AutoModelForCausalLM.from_pretrained("org/words", **options["org/words"])
for part in (extractor, sounds, words):
    assert type(part).__module__.startswith("transformers_modules."), type(part)
generation = json.loads(sys.argv[5])
for name in ("branches", "merged"):
    with torch.no_grad():
        results[f"logits, {name}"] = sounds(**inputs).logits
    prompts = tokenizer(texts, padding=True, return_tensors="pt")
    for cached in (True, False):
        results[f"tokens, {name}, {cached}"] = words.generate(**prompts, **generation, use_cache=cached)
    sounds.reparameterize()
    words.reparameterize()
save_file(results, out)
"""


def save_task(task, folder: Path) -> Path:
    """A model away from its initial values and what reads its input, as a training saves them."""
    torch.manual_seed(0)
    model = task.build_model(SIZES, None)
    shake(model)
    task.save_model(model.eval(), model.state_dict(), folder)
    return folder


@pytest.mark.slow
def test_models_are_pushed_and_pulled_with_and_without_hf_ext(hub, tmp_path, warm_checks):
    folders = {
        "org/sounds": save_task(AudioTask(sampling_rate=8000, max_length=64), tmp_path / "sounds"),
        "org/words": save_task(LanguageModelTask(max_length=64), tmp_path / "words"),
    }
    options = {"endpoint": hub.url, "token": False}
    # One of them also goes through the check of what is pushed.
    commits = {name: push(folder, name, check=name == "org/sounds", **options).oid for name, folder in folders.items()}
    recordings = {f"{length}": torch.randn(length, generator=generator(length)) for length in (20, 51)}
    save_file(recordings, tmp_path / "recordings")
    words = [json.dumps(commits), str(tmp_path / "recordings"), json.dumps(TEXTS), str(tmp_path / "out")]
    run_python(PULL, hub.url, tmp_path / "home", *words, json.dumps(GENERATION))
    results = load_file(tmp_path / "out")

    pulled = {
        name: snapshot_download(name, revision=commit, cache_dir=tmp_path / "cache", **options)
        for name, commit in commits.items()
    }
    close_session()
    extractor = AutoFeatureExtractor.from_pretrained(pulled["org/sounds"])
    again = AutoModelForAudioClassification.from_pretrained(pulled["org/sounds"])
    assert (type(extractor), type(again)) == (MRConvFeatureExtractor, MRConvForAudioClassification)
    inputs = extractor(list(load_file(tmp_path / "recordings").values()), sampling_rate=8000, padding=True)
    inputs = inputs.convert_to_tensors("pt")
    with torch.no_grad():
        model = MRConvForAudioClassification.from_pretrained(folders["org/sounds"])
        assert_same_weights(again, model)
        expected = model(**inputs).logits
        assert_same_answers(again(**inputs).logits, expected)
    for name in ("branches", "merged"):
        assert_same_answers(results[f"logits, {name}"], expected)
        assert torch.equal(results[f"logits, {name}"].argmax(-1), expected.argmax(-1))

    tokenizer = AutoTokenizer.from_pretrained(pulled["org/words"], padding_side="left")
    again = AutoModelForCausalLM.from_pretrained(pulled["org/words"])
    assert type(again) is MRConvForCausalLM
    tokens = again.generate(**tokenizer(TEXTS, padding=True, return_tensors="pt"), **GENERATION)
    assert tokens.shape[1] == max(map(len, TEXTS)) + GENERATION["max_new_tokens"]
    for name in ("branches", "merged"):
        for cached in (True, False):
            assert torch.equal(results[f"tokens, {name}, {cached}"], tokens), name


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
        assert results[name], name
    return results

strange = run("transformers_modules.", trust_remote_code=True)
del sys.modules["hf_ext"]
import hf_ext
# False: transformers itself looks for a video processor beside every image processor, and would ask for trust in it.
json.dump([strange, run("hf_ext.mrconv.", trust_remote_code=False)], open(out, "w"))
"""


@pytest.mark.slow
def test_the_task_that_a_card_names_is_what_pipelines_run(hub, tmp_path):
    made = {
        "org/pixels": (PixelTask(image_size=8), "image-classification"),
        "org/sounds": (AudioTask(sampling_rate=8000, max_length=64), "audio-classification"),
        "org/lists": (ListOpsTask(max_length=32), "text-classification"),
        "org/words": (LanguageModelTask(max_length=64), "text-generation"),
        "org/older": (PixelTask(image_size=8), "image-classification"),
        "org/pairs": (RetrievalTask(max_length=32), None),
    }
    tasks = {}
    for name, (task, expected) in made.items():
        folder = save_task(task, tmp_path / name.partition("/")[2])
        if name == "org/older":
            # what earlier versions wrote
            config = json.loads((folder / "config.json").read_text())
            config |= {"architectures": ["MRConvForSequenceClassification"]}
            (folder / "config.json").write_text(json.dumps(config))
        push(folder, name, endpoint=hub.url, token=False, check=False)
        tag = HfApi(endpoint=hub.url, token=False).model_info(name).pipeline_tag
        assert tag == expected, name
        if tag is not None:
            tasks[name] = tag
    close_session()
    run_python(TASKS, hub.url, tmp_path / "home", json.dumps(tasks), str(tmp_path / "out.json"))
    strange, ours = json.loads((tmp_path / "out.json").read_text())
    assert strange.keys() == ours.keys() == tasks.keys()
    for name in ("org/pixels", "org/sounds", "org/lists", "org/older"):
        for one, other in zip(strange[name], ours[name], strict=True):
            assert one["label"] == other["label"] and abs(one["score"] - other["score"]) < 1e-5
    assert strange["org/words"] == ours["org/words"]


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


def test_a_classifier_of_pixels_is_staged_with_every_head_and_its_image_processor(tmp_path):
    folder = stage(save_task(PixelTask(image_size=8), tmp_path / "digits"), tmp_path / "staged")
    for name in ("config.json", "preprocessor_config.json"):
        for reference in json.loads((folder / name).read_text())["auto_map"].values():
            assert (folder / f"{reference.partition('.')[0]}.py").is_file()


def test_a_processor_of_another_kind_is_refused(tmp_path):
    folder = save_task(PixelTask(image_size=8), tmp_path / "digits")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    with refused(DataError, "ViTImageProcessor"):
        stage(folder, tmp_path / "staged")
