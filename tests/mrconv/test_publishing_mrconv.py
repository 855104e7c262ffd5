"""MRConv on a Hub: pushed with its feature extractor or tokenizer, pulled with and without hf_ext, equal results."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, snapshot_download
from safetensors.torch import load_file, save_file
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification, AutoModelForCausalLM, AutoTokenizer

from hf_ext.hub.publish import push, stage
from hf_ext.mrconv import MRConvFeatureExtractor, MRConvForAudioClassification, MRConvForCausalLM
from hf_ext.mrconv.training_signals_mrconv import AudioTask, PixelTask
from hf_ext.mrconv.training_text_mrconv import LanguageModelTask
from tests.hub_testing import run_python
from tests.testing import assert_same_answers, assert_same_weights

from .mrconv_testing import generator, shake

# huggingface_hub 2.4 itself sends large files with an argument that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

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


def test_a_classifier_of_pixels_is_staged_with_every_head_and_its_image_processor(tmp_path):
    folder = stage(save_task(PixelTask(image_size=8), tmp_path / "digits"), tmp_path / "staged")
    for name in ("config.json", "preprocessor_config.json"):
        for reference in json.loads((folder / name).read_text())["auto_map"].values():
            assert (folder / f"{reference.partition('.')[0]}.py").is_file()


def test_a_processor_of_another_kind_is_refused(tmp_path):
    folder = save_task(PixelTask(image_size=8), tmp_path / "digits")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    with pytest.raises(ValueError, match="names the class 'ViTImageProcessor'; one of"):
        stage(folder, tmp_path / "staged")
