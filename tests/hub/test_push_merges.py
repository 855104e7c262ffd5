"""stage, push, check_loads and cards of merges: the artifact of EMR-Merging, and plain merged checkpoints."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from hf_ext.emr import EMRModel
from hf_ext.emr.artifact import verify_artifact
from hf_ext.errors import DataError, NotPublished, UsageError
from hf_ext.hub import load_check
from hf_ext.hub.header_format import CheckpointError
from hf_ext.hub.load_check import check_loads, verify_code
from hf_ext.hub.publish import push, stage
from hf_ext.merging import add_task, merge_checkpoints, remove_task
from tests.emr.emr_testing import push_folder, tiny_semanir, tiny_unet
from tests.emr.use_testing import merge_family, write_berts
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .published import CODE, contents, edit, save_bert

pytestmark = pytest.mark.usefixtures("warm_checks")
SHARED = {"config.json", "tokenizer.json", "tokenizer_config.json"}
LOADER = Path(load_check.__file__).parents[1] / "emr" / "emr_loader.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    place = write_berts(tmp_path_factory.mktemp("models"))
    for name in "abc":
        edit(place / name / "tokenizer_config.json", name_or_path=str(place / name))
    return place


def merge(models: Path, out: Path, names: str = "ab", **options: Any) -> Path:
    config = {"base": str(models / "base"), "tasks": {name: str(models / name) for name in names}, **options}
    return merge_checkpoints(config, out, progress=False).path


@pytest.fixture(scope="module")
def complete(models, tmp_path_factory) -> Path:
    """An artifact that holds its base."""
    return merge(models, tmp_path_factory.mktemp("complete") / "merged", include_base=True)


@pytest.fixture
def artifact(complete, tmp_path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "merged"))


def test_an_artifact_is_staged_whole_without_state_strangers_and_paths(artifact, models, tmp_path):
    # State is of an earlier version.
    strange = {"notes.md": "mine", ".lock": "", "state.safetensors": "", "tasks/a/state.safetensors": ""}
    write_files(artifact, strange | {"tasks/stray/config.json": "{}"})
    staged = stage(artifact, tmp_path / "staged", repo_id="org/merged")
    found, before = contents(staged), contents(artifact)
    files = {"mask.safetensors", "extra.safetensors", "sums.safetensors", "config.json", "tokenizer_config.json"}
    model = SHARED | {"model.safetensors"}
    own = {"emr.json", "emr_loader.py", "README.md", "report.json", "sums.safetensors"}
    base, tasks = {f"base/{name}" for name in model}, {f"tasks/{t}/{file}" for t in "ab" for file in files}
    assert set(found) == own | model | base | tasks
    changed = {"emr.json", "README.md", "report.json", *(name for name in tasks if "tokenizer_config" in name)}
    assert {name for name in found if found[name] != before.get(name)} <= changed
    assert [task["source"] for task in json.loads(found["emr.json"])["tasks"].values()] == ["a", "b"]
    # The manifest has the hashes of the files that were changed for it.
    assert verify_artifact(staged).wrong == []
    check_loads(staged)
    average = stage(merge(models, tmp_path / "average", method="average"), tmp_path / "plain", repo_id="org/merged")
    # No path of this machine is in any of them.
    assert not [data for data in (*found.values(), *contents(average).values()) if str(models).encode() in data]


def test_a_base_that_nobody_else_has_is_refused(models, tmp_path):
    artifact = merge(models, tmp_path / "merged")
    with refused(DataError, "include_base"):
        stage(artifact, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize("name", ["evil.py", "tasks/a/modeling_bert.py", "base/emr_loader.py"])
def test_code_is_refused(artifact, tmp_path, name):
    (artifact / name).write_text("raise SystemExit('executed')")
    with refused(NotPublished, name):
        stage(artifact, tmp_path / "staged")


def test_the_loader_must_be_the_installed_one(artifact, tmp_path, monkeypatch):
    loader = artifact / "emr_loader.py"
    loader.write_text(loader.read_text() + "\n# changed\n")
    with refused(UsageError, "hf_ext"):
        stage(artifact, tmp_path / "staged")
    with refused(DataError, "hf_ext"):
        verify_code(artifact)
    loader.unlink()
    staged = stage(artifact, tmp_path / "staged")
    assert (staged / "emr_loader.py").read_bytes() == LOADER.read_bytes()
    # beside another checkpoint it has no business
    bert = save_bert(tmp_path / "bert")
    shutil.copy(LOADER, bert)
    with refused(DataError, "hf_ext"):
        verify_code(bert)


def test_links_out_of_the_folder_and_damage_are_refused(artifact, models, tmp_path):
    mask = artifact / "tasks" / "a" / "mask.safetensors"
    data = mask.read_bytes()
    mask.unlink()
    mask.symlink_to(models / "a" / "model.safetensors")
    with refused(CheckpointError, "leaves", "folder"):
        stage(artifact, tmp_path / "staged")
    mask.unlink()
    mask.write_bytes(data[:-1])
    with refused(CheckpointError, "mask.safetensors"):
        stage(artifact, tmp_path / "staged")
    mask.write_bytes(data)
    staged = stage(artifact, tmp_path / "staged")
    (artifact / "config.json").unlink()
    (artifact / "config.json").symlink_to(models / "a" / "config.json")
    with pytest.raises(NotPublished):
        stage(artifact, tmp_path / "again")
    # A task that cannot be restored is found before the upload.
    (staged / "base" / "model.safetensors").write_bytes((staged / "model.safetensors").read_bytes())
    with refused(NotPublished, "hf_ext"):
        check_loads(staged)


@pytest.mark.slow
def test_from_the_hub_to_the_hub_and_back(hub, api, models, tmp_path, run_client):
    """Merged from a Hub, pushed with the load check, its two snippets run as they are in the card."""
    on_hub = {name: push_folder(hub.url, f"org/{name}", models / name) for name in ("base", "a", "b")}
    config = {"base": "org/base", "tasks": {name: f"org/{name}" for name in "ab"}}
    artifact = merge_checkpoints(config, tmp_path / "merged", endpoint=hub.url, progress=False).path
    push(artifact, "org/merged", endpoint=hub.url, token=False)
    card = ModelCard.load(api.hf_hub_download("org/merged", "README.md"))
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == (["org/base", "org/a", "org/b"], "merge")
    assert (data["library_name"], data["tags"]) == ("transformers", ["merge", "model-merging", "emr-merging"])
    assert "not the model of a task" in card.text and f"org/a/tree/{on_hub['a']}" in card.text
    first, second = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    expected = EMRModel.from_pretrained(artifact, "a", endpoint=hub.url).model.state_dict()
    torch.save(expected, tmp_path / "expected.pt")
    compare = """
import torch
expected = torch.load(sys.argv[1])
found = model.state_dict()
assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found), "other weights"
assert type(model).__name__ == "BertForSequenceClassification", type(model)
print(model.config.id2label)
"""
    # In one process, first as a stranger; the first snippet's last line turns the model into the other task.
    assert first.rstrip().endswith('merged.set_task("b")')
    with_package = first.rpartition("merged.set_task")[0]
    absent = "import sys\nsys.modules['hf_ext'] = None"
    program = [absent, second, compare, "del sys.modules['hf_ext']", with_package]
    labels = run_client("\n".join([*program, compare]), str(tmp_path / "expected.pt"))
    assert labels.splitlines()[-2:] == [str({0: "seed1-0", 1: "seed1-1"})] * 2
    merged_again = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card.text, re.DOTALL)[0])
    assert merged_again["tasks"] == {name: f"org/{name}@{on_hub[name]}" for name in "ab"}
    again = merge_checkpoints(merged_again, tmp_path / "again", endpoint=hub.url, progress=False).path
    assert (again / "model.safetensors").read_bytes() == (artifact / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_artifact_that_holds_its_base_is_pulled_by_hf_ext(options, artifact, tmp_path, run_client):
    """The cache of a Hub keeps links: those of `base/` leave that folder, and not the repository's cache."""
    push(artifact, "org/whole", **options)
    expected = {task: EMRModel.from_pretrained(artifact, task).model.state_dict() for task in "ab"}
    torch.save(expected, tmp_path / "expected.pt")
    program = """
    import sys
    import torch
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForSequenceClassification
    from hf_ext import EMRModel
    from hf_ext_cli.main import main

    expected = torch.load(sys.argv[1])
    merged = EMRModel.from_pretrained("org/whole")
    assert (merged.weights.folder / "base" / "model.safetensors").is_symlink()
    main(["emr", "export", "org/whole", "b", "exported"], standalone_mode=False)
    exported = AutoModelForSequenceClassification.from_pretrained("exported")
    # as one folder of the cache, which a stranger's loader reads
    merged_too = EMRModel.from_pretrained(snapshot_download("org/whole"))
    for task, model in (("a", merged.model), ("b", exported), ("a", merged_too.model)):
        for name, value in model.state_dict().items():
            assert value.equal(expected[task][name]), (task, name)
    print(type(exported).__name__)
    """
    assert run_client(program, str(tmp_path / "expected.pt")).split()[-1] == "BertForSequenceClassification"


@pytest.mark.slow
def test_a_second_push_removes_tasks_that_are_gone(options, api, artifact, models):
    push(artifact, "org/merged", **options)
    api.upload_file(repo_id="org/merged", path_or_fileobj=b"mine", path_in_repo="notes.md")
    remove_task(artifact, "a")
    add_task(artifact, "c", str(models / "c"), frozen=True)
    push(artifact, "org/merged", **options)
    names = api.list_repo_files("org/merged")
    assert {name.split("/")[1] for name in names if name.startswith("tasks/")} == {"b", "c"}
    assert "notes.md" in names and "base/model.safetensors" in names
    # another kind of checkpoint in its place leaves nothing of it
    push(models / "a", "org/merged", **options)
    left = {"README.md", ".gitattributes", "notes.md", "model.safetensors"} | SHARED
    assert set(api.list_repo_files("org/merged")) == left
    # in a repository that is no artifact, folders of these names are somebody else's
    api.upload_file(repo_id="org/merged", path_or_fileobj=b"mine", path_in_repo="tasks/mine.json")
    push(models / "b", "org/merged", **options)
    assert "tasks/mine.json" in api.list_repo_files("org/merged")


@pytest.mark.slow
def test_a_card_of_a_plain_merge(models, tmp_path):
    average = merge(models, tmp_path / "average", method="average")
    staged = stage(average, tmp_path / "staged", repo_id="org/average", license="mit")
    card = ModelCard.load(staged / "README.md")
    assert card.data.to_dict()["tags"] == ["merge", "model-merging"]
    assert card.data.license == "mit" and "the average of their weights" in card.text
    assert "λ" not in card.text.partition("## Report")[0] and "emr_loader" not in card.text
    assert "BertModel.from_pretrained" in card.text
    assert "report.json" in {path.name for path in staged.iterdir()}
    check_loads(staged)


@pytest.mark.slow
def test_a_diffusers_model(tmp_path):
    artifact = merge_family(tmp_path, tiny_unet, given={"include_base": True})
    staged = stage(artifact, tmp_path / "staged", repo_id="org/merged")
    check_loads(staged)
    text = (staged / "README.md").read_text()
    assert "library_name: diffusers" in text and "UNet2DModel.from_config" in text
    snippet = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1]
    snippet = snippet.replace('snapshot_download("org/merged", revision="main")', repr(str(staged)))
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    expected = EMRModel.from_pretrained(artifact, "a").model.state_dict()
    assert all(value.equal(expected[name]) for name, value in scope["model"].state_dict().items())


def test_the_root_promises_no_task(models, artifact, tmp_path):
    result = {"metric": "accuracy", "value": 0.5, "dataset": "reviews", "task": "text-classification"}

    def described(folder):
        edit(folder / "eval.json", results=[result])
        return ModelCard.load(stage(folder, tmp_path / f"staged-{folder.name}") / "README.md").data

    data = described(artifact)
    assert data.pipeline_tag is None and data.eval_results[0].task_type == "text-classification"
    # nor does a plain merge whose heads differ, of which the body is left
    assert described(merge(models, tmp_path / "average", method="average")).pipeline_tag is None
    # one task's model does it
    assert described(Path(shutil.copytree(models / "a", tmp_path / "a"))).pipeline_tag == "text-classification"


@pytest.mark.slow
def test_our_own_models_travel_with_their_code(tmp_path):
    artifact = merge_family(tmp_path, tiny_semanir, given={"include_base": True})
    staged = stage(artifact, tmp_path / "staged", repo_id="org/merged")
    assert {name for name in contents(staged) if name.endswith(".py")} == {*CODE, "emr_loader.py"}
    configs = [json.loads((staged / name / "config.json").read_text()) for name in (".", "tasks/a", "base")]
    assert ["custom_pipelines" in config for config in configs] == [False, True, True]
    assert ModelCard.load(staged / "README.md").data.pipeline_tag is None
    check_loads(staged)


@pytest.mark.slow
def test_deltas_have_no_root_and_are_checked_by_their_first_task(models, tmp_path):
    folder = merge(models, tmp_path / "deltas", method="onebit", include_base=True)
    staged = stage(folder, tmp_path / "staged", repo_id="org/deltas")
    assert [name for name in contents(staged) if name.endswith("model.safetensors")] == ["base/model.safetensors"]
    check_loads(staged)
