"""stage: the folder is complete, its code is ours, foreign code and pickles stay out, and nothing is half-written."""

import contextlib
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForImageToImage, BertModel

from hf_ext import MRConvConfig, MRConvForSequenceClassification, semanir
from hf_ext.embedded_hub.storage import lfs_pointer
from hf_ext.errors import DataError
from hf_ext.files import TakenError
from hf_ext.hub.checkpoints import CheckpointError
from hf_ext.hub.disclosure import find_kind
from hf_ext.hub.load_check import check_loads
from hf_ext.hub.publish import rehearse, stage
from hf_ext.hub.readings import read_text
from hf_ext.semanir import SemanIRImageProcessor, SemanIRModel
from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.kit.models import assert_same_weights, file_limit
from tests.kit.own_data import write_files
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

from .checkpoint_files import assert_same
from .published import CODE, STAGED, TRAINING, contents, edit, save_bert, save_snapshot, tiny_adapter

PROCESSOR = "image_processing_semanir.py"
ROOM = Path(inspect.getfile(semanir)).parent


@pytest.fixture
def snapshot(tmp_path) -> Path:
    return save_snapshot(tmp_path / "snapshot", reports=False)


@pytest.mark.parametrize("kind", ["head", "base", "half"])
def test_a_folder_is_staged_bit_for_bit_and_again_from_its_own_result(tmp_path, kind):
    model = SemanIRModel(tiny_restorer().config) if kind == "base" else tiny_restorer()
    model.to(torch.bfloat16 if kind == "half" else torch.float32).save_pretrained(tmp_path / "snapshot")
    SemanIRImageProcessor(do_convert_rgb=False).save_pretrained(tmp_path / "snapshot")
    first = stage(tmp_path / "snapshot", tmp_path / "first", repo_id="org/name")
    found = contents(first)
    assert sorted(found) == STAGED
    assert {name: found[name] for name in CODE} == {name: (ROOM / name).read_bytes() for name in CODE}
    config = json.loads(found["config.json"])
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForImageToImage"}
    assert config["architectures"] == [type(model).__name__]
    assert json.loads(found["preprocessor_config.json"])["do_convert_rgb"] is False
    assert contents(stage(first, tmp_path / "second", repo_id="org/name")) == found
    assert_same(load_file(first / "model.safetensors"), model.state_dict())
    if kind != "base":
        loaded = AutoModelForImageToImage.from_pretrained(first)
        assert loaded.dtype == model.dtype
        assert_same(loaded.state_dict(), model.state_dict())


def test_a_model_of_transformers_is_staged(tmp_path, bert):
    folder = stage(bert, tmp_path / "staged", repo_id="org/bert")
    assert (folder / "model.safetensors").read_bytes() == (bert / "model.safetensors").read_bytes()
    assert 'BertModel.from_pretrained("org/bert")' in (folder / "README.md").read_text()


def test_code_that_came_with_a_folder_is_neither_run_nor_staged(tmp_path, snapshot):
    marker = tmp_path / "marker"
    evil = f"from pathlib import Path\nPath({str(marker)!r}).write_text('ran')\n"
    write_files(snapshot, dict.fromkeys((*CODE, "evil.py", "custom_generate/generate.py"), evil))
    for name in ("config.json", "preprocessor_config.json"):
        known = json.loads((snapshot / name).read_text())["auto_map"]
        edit(snapshot / name, auto_map=dict.fromkeys(known, "evil.Evil"))
    found = contents(stage(snapshot, tmp_path / "out"))
    assert not marker.exists() and sorted(found) == STAGED
    assert {name: found[name] for name in CODE} == {name: (ROOM / name).read_bytes() for name in CODE}
    assert b"evil" not in found["config.json"] + found["preprocessor_config.json"]


def reweigh(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces weights of a model, adds some, or removes those that are None."""
    weights = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


FIRST = "model.extractor.weight"
# What is done to a model of ours, and the facts of its refusal.
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a kernel of a Hub": (lambda f: edit(f / "config.json", attn_implementation="org/kernel"), "attn_implementation"),
    "no architecture": (lambda f: edit(f / "config.json", architectures=None), "config.json ForImageRestoration"),
    "a stranger's": (lambda f: edit(f / "config.json", architectures=["X"]), "config.json ForImageRestoration"),
    "two": (lambda f: edit(f / "config.json", architectures=["SemanIRModel"] * 2), "config.json ForImageRestoration"),
    "no image processor": (lambda f: (f / "preprocessor_config.json").unlink(), "SemanIRImageProcessor"),
    "a weight is missing": (lambda f: reweigh(f, **{FIRST: None}), f"missing {FIRST}"),
    "a weight is unexpected": (lambda f: reweigh(f, stranger=torch.zeros(1)), "unexpected stranger"),
    "a weight is of another shape": (lambda f: reweigh(f, **{FIRST: torch.zeros(1)}), "mismatch"),
    "a pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_model_of_ours_that_is_spoilt_is_refused(tmp_path, snapshot, kind):
    spoil, facts = SPOILT[kind]
    spoil(snapshot)
    # transformers itself raises for a wrong shape
    with refused((ValueError, RuntimeError), *facts.split()):
        stage(snapshot, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CODED = [
    ("modeling_x.py", "", r"modeling_x\.py is code"),
    ("training_args.bin", "", r"training_args\.bin"),
    ("config.json", {"auto_map": {"AutoModel": "org/other--modeling_x.X"}}, "auto_map names 'org/other--model"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tok.T", None]}}, "auto_map names 'tok.T'"),
    ("config.json", {"custom_pipelines": {"x": {}}}, "custom_pipelines names .*code that is not in the folder"),
    ("config.json", {"attn_implementation": "org/kernel"}, "attn_implementation names a kernel"),
    ("tokenizer_config.json", "[", "not valid JSON"),
]


@pytest.mark.parametrize(("file", "content", "message"), CODED)
def test_a_transformers_folder_with_code_is_refused(tmp_path, file, content, message, bert):
    edit(bert / file, **content) if isinstance(content, dict) else (bert / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        stage(bert, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]


def test_an_adapter_is_staged_and_loads_with_peft(tmp_path):
    adapter = tiny_adapter()
    adapter.save_pretrained(tmp_path / "adapter")
    assert "[More Information Needed]" in (tmp_path / "adapter" / "README.md").read_text()
    folder = stage(tmp_path / "adapter", tmp_path / "out", repo_id="org/adapter")
    assert sorted(contents(folder)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    card = (folder / "README.md").read_text()
    assert "[More Information Needed]" not in card and 'PeftModel.from_pretrained(base, "org/adapter")' in card
    pixels = torch.rand(1, 3, 8, 8)
    loaded = PeftModel.from_pretrained(tiny_restorer(), folder)
    assert_same_weights(loaded, adapter)
    with torch.no_grad():
        # Two copies: where their memory lies decides over the order of sums, and that over the last bits.
        found, wanted = loaded.eval()(pixels).reconstruction, adapter.eval()(pixels).reconstruction
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_of_ours_travels_with_its_image_processor_and_our_code(tmp_path, warm_checks):
    adapter = tmp_path / "adapter"
    tiny_adapter().save_pretrained(adapter)
    SemanIRImageProcessor(do_convert_rgb=False).save_pretrained(adapter)
    (adapter / "image_processing_semanir.py").write_text("raise SystemExit('changed')")
    (adapter / "evil.py").write_text("")
    folder = stage(adapter, tmp_path / "out")
    expected = ["adapter_config.json", "adapter_model.safetensors", "preprocessor_config.json"]
    assert sorted(contents(folder)) == sorted(["README.md", PROCESSOR, *expected])
    assert (folder / PROCESSOR).read_bytes() == (ROOM / PROCESSOR).read_bytes()
    check_loads(folder)
    # peft writes no auto_mapping beside a task_type; a run of ours names its method.
    edit(adapter / "adapter_config.json", auto_mapping=None)
    edit(adapter / "training.json", **TRAINING)
    folder = stage(adapter, tmp_path / "named")
    assert (folder / PROCESSOR).read_bytes() == (ROOM / PROCESSOR).read_bytes()


def test_sources_that_cannot_be_staged(tmp_path, bert):
    with refused(DataError, "folder"):
        stage(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "bare").mkdir()
    # Weights of another name would stay behind.
    (bert / "model.safetensors").rename(bert / "mine.safetensors")
    with refused(DataError, "transformers", "diffusers"):
        stage(bert, tmp_path / "out")
    (bert / "mine.safetensors").rename(tmp_path / "bare" / "model.safetensors")
    with refused(DataError, "config.json", "adapter_config.json"):
        stage(tmp_path / "bare", tmp_path / "out")


def test_an_existing_folder_is_replaced_only_when_asked_and_when_it_is_a_checkpoint(tmp_path, snapshot):
    out = tmp_path / "out"
    out.mkdir()
    stage(snapshot, out)
    before = contents(out)
    with pytest.raises(TakenError):
        stage(snapshot, out)
    assert contents(out) == before
    other = save_snapshot(tmp_path / "other", reports=False, top_k=7)
    stage(other, out, overwrite=True)
    assert json.loads((out / "config.json").read_text())["top_k"] == 7
    mine = write_files(tmp_path / "mine", {"thesis.txt": "x"})
    for taken, overwrite in ((mine, True), (mine / "thesis.txt", False)):
        with pytest.raises(TakenError):
            stage(snapshot, taken, overwrite=overwrite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other", "out", "snapshot"]


# What goes wrong when most is written: the card, and what is looked at last.
LATE = {"eval.json": '{"results": 3}', "LICENSE": "hf_" + 30 * "a"}


@pytest.mark.parametrize("cause", ["no room", *LATE])
def test_a_failure_leaves_the_earlier_folder_and_no_other_trace(tmp_path, snapshot, cause):
    stage(snapshot, tmp_path / "out")
    before = contents(tmp_path / "out")
    if cause in LATE:
        (snapshot / cause).write_text(LATE[cause])
    for name in ("out", "new"):
        limit = file_limit(3000) if cause == "no room" else contextlib.nullcontext()
        with limit, pytest.raises((OSError, SafetensorError) if cause == "no room" else ValueError):
            stage(snapshot, tmp_path / name, overwrite=True)
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "snapshot"]


def make(kind: str, folder: Path):
    if kind == "of diffusers":
        blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
        return UNet2DModel(sample_size=8, layers_per_block=1, norm_num_groups=4, **blocks)
    return tiny_restorer() if kind == "ours" else BertModel.from_pretrained(save_bert(folder / "bert"))


@pytest.mark.parametrize("shards", ["whole", "in shards"])
@pytest.mark.parametrize("kind", ["ours", "another's", "of diffusers"])
def test_a_variant_is_published_under_the_names_that_loaders_look_for(tmp_path, kind, shards):
    model, source = make(kind, tmp_path), tmp_path / "source"
    model.save_pretrained(source, variant="fp16", max_shard_size="50GB" if shards == "whole" else "1KB")
    (source / "README.md").write_text("# Mine\n")
    if kind == "ours":
        SemanIRImageProcessor().save_pretrained(source)
    listing = rehearse(source, tmp_path / "out")
    assert all("variant" in reason for name, reason in listing.stays_behind.items() if "safetensors" in name)
    assert_same_weights(type(model).from_pretrained(tmp_path / "out"), model)


@pytest.mark.parametrize("kind", ["ours", "another's"])
def test_an_index_without_metadata_is_refused_in_words(tmp_path, kind):
    make(kind, tmp_path).save_pretrained(tmp_path / "source", max_shard_size="1KB")
    index = tmp_path / "source" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(CheckpointError):
        stage(tmp_path / "source", tmp_path / "out")


def index_of(*names: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{place}": name for place, name in enumerate(names)}}).encode()


WHOLE = save({"w": torch.zeros(3)})
BROKEN = {
    "a variant that was cut": ("model.fp16.safetensors", WHOLE[:-5]),
    "a pickle under another name": ("adapter_model.safetensors", pickle.dumps([1, 2])),
    "a text without a header": ("model-00001-of-00009.safetensors", b"\0" * 8 + b"hf" + b"_" + b"aB3" * 12),
    "an index of another folder": ("model.safetensors.index.json", index_of("../../x.safetensors")),
    "an index of a variant": ("model.safetensors.index.fp16.json", index_of("model.fp16-00001-of-00002.safetensors")),
    "an index that is no JSON": ("adapter_model.safetensors.index.json", b"{"),
    "a pointer of Git LFS": ("model.fp16.safetensors", lfs_pointer("ab" * 32, 5)),
    "a pointer in place of a tokenizer": ("tokenizer.model", lfs_pointer("ab" * 32, 5)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_weights_beside_those_that_are_loaded_first_are_read_too(tmp_path, kind, bert):
    name, content = BROKEN[kind]
    (bert / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        stage(bert, tmp_path / "out")
    # the folder that was given, not the copy that was being made
    shard = "model.fp16-00001-of-00002" if "variant" in kind and "index" in kind else name.partition(".index")[0]
    assert shard in str(caught.value) or "model-00001-of-00009" in str(caught.value)
    assert ".out.tmp" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_secret_in_a_broken_file_of_weights_is_found(tmp_path):
    for place, (name, content) in enumerate((*BROKEN.values(), ("whole.safetensors", WHOLE))):
        path = tmp_path / f"{place}-{name}"
        path.write_bytes(content + (b"" if name == "whole.safetensors" else b" hf" + b"_" + b"aB3dE6" * 6))
        assert (find_kind(read_text(path)) is None) == (name == "whole.safetensors")


def cast(weights, chosen, dtype):
    return {name: value.to(dtype) if chosen(name) else value for name, value in weights.items()}


def make_pipeline_folder(folder):
    pipeline = make_pipeline()
    pipeline.save_pretrained(folder)
    return folder / "transformer" / "diffusion_pytorch_model.safetensors"


# How the weights of the whole model are on disk, and those of its norms or biases.
TYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
TYPES += [(torch.float64, torch.bfloat16), (torch.float32, torch.float8_e4m3fn)]


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["mrconv", "semanir", "pipeline"])
def test_weights_go_up_in_the_types_that_they_have_on_disk(tmp_path, kind, types):
    folder = tmp_path / "mine"
    if kind == "pipeline":
        path = make_pipeline_folder(folder)
    else:
        config = MRConvConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1)
        model = MRConvForSequenceClassification(config) if kind == "mrconv" else None
        save_snapshot(folder, reports=False) if model is None else model.save_pretrained(folder)
        path = folder / "model.safetensors"
        edit(folder / "config.json", dtype="float16")
    weights = {name: value.clone() for name, value in load_file(path).items()}
    floats = {name for name, value in weights.items() if value.is_floating_point()}
    small = {name for name in floats if "norm" in name or name.endswith("bias")}
    weights = cast(cast(weights, floats.__contains__, types[0]), small.__contains__, types[1])
    assert small and small < floats
    save_file(weights, path, metadata={"format": "pt"})
    staged = stage(folder, tmp_path / "staged")
    found = load_file(staged / path.relative_to(folder))
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in weights.items()}
    assert all(
        found[name].view(torch.uint8).equal(value.view(torch.uint8)) for name, value in weights.items() if value.ndim
    )
