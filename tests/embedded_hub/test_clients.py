"""The client libraries use the embedded Hub unchanged. Each runs in its own process: they read HF_ENDPOINT once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.hub.unfaithful_hub import UnfaithfulHub
from tests.kit.hub import commit_large, create_repository, find_damage, run_python

HUGGINGFACE_HUB = """
import os
from pathlib import Path
import huggingface_hub as hub
import pytest
from huggingface_hub import errors

api = hub.HfApi()
def raises(*words, **options):
    return pytest.raises(*words, **options).value

# Repositories.
url = api.create_repo("me/model")
assert (url.repo_id, url.repo_type) == ("me/model", "model"), url
assert api.create_repo("unowned").repo_id == "local/unowned"
assert api.create_repo("me/model", exist_ok=True) == url
assert raises(errors.HfHubHTTPError, api.create_repo, "me/model").response.status_code == 409
assert api.create_repo("me/data", repo_type="dataset").repo_type == "dataset"
api.create_repo("me/space", repo_type="space", space_sdk="static")
assert [each.id for each in api.list_models(author="me")] == ["me/model"]
first = api.model_info("me/model").sha

# A folder with regular, binary, empty and nested files; what has not changed is not committed again.
folder = Path("folder"); (folder / "nested/deeper").mkdir(parents=True)
weights = os.urandom(11 << 20)
(folder / "weights.bin").write_bytes(weights)
(folder / "config.json").write_text('{"a": 1}')
(folder / "empty.txt").write_text("")
(folder / "nested/deeper/caf\\u00e9 & more #1?.txt").write_text("accents")
(folder / "secret.env").write_text("x"); (folder / ".gitignore").write_text("*.env\\n")
commit = api.upload_folder(repo_id="me/model", folder_path=folder, commit_message="all", commit_description="text")
strange = "nested/deeper/caf\\u00e9 & more #1?.txt"
names = [".gitattributes", ".gitignore", "config.json", "empty.txt", strange, "weights.bin"]
assert api.list_repo_files("me/model") == names, api.list_repo_files("me/model")
assert api.upload_folder(repo_id="me/model", folder_path=folder).oid == commit.oid
assert [c.title for c in api.list_repo_commits("me/model", formatted=True)] == ["all", "initial commit"]
assert api.list_repo_commits("me/model")[0].message == "text"

# Listing.
info = {file.path: file for file in api.list_repo_tree("me/model", recursive=True, expand=True)}
assert info["weights.bin"].lfs.size == len(weights) and info["config.json"].lfs is None
assert info["nested/deeper"].last_commit.title == "all" and info[".gitattributes"].last_commit.oid == first
assert [each.path for each in api.list_repo_tree("me/model", "nested")] == ["nested/deeper"]
present = api.get_paths_info("me/model", ["nested", "empty.txt", "none"])
assert [each.path for each in present] == ["nested", "empty.txt"]
raises(errors.EntryNotFoundError, lambda: list(api.list_repo_tree("me/model", "none")))
siblings = {s.rfilename: s for s in api.model_info("me/model", files_metadata=True).siblings}
assert siblings["weights.bin"].lfs.sha256 == info["weights.bin"].lfs.sha256

# Downloads: content, cache, snapshots, errors.
path = hub.hf_hub_download("me/model", "weights.bin")
assert Path(path).read_bytes() == weights
assert hub.hf_hub_download("me/model", "weights.bin") == path
hub.hf_hub_download("me/model", names[4], revision=commit.oid)
local = Path(hub.snapshot_download("me/model", local_dir="local", allow_patterns=["*.json", "nested/*"]))
found = sorted(str(p.relative_to(local)) for p in local.rglob("*") if p.is_file() and ".cache" not in p.parts)
assert found == [names[2], names[4]], found
snapshot = Path(hub.snapshot_download("me/model"))
assert snapshot.name == commit.oid and (snapshot / "empty.txt").read_bytes() == b""
assert hub.try_to_load_from_cache("me/model", "config.json") == str(snapshot / "config.json")
raises(errors.RepositoryNotFoundError, api.model_info, "me/absent")
raises(errors.RepositoryNotFoundError, hub.hf_hub_download, "me/absent", "config.json")
raises(errors.RevisionNotFoundError, hub.hf_hub_download, "me/model", "config.json", revision="absent")
raises(errors.EntryNotFoundError, hub.hf_hub_download, "me/model", "absent.json")
assert api.file_exists("me/model", "config.json") and not api.file_exists("me/model", "absent.json")
assert api.repo_exists("me/model") and not api.revision_exists("me/model", "absent")

# Branches and tags.
api.create_branch("me/model", branch="feature/x")
assert raises(errors.HfHubHTTPError, api.create_branch, "me/model", branch="feature/x").response.status_code == 409
api.create_branch("me/model", branch="feature/x", exist_ok=True)
api.create_branch("me/model", branch="old", revision=first)
api.create_tag("me/model", tag="v1", revision=first, tag_message="note")
api.create_tag("me/model", tag="v1", exist_ok=True)
side = api.upload_file(path_or_fileobj=b"side", path_in_repo="side.txt", repo_id="me/model", revision="feature/x")
refs = api.list_repo_refs("me/model")
assert {b.name: b.target_commit for b in refs.branches} == {"feature/x": side.oid, "main": commit.oid, "old": first}
assert [(t.name, t.target_commit) for t in refs.tags] == [("v1", first)]
assert Path(hub.hf_hub_download("me/model", "side.txt", revision="feature/x")).read_bytes() == b"side"
assert api.list_repo_files("me/model", revision="v1") == [".gitattributes"]
api.delete_branch("me/model", branch="feature/x"); api.delete_tag("me/model", tag="v1")
assert api.list_repo_files("me/model", revision=side.oid)[-2:] == ["side.txt", "weights.bin"]
raises(errors.RevisionNotFoundError, api.delete_tag, "me/model", tag="v1")
raises(errors.HfHubHTTPError, api.delete_branch, "me/model", branch="main")

# Copy, delete, and a stale parent.
operations = [hub.CommitOperationCopy("weights.bin", "copy/weights.bin"), hub.CommitOperationDelete("nested/"),
              hub.CommitOperationCopy("config.json", "copy/config.json"), hub.CommitOperationDelete("empty.txt")]
copied = api.create_commit("me/model", operations, commit_message="copy", parent_commit=commit.oid)
wanted = [".gitattributes", ".gitignore", "config.json", "copy/config.json", "copy/weights.bin", "weights.bin"]
assert api.list_repo_files("me/model") == wanted
stale = raises(errors.HfHubHTTPError, api.upload_file, path_or_fileobj=b"1", path_in_repo="late.txt",
               repo_id="me/model", parent_commit=commit.oid)
assert stale.response.status_code == 412
raises(errors.EntryNotFoundError, api.delete_file, "none.txt", "me/model")
raises(errors.EntryNotFoundError, api.delete_folder, "none", "me/model")

# Pull requests.
pull = api.upload_file(path_or_fileobj=b"new", path_in_repo="new.txt", repo_id="me/model", create_pr=True,
                       commit_message="add new.txt", commit_description="why")
assert pull.pr_num == 1 and pull.pr_revision == "refs/pr/1"
assert "new.txt" not in api.list_repo_files("me/model")
assert Path(hub.hf_hub_download("me/model", "new.txt", revision="refs/pr/1")).read_bytes() == b"new"
api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id="me/model", revision="refs/pr/1")
details = api.get_discussion_details("me/model", 1)
assert (details.status, details.is_pull_request, details.title) == ("open", True, "add new.txt")
assert [e.type for e in details.events] == ["comment", "commit", "commit"] and details.events[0].content == "why"
api.upload_file(path_or_fileobj=b"meanwhile", path_in_repo="other.txt", repo_id="me/model")
api.merge_pull_request("me/model", 1)
assert {"new.txt", "other.txt"} < set(api.list_repo_files("me/model"))
assert Path(hub.hf_hub_download("me/model", "config.json")).read_bytes() == b"{}"
assert api.get_discussion_details("me/model", 1).status == "merged"
assert len(api.list_repo_commits("me/model")) == 7
draft = api.create_pull_request("me/model", title="draft")
api.upload_file(path_or_fileobj=b"theirs", path_in_repo="other.txt", repo_id="me/model", revision="refs/pr/2")
api.upload_file(path_or_fileobj=b"ours", path_in_repo="other.txt", repo_id="me/model")
assert raises(errors.HfHubHTTPError, api.merge_pull_request, "me/model", 2).response.status_code == 409
assert api.get_discussion_details("me/model", 2).conflicting_files == ["other.txt"]
assert api.change_discussion_status("me/model", 2, "closed").new_status == "closed"
assert [d.status for d in api.get_repo_discussions("me/model")] == ["closed", "merged"]
assert len(api.list_repo_refs("me/model", include_pull_requests=True).pull_requests) == 2

# Cards.
metadata = "license: mit\\ntags: [one]\\nbase_model: me/base\\npipeline_tag: text-generation"
card = hub.ModelCard(f"---\\n{metadata}\\n---\\n# Title\\n")
card.push_to_hub("me/model")
assert hub.ModelCard.load("me/model").data.license == "mit"
described = api.model_info("me/model")
assert described.pipeline_tag == "text-generation" and described.card_data.base_model == "me/base"
assert {"one", "license:mit", "base_model:me/base"} < set(described.tags)
broken = b"---\\nlicense: [\\n---\\n"
raises(ValueError, api.upload_file, path_or_fileobj=broken, path_in_repo="README.md", repo_id="me/model")

# The file system reads ranges.
fs = hub.HfFileSystem()
assert sorted(fs.ls("me/model/copy", detail=False)) == ["me/model/copy/config.json", "me/model/copy/weights.bin"]
assert fs.cat_file("me/model/weights.bin", start=1000, end=1064) == weights[1000:1064]
with fs.open("me/model/weights.bin", cache_type="none") as file:
    file.seek(-16, 2)
    assert file.read() == weights[-16:]
with fs.open("me/model/written.txt", "wb") as file:
    file.write(b"written")
assert fs.cat_file("me/model/written.txt") == b"written"

# Private and gone: without a token on the server everybody local is the owner.
api.update_repo_settings("me/model", private=True)
assert api.model_info("me/model").private is True
api.delete_repo("local/unowned")
raises(errors.RepositoryNotFoundError, api.model_info, "local/unowned")
raises(errors.RepositoryNotFoundError, api.delete_repo, "local/unowned")
api.delete_repo("local/unowned", missing_ok=True)
print("passed")
"""


TRANSFORMERS = """
import pytest
import torch
from huggingface_hub import HfApi, get_safetensors_metadata, parse_safetensors_file_metadata
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

torch.manual_seed(0)
config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64)
model = BertModel(config).eval()
inputs = torch.arange(10).reshape(1, 10)

def same_weights(loaded, weights):
    found = loaded.state_dict()
    return found.keys() == weights.keys() and all(found[name].equal(value) for name, value in weights.items())

weights = {name: value.clone() for name, value in model.state_dict().items()}
first = model.push_to_hub("me/bert", commit_message="one", private=True)
loaded, report = BertModel.from_pretrained("me/bert", output_loading_info=True)
assert not report["missing_keys"] and not report["unexpected_keys"]
assert same_weights(loaded, weights)
with torch.no_grad():
    # Two copies: where their memory lies decides over the order of sums, and that over the last bits.
    torch.testing.assert_close(loaded(inputs).last_hidden_state, model(inputs).last_hidden_state, rtol=0, atol=1e-5)
    # A second version, in shards; the first one stays loadable by its commit.
    for parameter in model.parameters():
        parameter.add_(1)
    model.push_to_hub("me/bert", max_shard_size="8KB")
    assert same_weights(AutoModel.from_pretrained("me/bert", revision=first.oid), weights)
    HfApi().delete_file("model.safetensors", "me/bert")
    assert same_weights(AutoModel.from_pretrained("me/bert"), model.state_dict())
metadata = get_safetensors_metadata("me/bert")
total = sum(parameter.numel() for parameter in model.parameters())
assert metadata.sharded and metadata.parameter_count == {"F32": total}
assert HfApi().model_info("me/bert").safetensors.parameters == {"F32": total}
file = parse_safetensors_file_metadata("me/bert", "model.safetensors", revision=first.oid)
assert file.parameter_count == {"F32": total}
assert HfApi().model_info("me/bert", revision=first.oid).safetensors.total == total
with pytest.raises(OSError, match="me/absent"):
    AutoTokenizer.from_pretrained("me/absent")
print("passed")
"""

DIFFUSERS = """
import torch
from huggingface_hub import HfApi
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

torch.manual_seed(0)
def network():
    blocks = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    return UNet2DModel(**sizes, **blocks).eval()

model = network()
model.push_to_hub("me/unet")
pinned = HfApi().model_info("me/unet").sha
network().push_to_hub("me/unet")
assert HfApi().model_info("me/unet").sha != pinned
loaded = UNet2DModel.from_pretrained("me/unet", revision=pinned)
latest = UNet2DModel.from_pretrained("me/unet")
wanted, other = model.state_dict(), latest.state_dict()
assert loaded.state_dict().keys() == wanted.keys() == other.keys()
assert all(value.equal(wanted[name]) for name, value in loaded.state_dict().items())
assert not all(value.equal(wanted[name]) for name, value in other.items())
noise = torch.randn(1, 3, 8, 8)
with torch.no_grad():
    # Two copies: where their memory lies decides over the order of sums, and that over the last bits.
    torch.testing.assert_close(loaded(noise, 1).sample, model(noise, 1).sample, rtol=0, atol=1e-5)
DDPMPipeline(model, DDPMScheduler()).push_to_hub("me/pipeline")
pipeline = DDPMPipeline.from_pretrained("me/pipeline")
assert all(torch.equal(a, b) for a, b in zip(pipeline.unet.parameters(), model.parameters(), strict=True))
print("passed")
"""

DATASETS = """
import itertools
from datasets import Dataset, DatasetDict, load_dataset
from huggingface_hub import HfApi

data = Dataset.from_dict({"text": [f"row {i}" for i in range(1000)], "label": [i % 3 for i in range(1000)]})
data.push_to_hub("me/table", num_shards=3)
assert load_dataset("me/table", split="train").to_list() == data.to_list()
stream = load_dataset("me/table", split="train", streaming=True)
assert list(stream) == data.to_list()
assert [row["text"] for row in itertools.islice(stream.skip(990), 3)] == ["row 990", "row 991", "row 992"]
pinned = HfApi().dataset_info("me/table").sha
DatasetDict({"train": data.select(range(5)), "test": data.select(range(3))}).push_to_hub("me/table", "small")
assert load_dataset("me/table", "small", split="test").num_rows == 3
assert load_dataset("me/table", revision=pinned, split="train").num_rows == 1000
assert {config["config_name"] for config in HfApi().dataset_info("me/table").card_data.configs} == {"default", "small"}
print("passed")
"""


LIBRARIES = {"huggingface_hub": HUGGINGFACE_HUB, "transformers": TRANSFORMERS}
SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in (DIFFUSERS, DATASETS)]


@pytest.mark.parametrize("script", [*LIBRARIES.values(), *SLOW], ids=[*LIBRARIES, "diffusers", "datasets"])
def test_libraries(hub: EmbeddedHub, run_client: Callable[..., str], script: str) -> None:
    assert run_client(script).endswith("passed\n")
    assert find_damage(hub.store) == []


TOKEN = """
import os
import huggingface_hub as hub
import pytest
from huggingface_hub import errors

api = hub.HfApi()
assert api.whoami()["name"] == "local"
api.create_repo("me/private", private=True)
data = os.urandom(1 << 20)
api.upload_file(path_or_fileobj=data, path_in_repo="w.bin", repo_id="me/private")
assert open(hub.hf_hub_download("me/private", "w.bin"), "rb").read() == data
stranger, impostor = hub.HfApi(token=False), hub.HfApi(token="wrong")
pytest.raises(errors.RepositoryNotFoundError, stranger.model_info, "me/private")
url = hub.hf_hub_url("me/private", "w.bin")
pytest.raises(errors.RepositoryNotFoundError, hub.get_hf_file_metadata, url, token=False)
for refused in (lambda: stranger.create_repo("me/other"), lambda: impostor.create_repo("me/other"), impostor.whoami):
    assert pytest.raises(errors.HfHubHTTPError, refused).value.response.status_code == 401
api.update_repo_settings("me/private", private=False)
assert stranger.model_info("me/private").private is False
print("passed")
"""


def test_the_token(tmp_path: Path) -> None:
    with EmbeddedHub(tmp_path / "hub", token="hf_secret") as hub:
        assert run_python(TOKEN, hub.url, tmp_path / "home", token="hf_secret").endswith("passed\n")
        assert find_damage(hub.store) == []


def test_a_download_that_is_cut_off_is_continued(hub: EmbeddedHub, tmp_path: Path) -> None:
    """By a Range request of the client itself."""
    weights, cuts = os.urandom(22 << 20), [15 << 20]
    create_repository(hub.url, "me/model")
    commit_large(hub.url, {"weights.bin": weights})
    proxy = UnfaithfulHub(hub.url)

    def rule(method, path, body, forward):
        reply = forward(body)
        return reply._replace(sent=cuts.pop()) if len(reply.body) > 15 << 20 and cuts else reply

    proxy.rule = rule
    download = 'import huggingface_hub; print(huggingface_hub.hf_hub_download("me/model", "weights.bin"))'
    path = run_python(download, proxy.url, tmp_path / "home").strip()
    proxy.stop()
    assert Path(path).read_bytes() == weights
    # The client keeps whole pieces of 10 MiB: of 15 received ones, 10.
    ranges = [one.range for one in proxy.asked if one.method == "GET" and one.path.endswith("/weights.bin")]
    assert len(ranges) == 2 and ranges[1].startswith(f"bytes={10 << 20}-")
