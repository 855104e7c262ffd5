"""Which files go up: those that libraries write, by name, and none through a link out of the folder; the listing."""

import ast
import json
import os
from pathlib import Path

import diffusers
import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import BertTokenizer

from hf_ext.errors import NotPublished
from hf_ext.hub.card_rules import read_front_matter
from hf_ext.hub.load_check import check_loads
from hf_ext.hub.publish import push, rehearse, stage
from hf_ext.hub.published_files import MODULES, is_described, is_loaded, walk
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline
from tests.emr.emr_testing import tiny_bert
from tests.kit.command_line import run
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .published import contents, save_bert, save_snapshot, tiny_adapter

# What people keep in the folder of a model and never mean to publish.
TEXTS = ("hf_token.txt", "notes.txt", "events.log", ".env", "extra.jinja", "other.model")
PRIVATE = dict.fromkeys(TEXTS, "mine") | {"optimizer.safetensors": ""}
PRIVATE |= dict.fromkeys(
    ("credentials.json", "trainer_state.json", "all_results.json", "checkpoint-5/config.json"), "{}"
)


def names_in_tokenizers() -> set[str]:
    """What the tokenizers of the installed transformers call their files."""
    names = set()
    for path in Path(transformers.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "FILES_NAMES" in text else ():
            if isinstance(node, ast.Assign) and "FILES_NAMES" in ast.unparse(node.targets[0]):
                values = node.value.values if isinstance(node.value, ast.Dict) else []
                names |= {value.value for value in values if isinstance(value, ast.Constant)}
    return names


LOADED = (
    *("tiktoken.model", "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"),
    *("additional_chat_templates/tool_use.jinja", "qformer_tokenizer/tokenizer.json"),
    *("model-00001-of-00012.safetensors", "model.safetensors.index.json", "model.fp16.safetensors"),
    *("model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"),
    "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
)


def test_what_loaders_read_goes_up_and_nothing_else():
    files, tokenizers = transformers.utils, names_in_tokenizers()
    assert len(tokenizers) > 20 and {"vocab.txt", "spiece.model", "sentencepiece.bpe.model"} < tokenizers
    known = {
        *(files.CONFIG_NAME, files.GENERATION_CONFIG_NAME, files.PROCESSOR_NAME, files.VIDEO_PROCESSOR_NAME),
        *(files.FEATURE_EXTRACTOR_NAME, files.IMAGE_PROCESSOR_NAME, files.AUDIO_TOKENIZER_NAME),
        *(files.SAFE_WEIGHTS_NAME, files.SAFE_WEIGHTS_INDEX_NAME, files.CHAT_TEMPLATE_FILE),
        *(peft.utils.CONFIG_NAME, peft.utils.SAFETENSORS_WEIGHTS_NAME),
        *(diffusers.utils.SAFETENSORS_WEIGHTS_NAME, diffusers.utils.SAFE_WEIGHTS_INDEX_NAME),
    }
    assert not [name for name in (*LOADED, *tokenizers, *known) if not is_loaded(name) or is_described(name)]
    others = (*PRIVATE, "LICENSE.key", "config.json.bak", "my-config.json", "model.safetensors.txt")
    assert not [name for name in others if is_loaded(name) or is_described(name)]


def test_a_folder_of_transformers_is_published_by_name_and_says_so(tmp_path):
    bert = tiny_bert(tmp_path / "bert")
    tokenizer = BertTokenizer.from_pretrained(bert)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(bert)
    wanted = {name for name, _ in walk(bert)}
    assert "additional_chat_templates/tool_use.jinja" in wanted
    write_files(bert, PRIVATE | {"LICENSE": "mine", "README.md": "# Mine", "eval.json": '{"results": []}'})
    listing = rehearse(bert, tmp_path / "staged")
    assert set(listing.files) == wanted | {"LICENSE", "README.md", "eval.json"}
    assert listing.files == {name: len(data) for name, data in contents(tmp_path / "staged").items()}
    flat = {name for name in PRIVATE if "/" not in name}
    assert set(listing.stays_behind) == flat | {"checkpoint-5/"}
    assert listing.stays_behind["checkpoint-5/"] == "1 file, no files of a model"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "staged").chat_template == tokenizer.chat_template


@pytest.fixture
def secret(tmp_path) -> Path:
    return write_files(tmp_path / "elsewhere", {"id_rsa": '{"secret": "the text of a secret"}'}) / "id_rsa"


KINDS = {"transformers": save_bert, "ours": save_snapshot}
KINDS["pipeline"] = lambda folder: make_pipeline().save_pretrained(folder) or folder


def link(folder: Path, names: list[str], target: Path | str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_that_are_links_out_of_the_folder_stay_behind(kind, tmp_path, secret):
    folder = KINDS[kind](tmp_path / "folder")
    names = ["LICENSE", "README.md", "eval.json", "extra.json"]
    link(folder, names, secret)
    listing = rehearse(folder, tmp_path / "staged")
    assert all(b"secret" not in data for data in contents(tmp_path / "staged").values())
    assert {listing.stays_behind[name] for name in names} == {"a link that leaves the folder"}
    # a link to a file of the folder itself is one of its files
    (folder / "own.txt").write_text('{"results": []}')
    link(folder, names, "own.txt")
    assert set(names) - set(contents(stage(folder, tmp_path / "again"))) == {"extra.json"}


LICENSED = {
    **dict.fromkeys(("LICENSE", "LICENCE", "COPYING.txt", "LICENSE.rst", "ACME-terms.pdf", "legal/terms.html"), True),
    **dict.fromkeys((".env", "train.py", "terms.json", "../terms.txt", "legal", "absent.txt", "/etc/hostname"), False),
    **dict.fromkeys(("linked.txt", "__pycache__/terms.txt", "legal/__pycache__/terms.txt"), False),
}


@pytest.mark.parametrize("named", LICENSED)
def test_the_licence_that_a_card_names_goes_up_or_is_missed(named, tmp_path, secret, bert):
    absent = ("train.py", "legal", "absent.txt", "/etc/hostname")
    write_files(bert, {name: "mine" for name in LICENSED if name not in absent})
    link(bert, ["linked.txt"], secret)
    card = f"---\nlicense: other\nlicense_name: acme\nlicense_link: {named}\n---\n# Mine\n"
    (bert / "README.md").write_text(card)
    if not LICENSED[named]:
        with refused(NotPublished, "__pycache__" if "__pycache__" in named else "license_link", named):
            stage(bert, tmp_path / "staged")
        return
    listing = rehearse(bert, tmp_path / "staged")
    assert named in listing.files and named not in listing.stays_behind and not listing.notes


LINKED = {
    "transformers": ["config.json", "model.safetensors", "vocab.txt", "tokenizer.json"],
    "ours": ["config.json", "model.safetensors", "preprocessor_config.json"],
    "pipeline": ["model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in LINKED.items() for name in names])
def test_what_is_loaded_is_refused_as_a_link_out_of_the_folder(kind, name, tmp_path, secret):
    folder = KINDS[kind](tmp_path / "folder")
    link(folder, [name], secret)
    with refused(NotPublished, name):
        stage(folder, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


def test_every_part_of_a_pipeline_goes_up_but_none_that_is_a_link_to_another_folder(tmp_path):
    folder = tmp_path / "folder"
    make_text_pipeline().save_pretrained(folder)
    wanted = {name for name, _ in walk(folder)}
    assert {"text_encoder/config.json", "tokenizer/tokenizer.json"} < wanted
    assert wanted | {"README.md"} == set(contents(stage(folder, tmp_path / "staged")))
    (folder / "tokenizer").rename(tmp_path / "tokenizer")
    (folder / "tokenizer").symlink_to(tmp_path / "tokenizer")
    with pytest.raises(NotPublished):
        stage(folder, tmp_path / "again")


def test_a_snapshot_in_the_cache_of_a_hub_is_published_though_all_its_files_are_links(tmp_path, bert):
    repository = write_files(
        tmp_path / "hub" / "models--org--bert", {f"blobs/{n}": d for n, d in contents(bert).items()}
    )
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in contents(bert):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    listing = rehearse(snapshot, tmp_path / "staged")
    assert {"config.json", "model.safetensors"} < set(listing.files) and not listing.stays_behind


def test_the_command_lists_before_it_uploads_and_uploads_nothing_else(hub, api, tmp_path, secret):
    bert = write_files(save_bert(tmp_path / "bert"), PRIVATE)
    link(bert, ["LICENSE"], secret)
    arguments = ["push", bert, "org/bert", "--no-check", "--endpoint"]
    told = run(*arguments, "http://127.0.0.1:9", "--dry-run").output
    arguments.append(hub.url)
    assert "does not say what the push would delete" in told and "config.json" in told
    dry = run(*arguments, "--dry-run").output
    up, _, behind = dry.partition("files left out:\n")
    assert up.startswith("files to upload:\n") and "model.safetensors" in up and "notes.txt" not in up
    for line in ("notes.txt", "credentials.json", "LICENSE"):
        assert line in behind
    assert "a link that leaves the folder" in behind and "mine" not in dry
    shown = json.loads(run(*arguments, "--dry-run", "--json").output)
    assert "notes.txt" in shown["stays_behind"] and "config.json" in shown["files"]
    assert shown["deleted"] == []
    # What a push would refuse.
    for wrong in (["--branch", "a..b"], ["--message", " "], ["--create-pr", "--branch", "dev"]):
        run(*arguments, "--dry-run", *wrong, code=2)
    api.create_repo("org/bert")
    for name in ("vocab.txt", "mine.md"):
        api.upload_file(path_or_fileobj=b"x", path_in_repo=name, repo_id="org/bert")
    assert "files to delete:\nvocab.txt" in run(*arguments, "--dry-run").output
    pushed = run(*arguments, "--json")
    result = json.loads(pushed.stdout)
    assert "files left out:" in pushed.stderr and result["stays_behind"] == shown["stays_behind"]
    files = set(api.list_repo_files("org/bert")) - {".gitattributes"}
    assert files - {"mine.md"} == {"README.md", "config.json", "model.safetensors"} == set(result["files"])


def test_folders_of_version_control_are_not_walked(tmp_path):
    write_files(tmp_path, {".git/config": "x", "sub/__pycache__/a.pyc": "x", "sub/b.txt": "x"})
    os.symlink(tmp_path, tmp_path / "again")
    assert [name for name, _ in walk(tmp_path)] == ["again", "sub/b.txt"]


def test_a_folder_of_adapters_says_which_is_which(tmp_path):
    adapter = tiny_adapter()
    adapter.add_adapter("other", LoraConfig(r=2, target_modules=["query_key_value"]))
    adapter.save_pretrained(tmp_path / "both")
    listing = rehearse(tmp_path / "both", tmp_path / "staged")
    assert "weights that lie in a folder of their own" in listing.stays_behind["other/"]
    adapter.save_pretrained(tmp_path / "named", selected_adapters=["other"])
    with refused(ValueError, "named", "one of its folders: other"):
        stage(tmp_path / "named", tmp_path / "refused")
    (tmp_path / "named" / "modules.json").write_text("[]")
    with refused(ValueError, "named", "SentenceTransformer", "modules.json"):
        stage(tmp_path / "named", tmp_path / "refused")


SENTENCES = "sentence_transformers.models."
OF_MODULES = {"1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}", "sentence_bert_config.json": b"{}"}
OF_MODULES |= {"1_Pooling/notes.txt": b"mine", "3_Other/config.json": b"{}"}


def add_modules(folder, *kinds):
    """Makes a model of sentence-transformers of one of transformers."""
    for name, content in OF_MODULES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    save_file({"linear.weight": torch.ones(2, 8)}, folder / "2_Dense" / "model.safetensors")
    named = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("4_Normalize", "Normalize")]
    modules = [{"path": path, "type": SENTENCES + kind} for path, kind in named]
    (folder / MODULES).write_text(json.dumps(modules + [{"path": "", "type": kind} for kind in kinds]))


def test_modules_of_sentence_transformers_go_up_with_their_model(options, api, bert, tmp_path):
    add_modules(bert)
    folder = stage(bert, tmp_path / "staged", repo_id="org/model")
    wanted = [*list(OF_MODULES)[:3], "2_Dense/model.safetensors", MODULES]
    assert sorted(contents(folder)) == sorted([*wanted, "README.md", "config.json", "model.safetensors"])
    assert all((folder / name).read_bytes() == (bert / name).read_bytes() for name in wanted)
    found = read_front_matter((folder / "README.md").read_text())
    assert (found["library_name"], found["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    check_loads(folder)
    push(bert, "org/model", **options)
    # of the next model there the modules are stale
    push(save_bert(tmp_path / "other"), "org/model", **options)
    assert not {MODULES, *wanted} & set(api.list_repo_files("org/model"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: add_modules(folder, "my_code.Pooling"), ["modules.json", "'my_code.Pooling'", "push_to_hub"]),
        (lambda folder: add_modules(folder, SENTENCES + "Router"), ["modules.json", "Router'"]),
        (lambda folder: (folder / MODULES).write_text("7"), ["modules.json", "got type 7"]),
        (
            lambda folder: (folder / "2_Dense/pytorch_model.bin").write_bytes(b""),
            ["2_Dense/pytorch_model.bin", "pickle"],
        ),
        (lambda folder: (folder / "2_Dense/own.py").write_bytes(b""), ["2_Dense/own.py is code"]),
        (lambda folder: (folder / "1_Pooling/merges.txt").symlink_to("/etc/hostname"), ["merges.txt", "link"]),
        (lambda folder: (folder / "2_Dense/model.safetensors").write_bytes(b"x"), ["model.safetensors"]),
    ],
)
def test_modules_that_would_go_up_in_part_are_refused(bert, tmp_path, change, told):
    add_modules(bert)
    change(bert)
    with refused(ValueError, *told):
        stage(bert, tmp_path / "staged")
