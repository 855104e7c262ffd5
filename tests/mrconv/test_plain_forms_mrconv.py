"""A checkpoint where hf_ext is not installed: it answers and learns as here, by the plain forms of its operators."""

import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from hf_ext.mrconv import MRConvForSequenceClassification, MRConvNextConfig, MRConvNextForImageClassification
from tests.kit import warm_python
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


def token_case(**fields):
    mask = torch.ones(3, 37, dtype=torch.int64)
    mask[0, :9], mask[2, 30:] = 0, 0
    model = make_model(MRConvForSequenceClassification, **{**TOKENS, **fields})
    return AutoModelForSequenceClassification, model, {"input_ids": make_tokens(3, 37), "attention_mask": mask}


def image_case():
    torch.manual_seed(0)
    config = MRConvNextConfig(image_size=16, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    model = MRConvNextForImageClassification(config)
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
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-c", ABSENT, str(tmp_path), head.__name__]
    done = warm_python.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    names = {"torch": torch}
    exec(STEPS, names)
    found, wanted = load_file(tmp_path / "results"), names["steps"](model, inputs)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# Each in a new process, where no models were registered.
WAYS = {
    "a name": "import hf_ext; hf_ext.MRConvConfig",
    "a command": "from hf_ext_cli.library import register_models; register_models()",
    "a task": "import hf_ext.tasks.signals",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whoever_gets_the_models_from_the_package_gets_what_makes_them_fast(way, tmp_path):
    program = f"{WAYS[way]}\nfrom hf_ext.mrconv.ops_mrconv import FAST\nassert len(FAST) == 4, FAST"
    done = warm_python.run(
        [sys.executable, "-c", program], env={**os.environ, "HF_EXT_REGISTER_MODELS": "0"}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
