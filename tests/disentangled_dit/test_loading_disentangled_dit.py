"""Pipelines load with and without hf_ext, from a folder and from a Hub, and again when they were saved again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.pipeline_loading_utils import _fetch_class_library_tuple
from diffusers.utils.dynamic_modules_utils import find_pipeline_class
from huggingface_hub import close_session
from safetensors.torch import load_file

from hf_ext import pipelines
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.hub.publish import push, stage
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, make_vae, quiet
from tests.kit.hub import run_python
from tests.kit.models import assert_same_answers

# huggingface_hub 2.4 itself sends large files with an argument that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

CALLS = {
    "class": {"class_labels": ["hen", 1], "original_size": [(20, 30)] * 2, "control_guidance_scale": 2.0},
    "text": {"prompt": "a red hen"},
}
SHARED = {"shared_stream": True, "modulation": "shared"}
COMMON = {"num_inference_steps": 3, "output_type": "latent"}

# Runs in its own process. Arguments: "absent" or "installed"; sources by name and calls as JSON; where to write.
LOAD = """
import json, shutil, sys
from pathlib import Path
presence, sources, calls, out = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])
if presence == "absent":
    sys.modules["hf_ext"] = None
else:
    import hf_ext.pipelines
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

trust = {"trust_remote_code": True} if presence == "absent" else {}
results = {}

def run(name, source, **options):
    pipeline = DiffusionPipeline.from_pretrained(source, **options, **trust)
    expected = "diffusers_modules.local." if presence == "absent" else "hf_ext.pipelines.disentangled_dit."
    for part in (pipeline, pipeline.transformer):
        assert type(part).__module__.startswith(expected), type(part)
    return pipeline, sample(name, pipeline)

def sample(name, pipeline):
    pipeline.set_progress_bar_config(disable=True)
    call = calls[name.partition("-")[0]]
    results[name] = pipeline(generator=torch.Generator().manual_seed(0), **call).images.contiguous()
    return results[name]

for name, source in sources.items():
    if presence == "absent":
        try:
            DiffusionPipeline.from_pretrained(source)
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise AssertionError("remote code ran without being trusted")
    pipeline, _ = run(name, source)
    if presence == "absent":
        # what older cards say
        older = DiffusionPipeline.from_pretrained(source, custom_pipeline="pipeline", **trust)
        assert type(older).__module__.startswith("diffusers_modules."), type(older)
    else:
        # the installed code is what runs, where it is trusted to run other code too
        trusted = DiffusionPipeline.from_pretrained(source, trust_remote_code=True)
        assert type(trusted) is hf_ext.pipelines.DisentangledDiTPipeline, type(trusted)
    pipeline.save_pretrained(out / name)
    run(f"{name}-again", out / name)
pipeline.push_to_hub(f"org/{presence}")
run(f"{name}-pushed", f"org/{presence}")
pipeline.save_pretrained(out / "named", push_to_hub=True, repo_id=f"org/{presence}-named")
run(f"{name}-named", f"org/{presence}-named")

if presence == "absent":
    # another version of both files, which takes the modules' place in this process
    first, expected = run("class-first", sources["class-local"])
    code = {path: path.read_text() for path in Path(sources["class-local"]).rglob("*.py")}
    shutil.copytree(sources["class-local"], out / "other")
    for file, old, new in (
        ("pipeline.py", "max(self._guidance_scale, 1.0)", "max(self._guidance_scale, 9.0)"),
        ("transformer/disentangled_dit.py", "/ 2) ** alpha", "/ 2) ** (9 + alpha)"),
    ):
        text = (out / "other" / file).read_text()
        assert old in text
        (out / "other" / file).write_text(text.replace(old, new))
    _, changed = run("class-second", out / "other")
    assert not torch.allclose(changed, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(sample("class-third", first), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    first.save_pretrained(out / "first")
    for path, text in code.items():
        assert (out / "first" / path.relative_to(sources["class-local"])).read_text() == text, path
    del results["class-second"]
save_file(results, out / "results.safetensors")
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[tuple[EmbeddedHub, Path, dict, dict]]:
    """A Hub and folders with a class and a text pipeline; the sources by name, and what each must give."""
    place = tmp_path_factory.mktemp("published")
    sources, expected = {}, {}
    threads = torch.get_num_threads()
    # their number decides the order of sums, and the other processes have one
    torch.set_num_threads(1)
    with EmbeddedHub(place / "hub") as hub:
        for name, pipeline in {"text": make_text_pipeline(), "class": make_pipeline(vae=make_vae(), **SHARED)}.items():
            pipeline.save_pretrained(place / "saved" / name)
            folder = stage(place / "saved" / name, place / name, repo_id=f"org/{name}")
            push(folder, f"org/{name}", endpoint=hub.url, token=False, check=False)
            sources |= {f"{name}-local": str(folder), f"{name}-hub": f"org/{name}"}
            images = pipeline(generator=generator(), **CALLS[name], **COMMON).images
            expected |= {f"{name}-local": images, f"{name}-hub": images}
        yield hub, place, sources, expected
        close_session()
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("presence", ["absent", "installed"])
def test_every_way_to_load_gives_the_same_answers(published, presence):
    hub, place, sources, expected = published
    out = place / presence
    out.mkdir()
    calls = json.dumps({name: call | COMMON for name, call in CALLS.items()})
    run_python(LOAD, hub.url, place / f"home-{presence}", presence, json.dumps(sources), calls, str(out))
    results = load_file(out / "results.safetensors")
    ways = {*sources, *(f"{name}-again" for name in sources), "class-hub-pushed", "class-hub-named"}
    assert set(results) == ways | ({"class-first", "class-third"} if presence == "absent" else set())
    for way, images in results.items():
        wanted = expected[f"{way.partition('-')[0]}-local"]
        assert_same_answers(images, wanted, way)
        assert wanted.isfinite().all() and wanted.std() > 0
    # what was saved from remote code is ours again, without a trust flag
    for name in sources:
        again = DiffusionPipeline.from_pretrained(out / name)
        assert type(again) is DisentangledDiTPipeline
        images = quiet(again)(generator=generator(), **CALLS[name.partition("-")[0]], **COMMON).images
        assert_same_answers(images, expected[name], name)


def test_a_saved_folder_says_what_it_needs(tmp_path):
    pipeline = make_pipeline()
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == ["pipeline", "DisentangledDiTPipeline"]
    assert index["transformer"] == ["disentangled_dit", "DisentangledDiTTransformer2DModel"]
    home = Path(pipelines.__file__).parent / "disentangled_dit"
    for saved, source in (("", "pipeline"), ("transformer/", "transformer_disentangled_dit")):
        copied = tmp_path / saved / f"{source.removeprefix('transformer_')}.py"
        assert copied.read_bytes() == (home / f"{source}.py").read_bytes()
    loaded = DisentangledDiTPipeline.from_pretrained(tmp_path)
    assert loaded.labels == pipeline.labels and loaded.get_label_ids("Tinca tinca") == [0]
    loaded.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "model_index.json").read_text())
    assert {key: value for key, value in again.items() if key != "_name_or_path"} == index
    # Folders of earlier versions load by the name of the class.
    earlier = again | {"_class_name": "DisentangledDiTPipeline"}
    (tmp_path / "again" / "model_index.json").write_text(json.dumps(earlier))
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "again")) is DisentangledDiTPipeline
    staged = stage(tmp_path / "again", tmp_path / "staged")
    assert json.loads((staged / "model_index.json").read_text())["_class_name"][0] == "pipeline"


def test_diffusers_finds_the_room_and_the_class():
    assert diffusers.DisentangledDiTPipeline is DisentangledDiTPipeline
    assert diffusers.pipelines.disentangled_dit.DisentangledDiTPipeline is DisentangledDiTPipeline
    # older cards name the file alone, in which diffusers then wants one class
    assert find_pipeline_class(sys.modules[DisentangledDiTPipeline.__module__]) is DisentangledDiTPipeline
    # this version of diffusers still records a component by the room that it is in
    found = _fetch_class_library_tuple(DisentangledDiTTransformer2DModel)
    assert found == ("disentangled_dit", "DisentangledDiTTransformer2DModel")


@pytest.mark.parametrize(("task", "name"), [("Text2Image", ""), ("Image2Image", "Img2Img"), ("Inpainting", "Inpaint")])
def test_the_pipeline_of_a_task_is_found(task, name, tmp_path):
    auto = getattr(diffusers, f"AutoPipelineFor{task}")
    pipeline = make_text_pipeline()
    pipeline.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    kind = getattr(diffusers, f"DisentangledDiT{name}Pipeline")
    assert type(loaded) is kind and loaded.config.max_text_length == 9
    same = auto.from_pipe(pipeline)
    assert type(same) is kind and same.transformer is pipeline.transformer
    assert same.config.prediction_type == "epsilon" and same.config.max_text_length == 9
    # each class goes to each of the others, and is saved as what it is
    back = diffusers.AutoPipelineForText2Image.from_pipe(same)
    assert type(back) is DisentangledDiTPipeline and back.transformer is pipeline.transformer
    same.save_pretrained(tmp_path / "same")
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "same")) is kind


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [("", "DisentangledDiTPipeline"), (".pipelines", "disentangled_dit")])
def test_a_name_that_diffusers_has_itself_is_not_taken(tmp_path, place, name):
    script = f"""
        import importlib, json, diffusers
        place = importlib.import_module("diffusers{place}")
        foreign = place.{name} = diffusers.DiTPipeline if "{name}".endswith("Pipeline") else json
        try:
            import hf_ext.pipelines
        except ImportError as error:
            assert place.{name} is foreign
            print(error)
    """
    printed = run_python(script, "http://127.0.0.1:1", tmp_path)
    assert f"{name} is " in printed and f"in diffusers {diffusers.__version__}" in printed
