"""Each command with real folders and a real Hub on loopback."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import peft
import pytest
import torch
from huggingface_hub import HfApi, close_session
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from PIL import Image
from safetensors.torch import load_file, save_file
from skimage import data
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext_cli.information import hide_secrets
from tests.cli.fuzzing import ALIASES
from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.emr.emr_testing import push_folder, tiny_bert, write_tokenizer
from tests.hub.published import EVALUATION, save_snapshot
from tests.kit.command_line import run
from tests.kit.hub import run_python
from tests.kit.restorers import tiny_restorer

# HF_ENDPOINT is read when huggingface_hub is imported, so commands on a Hub run in a process of their own.
MAIN = """
import json, sys
from hf_ext_cli.main import main
for words in json.loads(sys.argv[1]):
    main(words, standalone_mode=False)
    print("----")
"""


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Path:
    return save_snapshot(tmp_path_factory.mktemp("run") / "snapshot")


@pytest.fixture
def hub(tmp_path):
    disable_progress_bars()
    with EmbeddedHub(tmp_path / "hub") as running:
        yield running
    enable_progress_bars()
    close_session()


@pytest.mark.slow
def test_what_the_cache_has_is_used_without_a_hub(tmp_path):
    """Models and adapters of each kind, with HF_HUB_OFFLINE."""
    tiny_bert(tmp_path / "bert", 1, base=tiny_bert(tmp_path / "bare"))
    write_tokenizer(tmp_path / "gpt")
    sizes = {"vocab_size": 99, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt")
    save_snapshot(tmp_path / "semanir", reports=False)
    make_pipeline().save_pretrained(tmp_path / "dit")
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    bases = {"semanir": tiny_restorer(), "dit": make_pipeline().transformer}
    bases["bert"] = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert")
    bases["gpt"] = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt")
    targets = {"semanir": "query_key_value", "dit": "to_q", "bert": "query", "gpt": "c_attn"}
    with EmbeddedHub(tmp_path / "hub") as running:
        url, api = running.url, HfApi(endpoint=running.url, token=False)
        for name, base in bases.items():
            section = peft.LoraConfig(r=2, target_modules=[targets[name]], fan_in_fan_out=name == "gpt")
            adapter = peft.get_peft_model(base, section)
            adapter.peft_config["default"].base_model_name_or_path = f"org/{name}"
            adapter.save_pretrained(tmp_path / f"{name}-adapter", save_embedding_layers=False)
            (tmp_path / f"{name}-adapter" / "README.md").unlink()
            for pushed in (name, f"{name}-adapter"):
                push_folder(url, f"org/{pushed}", tmp_path / pushed)
                api.snapshot_download(f"org/{pushed}", cache_dir=tmp_path / "home" / "hub")
        close_session()
    words = [["restore", f"org/semanir{end}", "../a.png", "--out", f"r{end}"] for end in ("", "-adapter")]
    words += [["sample", f"org/dit{end}", "--out", f"s{end}.png", "--steps", "1"] for end in ("", "-adapter")]
    words += [["classify", f"org/bert{end}", "one two"] for end in ("", "-adapter")]
    words += [["generate", f"org/gpt{end}", "one", "--max-new-tokens", "1"] for end in ("", "-adapter")]
    words += [["info", f"org/{name}"] for name in ("dit", "bert-adapter")]
    begun = "from hf_ext.training.models import *\nassert pin_revision('org/gpt').startswith('org/gpt@')\n"
    begun += "assert adapter_base('org/gpt-adapter') == 'org/gpt' and adapter_base('org/gpt') is None\n"
    script = f"import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n{MAIN}{begun}"
    assert run_python(script, url, tmp_path / "home", json.dumps(words)).count("----") == len(words)


def test_info_describes_a_folder_from_its_headers(snapshot):
    found = json.loads(run("info", snapshot, "--json").stdout)
    weights = load_file(snapshot / "model.safetensors").values()
    count, size = sum(map(torch.numel, weights)), sum(tensor.nbytes for tensor in weights)
    assert (found["parameters"], found["bytes"], found["tensors"], found["files"]) == (count, size, len(weights), 1)
    assert found["dtypes"] == {"float32": count} and found["architectures"] == ["SemanIRForImageRestoration"]
    assert found["model_type"] == "semanir" and "AutoModelForImageToImage" in found["heads"]
    assert found["results"] == EVALUATION["results"]
    assert (found["commit"], found["adapter"], found["card"]) == (None, None, None)
    # For a person.
    lines = run("info", snapshot).stdout.splitlines()
    assert any(line.startswith("architecture ") and line.endswith("SemanIRForImageRestoration") for line in lines)
    assert any(line.endswith("30.1235 on org/photos, test") for line in lines)
    assert any(line.startswith("card ") and line.endswith("none") for line in lines)


def test_info_reads_every_type_that_safetensors_writes(tmp_path):
    """Eight bits of scale, and two numbers of four bits in each byte, which count as two."""
    scales = torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    pairs = torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2)
    save_file({"scales": scales, "pairs": pairs}, tmp_path / "model.safetensors")
    found = json.loads(run("info", tmp_path, "--json").stdout)
    assert found["dtypes"] == {"float8_e8m0fnu": 6, "float4_e2m1fn_x2": 24}
    assert (found["parameters"], found["bytes"]) == (30, 18)


def test_info_says_what_is_wrong_with_what_a_stranger_wrote(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "README.md").write_text("---\nlicense: mit\ndatasets:\n- 2024-01-01: first\n---\n")
    found = json.loads(run("info", tmp_path, "--json").stdout)
    assert found["card"] == {"license": "mit", "datasets": [{"2024-01-01": "first"}]}
    for file, text, said in (
        ("config.json", '{"auto_map": ["a"]}', "config.json: `auto_map` must be an object, got"),
        ("config.json", "[" * 5000, "config.json: not valid JSON"),
        ("eval.json", '{"results": [{"metric": "psnr", "dataset": "x"}]}', "`value` must be a number, got None"),
        ("README.md", f"---\n{ALIASES}datasets: *i\n---\n", "uses YAML aliases"),
        ("README.md", f"---\n{'[' * 60}{']' * 60}\n---\n", "nested deeper than 50"),
    ):
        (tmp_path / "README.md").unlink(missing_ok=True)
        (tmp_path / file).write_text(text)
        for options in ([], ["--json"]):
            assert said in run("info", tmp_path, *options, code=2).stderr
        (tmp_path / file).unlink()


def test_card_writes_a_card_that_passes_its_own_check_which_finds_what_is_missing_or_contradicts(tmp_path):
    folder = save_snapshot(tmp_path / "snapshot")
    card = folder / "README.md"
    assert run("card", folder, "--check", code=1).stdout == f"{card}: there is no card\n"
    for unknown in ("my own", "", "MIT"):
        assert '"license" must be one of' in run("card", folder, "--license", unknown, code=2).stderr
    assert not card.exists()
    written = json.loads(run("card", folder, "--repo-id", "org/name", "--license", "mit", "--json").stdout)
    assert written["text"] == card.read_text(encoding="utf-8") and "org/name" in written["text"]
    assert "no problems found" in run("card", folder, "--check").stdout
    assert json.loads(run("info", folder, "--json").stdout)["card"]["license"] == "mit"
    text = written["text"].replace("pipeline_tag: image-restoration\n", "")
    card.write_text(text + "\n[More Information Needed]\n", encoding="utf-8")
    report = json.loads((folder / "eval.json").read_text())
    report["results"][0]["value"] = 31.5
    (folder / "eval.json").write_text(json.dumps(report))
    problems = json.loads(run("card", folder, "--check", "--json", code=1).stdout)["problems"]
    assert problems == [
        f"{card}: pipeline_tag is not in the metadata",
        f"{card}: [More Information Needed] is left in the text",
        f"{card}: psnr of 31.5 in eval.json is not in the metadata",
    ]


@pytest.mark.slow
def test_push_to_a_branch_and_as_a_pull_request(snapshot, hub):
    common = ["push", snapshot, "me/tiny", "--endpoint", hub.url, "--no-check"]
    run(*common)
    text = run(*common, "--branch", "next", "--license", "mit").stdout
    assert re.search(r"^commit +[0-9a-f]{40}$", text, re.MULTILINE) and "pull request" not in text
    assert re.search(r"^pull request +http", run(*common, "--create-pr", "--license", "cc0-1.0").stdout, re.MULTILINE)
    refs = HfApi(endpoint=hub.url, token=False).list_repo_refs("me/tiny", include_pull_requests=True)
    assert {branch.name for branch in refs.branches} == {"main", "next"}
    assert len(refs.pull_requests or []) == 1
    assert "create_pr" in run(*common, "--branch", "next", "--create-pr", code=2).stderr


def test_an_absent_hub_is_said_without_a_traceback(snapshot):
    result = run("push", snapshot, "me/tiny", "--endpoint", "http://127.0.0.1:9", "--no-check", code=1)
    assert re.search(r"^Error: .*refused \(http://127\.0\.0\.1:9/", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.output


@pytest.fixture
def configuration(tmp_path) -> Path:
    """A YAML file with one photograph to evaluate on."""
    (tmp_path / "photos").mkdir()
    Image.fromarray(data.astronaut()[:24, :20]).save(tmp_path / "photos" / "astronaut.png")
    source = {"path": str(tmp_path / "photos"), "split": "train"}
    file = tmp_path / "denoise.yaml"
    task = {"degradation": {"kind": "gaussian_noise", "sigma": 25}}
    file.write_text(json.dumps({"method": "semanir", "data": {"train": source, "eval": source}, "task": task}))
    return file


def test_evaluate_measures_a_checkpoint_and_writes_the_report(snapshot, configuration, tmp_path):
    command = ["evaluate", snapshot, "--config", configuration, "--output", tmp_path / "eval.json", "--json"]
    report = json.loads(run(*command, "--task.degradation.sigma", "10").stdout)
    assert report == json.loads((tmp_path / "eval.json").read_text())
    results = {result["metric"]: result for result in report["results"]}
    assert {"psnr", "ssim"} <= set(results) and results["psnr"]["dataset"] == "photos"
    assert results["psnr"]["arguments"]["evaluation"] == ["Gaussian noise σ 10"]
    # The tiny model adds almost nothing to the picture: what is left is the noise, of 10 levels.
    assert results["psnr"]["value"] == pytest.approx(28.1, abs=1.0)
    stronger = run("evaluate", snapshot, "--config", configuration).stdout
    assert re.search(r"^PSNR \(RGB.*\) +\d+\.\d{4} on photos, train, 1 example$", stronger, re.MULTILINE)


@pytest.mark.slow
def test_a_model_on_a_hub_is_described_by_range_reads_and_evaluated_by_its_commit(
    snapshot, configuration, hub, tmp_path
):
    words = ["push", snapshot, "me/tiny", "--endpoint", hub.url, "--no-check", "--private", "--message", "First"]
    pushed = json.loads(run(*words, "--json").stdout)
    api = HfApi(endpoint=hub.url, token=False)
    assert api.repo_info("me/tiny").sha == pushed["commit"] and pushed["pull_request"] is None
    assert api.list_repo_commits("me/tiny")[0].title == "First" and api.repo_info("me/tiny").private
    folder = tmp_path / "pipeline"
    (folder / "transformer").mkdir(parents=True)
    scales = torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"scales": scales, "w": torch.ones(2)}, folder / "transformer" / "model.safetensors")
    (folder / "model_index.json").write_text('{"_class_name": "SomePipeline"}')
    push_folder(hub.url, "me/pipeline", folder)
    evaluation = ["evaluate", "me/tiny", "--config", str(configuration), "--json"]
    commands = [["info", "me/tiny", "--json"], ["info", "me/pipeline", "--json"], evaluation]
    printed = run_python(MAIN, hub.url, tmp_path / "home", json.dumps(commands))
    model, pipeline, report = printed.split("----\n")[:3]
    found = json.loads(model)
    assert found["commit"] == pushed["commit"] and found["card"]["library_name"] == "transformers"
    assert found["architectures"] == ["SemanIRForImageRestoration"]
    found = json.loads(pipeline)
    assert found["dtypes"] == {"float8_e8m0fnu": 6, "float32": 2} and found["architectures"] == ["SomePipeline"]
    found = json.loads(report)
    assert found["revision"] == pushed["commit"]
    assert {result["metric"] for result in found["results"]} == {"psnr", "ssim"}


def test_train_and_evaluate_pass_everything_after_the_file_on_and_hub_serve_needs_a_token(
    snapshot, configuration, tmp_path
):
    train = ["train", configuration, "--output_dir", "run", "--max_steps", "3"]
    serve = ["hub", "serve", "--root", tmp_path / "hub"]
    (tmp_path / "token").write_text("\n")
    for words, said in (
        ([*train, "--learning_rat", "1"], "Did you mean 'learning_rate'?"),
        ([*train, "--seed", "-1"], "seed must be 0 or more, below 2**32; got -1"),
        ([*train, "--data.train.path", "./x y"], "Error: no data at ./x y"),
        (["evaluate", snapshot, "--config", configuration, "--task.patch_siz", "1"], "Did you mean 'patch_size'?"),
        ([*serve, "--host", "0.0.0.0"], "not loopback: set a token"),
        ([*serve, "--token-file", tmp_path / "token"], "token must be"),
    ):
        assert said in run(*words, code=2).stderr


def test_doctor_says_what_an_issue_needs_and_prints_no_secret(monkeypatch):
    secrets = {"HF_TOKEN": "hf_" + "s" * 34, "HF_MIRROR": "https://me:word@hub.example/x", "UNRELATED": "not told"}
    for name, value in (secrets | {"HF_HUB_ETAG_TIMEOUT": "7"}).items():
        monkeypatch.setenv(name, value)
    told = run("doctor", "--offline", "--json").stdout
    found = json.loads(told)
    assert found["libraries"]["torch"] and "cores" in found["devices"]["cpu"]
    assert {"train", "fast", "audio"} <= set(found["extras"])
    assert found["environment"]["HF_HUB_ETAG_TIMEOUT"] == "7" and found["hub"]["answers"] == "not asked"
    assert "sss" not in told and "word" not in told and "not told" not in told and found["hub"]["token"] == "there"
    for login in ("a:b", "a:p@rt", "a:p/rt", "a:p@r/t"):
        assert hide_secrets(f"no: https://{login}@c/d failed") == "no: https://...@c/d failed"
    assert "sss" not in hide_secrets("hf_" + "s" * 34)


def test_doctor_of_a_broken_machine_tells_what_is_broken(monkeypatch):
    for name in ("torch.cuda.device_count", "shutil.disk_usage", "huggingface_hub.get_token"):
        monkeypatch.setattr(name, Mock(side_effect=OSError("no libcudart at https://me:word@hub.example")))
    found = json.loads(run("doctor", "--offline", "--json").stdout)
    parts = [found["devices"], found["cache"], found["hub"]["token"]]
    assert parts == ["no: OSError: no libcudart at https://...@hub.example"] * 3 and found["libraries"]["torch"]


def test_doctor_of_a_hub_that_answers(url, run_client):
    told = run_client(MAIN, '[["doctor"]]')
    assert "answers yes, 200" in told and url in told
