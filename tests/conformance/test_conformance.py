"""transformers' own test suite against our classes (slow: it downloads the suite; `make conformance`)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .download import transformers_tests

HERE = Path(__file__).resolve().parent

# Why a test of transformers may skip itself. Another reason fails: a test that used to run would be lost in silence.
EXPLAINED = re.compile(
    "|".join(
        (
            # This machine or environment.
            r"test requires (accelerator|multiple accelerators|MPS|deepspeed|the kernels library|Flash Attention.*)",
            r"test is slow",
            # What image restoration does not have: tokens, generation, positions, experts, a matrix of attention.
            r"(images|waveforms) are not embedded by a table.*|test_resize_embeddings is set to `False`",
            r"This model doesn't use `inputs_embeds`|No \S+ language modeling head to check",
            r".*(position embeddings|RoPE|sparse experts|output_router_logits|grouped_mm).*",
            # The shared tests of RoPE say this of a tester with heads alone.
            r"This model has no `base_model_class` defined in tester\.",
            r".*(not support attentions|not (support output_|output )attentions|does not support SDPA).*",
            r"This model does not support setting its attention dynamically",
            r"Parts of this model don't support sdpa|This model is not composite",
            # From transformers 5.24 on: its test of the cache's earlier name asks for its own classes of caches.
            r"Do not take a cache as input to forward|Not returning cache or non standard Cache",
            # What the classes do not declare: parallel plans, float32 modules, conversions of older checkpoints.
            r"Model does not have a TP plan\.|No conversion found for .*|.*_keep_in_fp32_modules.*|No subconfigs .*",
            # Image processing without torchvision, without resizing, by one backend.
            r"a rule of the transformers repository: hf_ext does not require torchvision",
            r"Skipping .* less than 2 backends|Skipping test as torchvision backend is not available",
            r"Skipping test as the image processor does not have dict size or list image_mean attributes",
            r"No validation found for `preprocess` method",
        )
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mrconv", "mrconvnext", "semanir"])
def test_our_classes_pass_the_tests_of_transformers(method):
    tree = transformers_tests()
    target = tree / "tests" / "models" / method / f"test_{method}.py"
    target.parent.mkdir(exist_ok=True)
    (target.parent / "__init__.py").touch()
    shutil.copyfile(HERE / f"suite_{method}.py", target)
    shutil.copy(HERE / "suite_shared.py", target.parent)
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", done.stdout, re.MULTILINE)
    assert [reason for reason in reasons if not EXPLAINED.fullmatch(reason)] == []
    # All of it skipped would be a success for pytest.
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 100, done.stdout[-2000:]
