"""A checkpoint where hf_ext is not installed: it loads, answers and learns as here, by plain forms of operators."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from hf_ext import mrconv
from tests.kit import warm_python
from tests.kit.models import assert_same_weights
from tests.mrconv import test_heads_mrconv as heads
from tests.mrconv.mrconv_testing import TOKENS, generator, make_model, make_tokens, shake

# Runs here, and in a process where hf_ext cannot be imported.
STEPS = """
def steps(model, inputs):
    model.eval()
    results = {"before": model(**inputs).logits}
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(**inputs, labels=torch.arange(3)).loss
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
import sys
sys.modules["hf_ext"] = None
import torch
import transformers
from safetensors.torch import load_file, save_file
{STEPS}
folder, head = sys.argv[1:]
model = getattr(transformers, head).from_pretrained(folder + "/model", trust_remote_code=True)
ops = [module for name, module in sys.modules.items() if name.endswith("ops_mrconv")]
assert len(ops) == 1 and ops[0].__name__.startswith("transformers_modules.") and ops[0].FAST == {{}}, ops
save_file(steps(model, load_file(folder + "/inputs")), folder + "/results")
"""


def run_absent(program: str, folder: Path, *words: str) -> None:
    """A program in a process with an empty home; its first argument is the folder."""
    environment = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = warm_python.run([sys.executable, "-c", program, str(folder), *words], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr


def token_case(**fields):
    mask = torch.ones(3, 37, dtype=torch.int64)
    mask[0, :9], mask[2, 30:] = 0, 0
    model = make_model(mrconv.MRConvForSequenceClassification, **{**TOKENS, **fields})
    return AutoModelForSequenceClassification, model, {"input_ids": make_tokens(3, 37), "attention_mask": mask}


def image_case():
    torch.manual_seed(0)
    config = mrconv.MRConvNextConfig(image_size=16, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    model = mrconv.MRConvNextForImageClassification(config)
    shake(model)
    return AutoModelForImageClassification, model, {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator())}


CASES = {
    "tokens": token_case,
    "both wings": lambda: token_case(bidirectional=True, kernel_type="fourier_sparse"),
    "images": image_case,
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "tokens" else pytest.mark.slow) for case in CASES]
)
def test_a_checkpoint_answers_and_learns_alike_without_the_package(case, tmp_path):
    head, model, inputs = CASES[case]()
    model.save_pretrained(tmp_path / "model")
    save_file(inputs, tmp_path / "inputs")
    run_absent(ABSENT, tmp_path, head.__name__)
    names = {"torch": torch}
    exec(STEPS, names)
    found, wanted = load_file(tmp_path / "results"), names["steps"](model, inputs)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


SPARSE = {**TOKENS, "kernel_type": "sparse"}
SOUND = {**TOKENS, "vocab_size": None, "sampling_rate": 8000}
# What follows `AutoModel` and `MRConv` in the names of its classes, and its fields.
KINDS = {
    "base": ("", "Model", SPARSE),
    "retrieval": ("ForNextSentencePrediction", "ForRetrieval", SPARSE),
    "language": ("ForCausalLM", "ForCausalLM", SPARSE),
    "masked": ("ForMaskedLM", "ForMaskedLM", {**SPARSE, "bidirectional": True}),
    "positions": ("ForTokenClassification", "ForTokenClassification", heads.CHANNELS),
    "deltas": ("ForSequenceClassification", "ForSequenceClassification", heads.DELTAS),
    "sound": ("ForAudioClassification", "ForAudioClassification", SOUND),
    "image": ("ForImageClassification", "NextForImageClassification", {}),
}
TAKEN = {
    "retrieval": {"input_ids": "tokens", "input_ids_2": "tokens"},
    "sound": {"raw_speech": "audio"},
    "image": {"images": "picture"},
    **dict.fromkeys(("positions", "deltas"), {"input_values": "values"}),
}
PROCESSORS = {
    "sound": ("AutoFeatureExtractor", mrconv.MRConvFeatureExtractor(sampling_rate=8000)),
    "image": ("AutoImageProcessor", mrconv.MRConvNextImageProcessor(size={"shortest_edge": 16})),
}
PREPARE = """
def prepare(processor, given):
    rate = {"sampling_rate": 8000} if "raw_speech" in given else {}
    return processor(*given.values(), return_tensors="pt", **rate)
"""
LOAD_ABSENT = f"""
import json, sys
sys.modules["hf_ext"] = None
import torch, transformers
from safetensors.torch import load_file, save_file
{PREPARE}
folder, kinds = sys.argv[1], json.loads(sys.argv[2])
inputs, results = load_file(folder + "/inputs"), {{}}

def load(auto_class, kind):
    part = getattr(transformers, auto_class).from_pretrained(f"{{folder}}/first/{{kind}}", trust_remote_code=True)
    assert type(part).__module__.startswith("transformers_modules."), type(part)
    part.save_pretrained(f"{{folder}}/second/{{kind}}")
    return part

for kind, (auto_class, processor_class, names) in kinds.items():
    model = load(auto_class, kind)
    given = {{name: inputs[of] for name, of in names.items()}}
    given = prepare(load(processor_class, kind), given) if processor_class else given
    with torch.no_grad():
        results[kind] = model(**given)[0]
    if kind in ("base", "language"):
        # A body that was saved alone reads no packed rows, and says so; one of a language model does.
        given["position_ids"] = torch.arange(len(given["input_ids"][0]))[None] % 10
        try:
            packed = model(**given)[0][:, :10]
            torch.testing.assert_close(packed, results[kind][:, :10])
        except ValueError as error:
            packed = error
        assert isinstance(packed, ValueError) == (kind == "base"), packed
    if kind == "language":
        found = model.generate(inputs["tokens"], max_new_tokens=3, do_sample=False)
        assert torch.equal(found, model.generate(inputs["tokens"], max_new_tokens=3, do_sample=False, use_cache=False))
save_file(results, folder + "/results")
"""


@pytest.mark.slow
def test_folders_load_through_auto_classes_and_save_again_with_and_without_hf_ext(tmp_path):
    torch.set_num_threads(1)
    names = {}
    exec(PREPARE, names)
    picture = torch.randint(256, (3, 20, 30), dtype=torch.uint8, generator=generator())
    inputs = {"tokens": make_tokens(2, 20), "values": heads.make_measurements(2, 20), "picture": picture}
    inputs["audio"] = torch.randn(20, generator=generator())
    save_file(inputs, tmp_path / "inputs")
    models, expected, told = {}, {}, {}
    for kind, (auto_class, head, fields) in KINDS.items():
        taken = TAKEN.get(kind, {"input_ids": "tokens"})
        given = {name: inputs[of] for name, of in taken.items()}
        model = image_case()[1] if kind == "image" else make_model(getattr(mrconv, f"MRConv{head}"), **fields)
        model = model.reparameterize() if kind in ("retrieval", "image") else model
        processor_class, processor = PROCESSORS.get(kind, (None, None))
        for part in filter(None, (model, processor)):
            part.save_pretrained(tmp_path / "first" / kind)
        loaded = getattr(transformers, f"AutoModel{auto_class}").from_pretrained(tmp_path / "first" / kind)
        assert type(loaded) is type(model) is getattr(mrconv, f"MRConv{head}")
        with torch.no_grad():
            expected[kind] = loaded(**(names["prepare"](processor, given) if processor else given))[0]
        models[kind], told[kind] = model, (f"AutoModel{auto_class}", processor_class, taken)
    run_absent(LOAD_ABSENT, tmp_path, json.dumps(told))
    results = load_file(tmp_path / "results")
    for kind, model in models.items():
        torch.testing.assert_close(results[kind], expected[kind], atol=1e-6, rtol=1e-6)
        # What was saved from remote code is ours again.
        first, second = (tmp_path / name / kind for name in ("first", "second"))
        again = getattr(transformers, told[kind][0]).from_pretrained(second)
        assert type(again) is type(model)
        assert_same_weights(again, model)
        assert {file.name for file in first.iterdir()} == {file.name for file in second.iterdir()}
        if kind in PROCESSORS:
            processor_class, processor = PROCESSORS[kind]
            assert type(getattr(transformers, processor_class).from_pretrained(second)) is type(processor)
            texts = [json.loads((place / "preprocessor_config.json").read_text()) for place in (first, second)]
            assert texts[0] == texts[1]


# Each in a new process, where no models were registered.
WAYS = {
    "a name": "import hf_ext; hf_ext.MRConvConfig",
    "a command": "from hf_ext_cli.library import register_models; register_models()",
    "a task": "import hf_ext.tasks.signals",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whoever_gets_the_models_from_the_package_gets_what_makes_them_fast(way, tmp_path):
    program = f"{WAYS[way]}\nfrom hf_ext.mrconv.ops_mrconv import FAST\nassert len(FAST) == 6, FAST"
    done = warm_python.run(
        [sys.executable, "-c", program], env={**os.environ, "HF_EXT_REGISTER_MODELS": "0"}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
