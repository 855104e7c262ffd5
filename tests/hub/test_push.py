"""push against the embedded Hub: one commit that holds what stage wrote, stale files gone, other files left alone."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, close_session, constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.errors import NotPublished, UsageError
from hf_ext.hub.checkpoints import open_checkpoint
from hf_ext.hub.disclosure import SecretFound
from hf_ext.hub.publish import find_stale, preview, push, stage
from tests.kit.own_data import write_files
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

from .published import STAGED, commit, contents, edit, on_hub, save_bert, titles
from .unfaithful_hub import Reply, UnfaithfulHub


def test_one_commit_holds_what_stage_writes_and_nothing_else(hub, api, tmp_path, snapshot, caplog, warm_checks):
    # hf_xet is installed and not disabled here: the push has to notice that this Hub has no Xet storage
    assert constants.HF_HUB_DISABLE_XET is False
    info = push(snapshot, "org/model", endpoint=hub.url, token=False, commit_message="First")
    # The same again makes no commit.
    assert push(snapshot, "org/model", endpoint=hub.url, token=False, check=False).oid == info.oid
    assert titles(api) == ["First", "initial commit"] and "Xet" not in caplog.text
    staged = stage(snapshot, tmp_path / "staged", repo_id="org/model")
    assert on_hub(api, tmp_path, info.oid) == contents(staged)
    assert sorted(contents(staged)) == sorted([*STAGED, "eval.json", "training.json", ".eval_results/hf_ext.yaml"])
    assert api.model_info("org/model").pipeline_tag == "image-restoration"
    with open_checkpoint(f"org/model@{info.oid}", endpoint=hub.url, token=False) as checkpoint:
        weights = tiny_restorer().state_dict()
        assert set(checkpoint) == set(weights) and all(checkpoint[name].equal(weights[name]) for name in weights)


def test_new_branches_and_pull_requests_leave_main_alone(options, api, tmp_path, snapshot, monkeypatch):
    # Of a user who disabled Xet: large files are sent by their path.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    info = push(snapshot, "org/model", revision="dev", **options)
    assert on_hub(api, tmp_path, "dev") == contents(stage(snapshot, tmp_path / "staged", repo_id="org/model"))
    assert api.model_info("org/model", revision="dev").sha == info.oid
    assert push(snapshot, "org/model", create_pr=True, **options).pr_num == 1
    assert "model.safetensors" in on_hub(api, tmp_path, "refs/pr/1")
    assert titles(api) == ["initial commit"]
    # an open one goes on
    info = push(save_bert(tmp_path / "bert"), "org/model", revision="refs/pr/1", **options)
    assert api.model_info("org/model", revision="refs/pr/1").sha == info.oid
    assert "modeling_semanir.py" not in on_hub(api, tmp_path / "again", "refs/pr/1") and len(titles(api)) == 1
    for repo_id in ("org/model", "org/other"):
        with pytest.raises(HfHubHTTPError):
            push(tmp_path / "bert", repo_id, revision="refs/pr/7", **options)
    assert not api.repo_exists("org/other")
    with refused(UsageError, "create_pr"):
        push(snapshot, "org/model", create_pr=True, revision="dev", **options)


# Files that loaders of a model prefer to others, or that say whose it is; and files of the owner.
OF_A_MODEL = [
    *("model.fp16.safetensors", "model-00001-of-00002.safetensors", "diffusion_pytorch_model.safetensors"),
    *("tokenizer.json", "vocab.txt", "qformer_tokenizer/vocab.txt", "chat_template.jinja"),
    *("additional_chat_templates/tool_use.jinja", "generation_config.json", "preprocessor_config.json"),
    *("modeling_semanir.py", ".eval_results/hf_ext.yaml", "report.json", "before_after.png"),
]
OF_THE_OWNER = [
    "LICENSE",
    "NOTICE",
    "handler.py",
    "lora.safetensors",
    "notes.md",
    "data/train.csv",
    "photo.png",
    "my-config.json",
]


def test_files_of_an_earlier_model_go_and_files_of_the_owner_stay(options, api, bert, capsys):
    api.create_repo("org/model")
    commit(api, **{name: name.encode() for name in (*OF_A_MODEL, *OF_THE_OWNER)})
    push(bert, "org/model", **options)
    there = api.list_repo_files("org/model")
    assert sorted(there) == sorted([*OF_THE_OWNER, ".gitattributes", "README.md", "config.json", "model.safetensors"])
    told = capsys.readouterr().err
    description = api.list_repo_commits("org/model")[0].message
    for text in (told, description):
        deleted, left = (next(line for line in text.splitlines() if line.startswith(word)) for word in ("Del", "Kept"))
        assert all(name in deleted for name in OF_A_MODEL) and all(name in left for name in OF_THE_OWNER)


def test_a_name_alone_is_one_of_the_owner_and_an_address_may_end_in_a_slash(hub, options, bert):
    proxy = UnfaithfulHub(hub.url)
    # As the Hub does, where a model without an owner is another one.
    short = re.compile(r"/api/models/model(/|$)")
    proxy.rule = lambda method, path, body, forward: Reply(404, b"{}") if short.match(path) else forward(body)
    info = push(bert, "model", **options | {"endpoint": f"{proxy.url}/"})
    edit(bert / "config.json", layer_norm_eps=1e-4)
    assert push(bert, "local/model", create_pr=True, **options).pr_num == 1
    edit(bert / "config.json", layer_norm_eps=1e-3)
    options |= {"endpoint": f"{proxy.url}/"}
    assert push(bert, "model", revision="refs/pr/1", **options).oid != info.oid
    proxy.stop()
    assert info.oid == HfApi(endpoint=f"{hub.url}/", token=False).model_info("local/model").sha
    card = hf_hub_download("local/model", "README.md", endpoint=hub.url, token=False)
    assert '("local/model")' in Path(card).read_text()


def test_visibility(options, api, snapshot):
    push(snapshot, "org/hidden", private=True, **options)
    assert api.model_info("org/hidden").private is True
    push(snapshot, "org/model", **options)
    before = titles(api)
    with refused(NotPublished, "org/model", "private=True"):
        push(save_bert(snapshot.with_name("bert")), "org/model", private=True, **options)
    assert titles(api) == before


def test_what_does_not_load_never_reaches_the_hub(hub, api, warm_checks, bert):
    # a type that transformers does not know, so that no one could load it
    edit(bert / "config.json", architectures=["NoSuchModel"])
    with refused(NotPublished, "hf_ext", "NoSuchModel"):
        push(bert, "org/model", endpoint=hub.url, token=False)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/model")


def test_a_hub_that_wants_a_token(tmp_path, snapshot):
    with EmbeddedHub(tmp_path / "locked", token="hf_right") as hub:
        with refused(HfHubHTTPError, "401"):
            push(snapshot, "org/model", endpoint=hub.url, token="hf_wrong", check=False)
        info = push(snapshot, "org/model", endpoint=hub.url, token="hf_right", private=True, check=False)
        with open_checkpoint("org/model", endpoint=hub.url, token="hf_right") as checkpoint:
            assert checkpoint.commit == info.oid
            assert isinstance(checkpoint["model.extractor.weight"], torch.Tensor)
        close_session()


TOKEN = "hf" + "_" + "aBcDeFgHiJ" * 3 + "qRsT"
UNUSABLE = {
    "a branch that a variable left empty": {"revision": ""},
    "a branch with a blank": {"revision": "feat/x y"},
    "a branch with dots": {"revision": "a..b"},
    "a pull request without a number": {"revision": "refs/pr/x"},
    "another reference": {"revision": "refs/heads/main"},
    "a commit": {"revision": "0123456789" * 4},
    "no message": {"commit_message": ""},
    "None": {"commit_message": None},
    "an empty line": {"commit_message": "\n \n"},
    "half a letter": {"commit_message": "a\ud800"},
    "a token of two lines": {"token": f"{TOKEN[:20]}\n{TOKEN[20:]}"},
    "a token with an accent": {"token": f"{TOKEN}é"},
    "a secret in the message": {"commit_message": f"wip {TOKEN}"},
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_options_that_a_hub_would_refuse_are_refused_before_it_is_asked(kind, options, api, snapshot):
    with pytest.raises(SecretFound if "secret" in kind else UsageError) as caught:
        push(snapshot, "org/model", **options | UNUSABLE[kind])
    assert TOKEN[3:20] not in str(caught.value)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/model")


def test_a_branch_with_the_name_of_a_tag_or_a_commit_is_refused(options, api, snapshot, bert):
    first = push(snapshot, "org/model", **options)
    api.create_tag("org/model", tag="v1")
    with refused(UsageError, "v1", "org/model"):
        push(bert, "org/model", revision="v1", **options)
    with refused(HfHubHTTPError, first.oid[:8]):
        push(bert, "org/model", revision=first.oid[:8], **options)
    for revision in ("main", "v1", first.oid[:8]):
        assert api.model_info("org/model", revision=revision).sha == first.oid
    assert [branch.name for branch in api.list_repo_refs("org/model").branches] == ["main"]


def test_a_secret_in_the_name_of_a_file_is_refused_and_not_shown(tmp_path, bert):
    write_files(bert, {f"additional_chat_templates/{TOKEN}.jinja": "x"})
    with pytest.raises(SecretFound) as caught:
        stage(bert, tmp_path / "out")
    assert TOKEN not in str(caught.value)


# Files of a repository, of an earlier model or of its owner, by the file that says what it was.
STALE = {
    "config.json": """
    pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json pytorch_model.fp16.bin tf_model.h5
    tf_model.h5.index.json flax_model.msgpack rust_model.ot adapter_model.bin diffusion_pytorch_model.fp16.bin
    pytorch_lora_weights.safetensors model.onnx onnx/model_quantized.onnx onnx/decoder_model_merged.onnx
    consolidated.00.pth openvino_model.xml openvino/openvino_model.xml openvino/openvino_model_qint8_quantized.bin
    onnx/vision_model.onnx onnx/text_model_fp16.onnx
    """,
    "model_index.json": """
    transformer/config.json transformer/disentangled_dit.py vae/diffusion_pytorch_model.safetensors pipeline.py
    vae/diffusion_pytorch_model.bin scheduler/scheduler_config.json text_encoder/model.safetensors tokenizer/vocab.json
    tokenizer/additional_chat_templates/tool.jinja
    """,
    "emr.json": """
    tasks/a/mask.safetensors tasks/a/extra.safetensors tasks/a/config.json tasks/a/modeling_mrconv.py
    tasks/a/additional_chat_templates/tool.jinja base/model.safetensors base/tokenizer.json sums.safetensors
    """,
    "modules.json": "1_Pooling/config.json 2_Dense/model.safetensors 2_Dense/pytorch_model.bin",
}
MINE = {
    "config.json": "model-old.bin my_model.bin lora.safetensors notes/pytorch_model.bin my_model.onnx vae/config.json",
    "model_index.json": """
    transformer/mynotes.txt transformer/README.md vae/readme.txt vae/my_training_data.csv vae/pictures/cat.png
    tokenizer/LICENSE pipeline.py.txt unet/notes.md
    """,
    "emr.json": "tasks/notes.md tasks/a/thesis.pdf base/thesis.pdf base/LICENSE my.safetensors",
    "modules.json": "1_Pooling/notes.txt notes/config.json 2_Dense/own.csv",
}


@pytest.mark.parametrize("told", STALE)
def test_files_go_by_the_names_of_loaders_and_all_else_is_the_owners(told):
    stale, mine = STALE[told].split(), MINE[told].split()
    assert find_stale([told, *stale, *mine, "LICENSE", "data/x.csv"]) == [told, *stale]


def test_exports_of_the_same_weights_stay(options, api, bert, tmp_path):
    exports = {"onnx/model_quantized.onnx", "tf_model.h5", "openvino/openvino_model.bin"}
    push(bert, "org/model", **options)
    commit(api, **{name: name.encode() for name in exports})
    (bert / "README.md").write_text("---\nlicense: mit\n---\n\n# A better card\n")
    rest = {"revision": None, "create_pr": False, "commit_message": "New", "license": None}
    assert preview(bert, "org/model", **options | rest).deleted == ()
    push(bert, "org/model", **options)
    assert exports < set(api.list_repo_files("org/model"))
    edit(bert / "config.json", layer_norm_eps=1e-4)
    assert {*preview(bert, "org/model", **options | rest).deleted} == exports
    push(bert, "org/model", **options)
    assert not exports & set(api.list_repo_files("org/model"))
