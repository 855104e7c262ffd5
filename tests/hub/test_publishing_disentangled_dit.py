"""Pipelines are staged, checked, described and pushed like models."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from PIL import Image

from hf_ext.errors import DataError, NotPublished
from hf_ext.hub.cards import write_card
from hf_ext.hub.checkpoints import open_checkpoint
from hf_ext.hub.load_check import check_loads, verify_code
from hf_ext.hub.publish import push, stage
from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, make_vae
from tests.hub.published import EVALUATION, contents, edit
from tests.hub.test_cards import assert_finished
from tests.kit.hub import run_python
from tests.kit.models import assert_same_weights
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

pytestmark = pytest.mark.usefixtures("warm_checks")

CODE = ["pipeline.py", "transformer/disentangled_dit.py"]
STAGED = sorted(
    [*CODE, "README.md", "model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"]
    + ["transformer/diffusion_pytorch_model.safetensors"]
)


@pytest.fixture
def snapshot(tmp_path) -> Path:
    """What a training leaves: a pipeline, its reports, and things that are not published."""
    make_pipeline().save_pretrained(tmp_path / "snapshot")
    left = {"eval.json": json.dumps(EVALUATION), "notes.txt": "private", "transformer/log.txt": "private"}
    return write_files(tmp_path / "snapshot", left)


@pytest.mark.slow
def test_stage_writes_a_clean_copy_that_loads_anywhere(tmp_path, snapshot):
    out = stage(snapshot, tmp_path / "staged", repo_id="org/pictures")
    assert sorted(contents(out)) == sorted([*STAGED, "eval.json", ".eval_results/hf_ext.yaml"])
    assert str(tmp_path) not in "".join(path.read_text() for path in out.rglob("*.json"))
    check_loads(out)
    loaded, before = (DisentangledDiTPipeline.from_pretrained(folder) for folder in (out, snapshot))
    assert_same_weights(loaded.transformer, before.transformer)
    assert stage(out, out, overwrite=True) == out
    # The check finds missing weights.
    edit(out / "transformer" / "config.json", num_layers=4)
    with refused(ValueError, "hf_ext"):
        check_loads(out)


def test_a_pipeline_is_pushed_described_and_pulled(tmp_path, hub, options, api, snapshot):
    make_pipeline(vae=make_vae()).save_pretrained(tmp_path / "latents")
    push(tmp_path / "latents", "org/pictures", **options)
    first = api.list_repo_files("org/pictures")
    assert {*STAGED, "vae/config.json", "vae/diffusion_pytorch_model.safetensors"} < set(first)
    # a later push without an autoencoder leaves no part of the earlier one behind
    push(snapshot, "org/pictures", **options)
    assert not [name for name in api.list_repo_files("org/pictures") if name.startswith("vae/")]
    pulled = snapshot_download("org/pictures", endpoint=hub.url, token=False, local_dir=tmp_path / "pulled")
    verify_code(Path(pulled))


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_networks_keep_their_type_and_take_the_default_names(variant, tmp_path):
    source = tmp_path / "source"
    make_text_pipeline().to(torch.bfloat16).save_pretrained(source, variant=variant)
    out = stage(source, tmp_path / "staged")
    for part in ("transformer", "text_encoder"):
        assert not list((out / part).glob("*fp16*"))
        with open_checkpoint(source / part) as before, open_checkpoint(out / part) as after:
            assert all(after[name].dtype == torch.bfloat16 and after[name].equal(before[name]) for name in before)


PIPELINES = {
    "classes": (make_pipeline, "pictures of a class, in pixels", "unconditional-image-generation"),
    "latents": (lambda: make_pipeline(vae=make_vae()), "in the latents of an autoencoder", "unconditional-image-gen"),
    "text": (make_text_pipeline, "pictures of a text, in pixels", "text-to-image"),
    "without dropout": (lambda: make_pipeline(condition_dropout=0.0), "trained without dropping", "unconditional"),
    "without controls": (lambda: make_pipeline(control_alpha={}), "| controls | none |", "unconditional"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize("name", PIPELINES)
def test_the_card_says_what_the_pipeline_takes_and_its_snippet_runs(name, tmp_path):
    make, phrase, tag = PIPELINES[name]
    pipeline = make()
    pipeline.save_pretrained(tmp_path / "pipeline")
    card = write_card(tmp_path / "pipeline", repo_id=str(tmp_path / "pipeline")).read_text()
    assert_finished(card)
    assert phrase in " ".join(card.split()) and f"pipeline_tag: {tag}" in card and "library_name: diffusers" in card
    assert ("- class-conditional\n" in card) == (name != "text")
    networks = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert f"| parameters | {sum(p.numel() for part in networks for p in part.parameters()):,} |" in card
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    absent = "import sys\nsys.modules['hf_ext'] = None\n"
    printed = run_python(f"{absent}{snippet}\nprint(type(pipeline).__module__)", "http://127.0.0.1:1", tmp_path)
    assert printed.startswith("diffusers_modules.local")
    with Image.open(tmp_path / "sample.png") as image:
        assert image.size == ((20, 12) if pipeline.vae is not None else (10, 6))


@pytest.mark.parametrize("name", ["pipeline.py", "vae/other.py"])
def test_code_that_is_not_ours_is_neither_run_nor_uploaded(name, tmp_path, snapshot):
    out = write_files(stage(snapshot, tmp_path / "staged"), {name: "raise SystemExit('this ran')\n"})
    with refused(ValueError, name.rpartition("/")[2], "hf_ext"):
        check_loads(out)
    # staging writes the installed code, whatever lay beside the weights
    assert set(contents(stage(out, tmp_path / "again"))) >= set(STAGED)
    verify_code(tmp_path / "again")


CLASSES = (["other", "DisentangledDiTPipeline"], ["pipeline", "Other"], "StableDiffusionPipeline")


@pytest.mark.parametrize("fields", [*({"_class_name": name} for name in CLASSES), {"vae": ["other", "VAE"]}])
def test_an_index_that_names_other_code_is_refused(fields, tmp_path, snapshot):
    edit(snapshot / "model_index.json", **fields)
    for refuse in (lambda: stage(snapshot, tmp_path / "staged"), lambda: verify_code(snapshot)):
        with refused(ValueError, *fields):
            refuse()


def test_pickles_and_kernels_are_refused(tmp_path, snapshot):
    (snapshot / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps({}))
    with refused(NotPublished, "diffusion_pytorch_model.bin"):
        stage(snapshot, tmp_path / "staged")
    text = tmp_path / "text"
    make_text_pipeline().save_pretrained(text)
    edit(text / "text_encoder" / "config.json", attn_implementation="org/kernel")
    with refused(DataError, "kernel", "names"):
        stage(text, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()
