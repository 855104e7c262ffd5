"""A checkpoint where hf_ext is not installed: it loads, answers and learns as here, by plain forms of operators."""

import json
import os
import sys
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_ext import mrconv
from tests.kit import warm_python
from tests.kit.models import assert_same_weights
from tests.mrconv import test_heads_mrconv as heads
from tests.mrconv.mrconv_testing import TOKENS, generator, make_image_model, make_model, make_tokens

# Runs here, and in a process where hf_ext cannot be imported.
SHARED = """
import torch

def prepare(processor, given):
    rate = {"sampling_rate": 8000} if "raw_speech" in given else {}
    return processor(*given.values(), return_tensors="pt", **rate) if processor else given

def steps(model, inputs, learns):
    model.eval()
    results = {"before": model(**inputs)[0]}
    if learns:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = model(**inputs, labels=torch.arange(len(results["before"])) % 3).loss
        loss.backward()
        results |= {"gradient of " + name: value.grad for name, value in model.named_parameters()}
        optimizer.step()
        results |= {"loss": loss} | {"trained " + name: value for name, value in model.state_dict().items()}
        model.eval()
        results["after"] = model(**inputs).logits
        model.reparameterize()
        results["merged"] = model(**inputs).logits
    return {name: value.detach().clone() for name, value in results.items()}
"""
ABSENT = f"""
import json, sys
sys.modules["hf_ext"] = None
import transformers
from safetensors.torch import load_file, save_file
{SHARED}
folder, kinds = sys.argv[1], json.loads(sys.argv[2])
inputs, results = load_file(folder + "/inputs"), {{}}

def load(auto_class, kind):
    part = getattr(transformers, auto_class).from_pretrained(f"{{folder}}/first/{{kind}}", trust_remote_code=True)
    assert type(part).__module__.startswith("transformers_modules."), type(part)
    part.save_pretrained(f"{{folder}}/second/{{kind}}")
    return part

for kind, (auto_class, processor_class, names, learns) in kinds.items():
    model = load(auto_class, kind)
    given = {{name: inputs[of] for name, of in names.items()}}
    given = prepare(load(processor_class, kind) if processor_class else None, given)
    results |= {{f"{{kind}}: {{name}}": value for name, value in steps(model, given, learns).items()}}
    if kind in ("base", "language"):
        # A body that was saved alone reads no packed rows, and says so; one of a language model does.
        given["position_ids"] = torch.arange(len(given["input_ids"][0]))[None] % 10
        try:
            packed = model(**given)[0][:, :10]
            torch.testing.assert_close(packed, results[kind + ": before"][:, :10])
        except ValueError as error:
            packed = error
        assert isinstance(packed, ValueError) == (kind == "base"), packed
    if kind == "language":
        start = inputs["tokens"][:, :20]
        found = model.generate(start, max_new_tokens=3, do_sample=False)
        assert torch.equal(found, model.generate(start, max_new_tokens=3, do_sample=False, use_cache=False))
ops = [module for name, module in sys.modules.items() if name.endswith("ops_mrconv")]
assert ops and all(one.__name__.startswith("transformers_modules.") and one.FAST == {{}} for one in ops), ops
save_file(results, folder + "/results")
"""


class Kind(NamedTuple):
    """What follows `AutoModel` and `MRConv` in the names of its classes, its fields, what it takes, and if it learns
    here too."""

    auto_class: str
    head: str
    fields: dict[str, Any]
    taken: dict[str, str] = {"input_ids": "tokens"}
    learns: bool = False


SPARSE, SOUND = {**TOKENS, "kernel_type": "sparse"}, {**TOKENS, "vocab_size": None, "sampling_rate": 8000}
BOTH = {**TOKENS, "bidirectional": True, "kernel_type": "fourier_sparse"}
CLASSES, PADDED = "ForSequenceClassification", {"input_ids": "tokens", "attention_mask": "mask"}
PAIR = {"input_ids": "tokens", "input_ids_2": "tokens"}
KINDS = {
    "tokens": Kind(CLASSES, CLASSES, TOKENS, PADDED, True),
    "both wings": Kind(CLASSES, CLASSES, BOTH, PADDED, True),
    "base": Kind("", "Model", SPARSE),
    "retrieval": Kind("ForNextSentencePrediction", "ForRetrieval", SPARSE, PAIR),
    "language": Kind("ForCausalLM", "ForCausalLM", SPARSE),
    "masked": Kind("ForMaskedLM", "ForMaskedLM", {**SPARSE, "bidirectional": True}),
    "positions": Kind("ForTokenClassification", "ForTokenClassification", heads.CHANNELS, {"input_values": "values"}),
    "deltas": Kind(CLASSES, CLASSES, heads.TestDeltaFeatures.fields, {"input_values": "values"}),
    "sound": Kind("ForAudioClassification", "ForAudioClassification", SOUND, {"raw_speech": "audio"}),
    "image": Kind("ForImageClassification", "NextForImageClassification", {}, {"images": "picture"}, True),
}
PROCESSORS = {
    "sound": ("AutoFeatureExtractor", mrconv.MRConvFeatureExtractor(sampling_rate=8000)),
    "image": ("AutoImageProcessor", mrconv.MRConvNextImageProcessor(size={"shortest_edge": 16})),
}


def make_inputs() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 37, dtype=torch.int64)
    mask[0, :9], mask[2, 30:] = 0, 0
    picture = torch.randint(256, (3, 20, 30), dtype=torch.uint8, generator=generator())
    inputs = {"tokens": make_tokens(3, 37), "mask": mask, "values": heads.make_measurements(2, 20)}
    return inputs | {"picture": picture, "audio": torch.randn(20, generator=generator())}


@pytest.mark.parametrize(
    "kinds", [["tokens"], pytest.param([kind for kind in KINDS if kind != "tokens"], marks=pytest.mark.slow)]
)
def test_a_checkpoint_answers_learns_and_is_saved_alike_without_the_package(kinds, tmp_path):
    shared, inputs, models, expected, told = {}, make_inputs(), {}, {}, {}
    exec(SHARED, shared)
    save_file(inputs, tmp_path / "inputs")
    for name in kinds:
        kind = KINDS[name]
        model_class = getattr(mrconv, f"MRConv{kind.head}")
        model = make_image_model() if name == "image" else make_model(model_class, **kind.fields)
        models[name] = model.reparameterize() if name == "retrieval" else model
        processor_class, processor = PROCESSORS.get(name, (None, None))
        for part in filter(None, (model, processor)):
            part.save_pretrained(tmp_path / "first" / name)
        loaded = getattr(transformers, f"AutoModel{kind.auto_class}").from_pretrained(tmp_path / "first" / name)
        assert type(loaded) is type(model)
        given = shared["prepare"](processor, {key: inputs[of] for key, of in kind.taken.items()})
        expected |= {f"{name}: {key}": value for key, value in shared["steps"](loaded, given, kind.learns).items()}
        told[name] = f"AutoModel{kind.auto_class}", processor_class, kind.taken, kind.learns
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-c", ABSENT, str(tmp_path), json.dumps(told)]
    done = warm_python.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(load_file(tmp_path / "results"), expected, atol=1e-6, rtol=1e-5)
    for name, model in models.items():
        # What was saved from remote code is ours again.
        first, second = (tmp_path / place / name for place in ("first", "second"))
        again = getattr(transformers, told[name][0]).from_pretrained(second)
        assert type(again) is type(model)
        assert_same_weights(again, model)
        assert {file.name for file in first.iterdir()} == {file.name for file in second.iterdir()}
        if name in PROCESSORS:
            processor_class, processor = PROCESSORS[name]
            assert type(getattr(transformers, processor_class).from_pretrained(second)) is type(processor)
            texts = [json.loads((place / "preprocessor_config.json").read_text()) for place in (first, second)]
            assert texts[0] == texts[1]


# Each in a new process, where no models were registered.
WAYS = {
    "a name": "import hf_ext; hf_ext.MRConvConfig",
    "a command": "from hf_ext_cli import register_models; register_models()",
    "a task": "import hf_ext.tasks.signals",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whoever_gets_the_models_from_the_package_gets_what_makes_them_fast(way, tmp_path):
    program = f"{WAYS[way]}\nfrom hf_ext.mrconv.ops_mrconv import FAST\nassert len(FAST) == 6, FAST"
    environment = {**os.environ, "HF_EXT_REGISTER_MODELS": "0"}
    done = warm_python.run([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
