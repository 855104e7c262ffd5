"""States that are pushed beside a run, and a run on another machine that goes on from them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.training.pushing import PushModels
from hf_ext.training.state import RunFolder
from tests.hub.unfaithful_hub import Reply, UnfaithfulHub
from tests.kit import warm_python
from tests.kit.hub import client_environment, run_python
from tests.kit.studies import write_photos

from .launching import ROOT, launch_two
from .on_a_hub import list_errors
from .tiny import TinyTask, make_arguments, run, write_config

SCRIPT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.training.on_a_hub import main; main()"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `on_a_hub` printed."""
    folder = tmp_path_factory.mktemp("hub states")
    with EmbeddedHub(folder / "hub") as hub:
        printed = run_python(SCRIPT, hub.url, folder / "home", str(ROOT), str(folder))
    return json.loads(printed.splitlines()[-1])


def test_a_run_goes_on_from_a_hub_bit_for_bit(found):
    assert found["push errors"] == [] and "last-checkpoint" in found["bare"]
    files = {name for name in found["files"] if name.startswith("last-checkpoint/")}
    assert {name.split("/")[1] for name in files} == {"args.json", "metrics.jsonl", "state", "best"}
    # One state, the last.
    assert {name.split("/")[2] for name in files if "/state/" in name} == {"step-4"}
    # The state of the best step so far stays where it was saved.
    assert {name.rpartition("/")[0] for name in found["differences"]} <= {"state/step-3"}
    assert found["again"] == []


def test_a_state_that_would_go_up_in_part_or_with_a_secret_is_not_pushed(found):
    assert any("state/step-" in error and "optimizer.bin" in error for error in found["ignored"])
    assert any("last-checkpoint/args.json, line" in error for error in found["secret"])
    assert not any("aBcDeF" in error for error in found["secret"]) and found["kept"] == []


@pytest.mark.parametrize(
    ("case", "kind", "fact"),
    [
        *[("absent", "CheckpointError", "me/absent"), ("revision", "CheckpointError", "me/run@none")],
        *[("empty", "DataError", "me/empty"), ("taken", "UsageError", "output_dir")],
        *[("code", "DataError", "custom_checkpoint_0.pkl"), ("name", "DataError", "other.pkl")],
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_in_a_line_and_leaves_nothing(found, case, kind, fact):
    told, text = found["refused"][case]
    assert told == kind and fact in text and "\n" not in text
    assert found["left"] == []


@pytest.fixture
def recipe(tmp_path):
    """The recipe of a small restorer, whose states are pushed."""
    write_photos(tmp_path / "photos", range(6), (16, 16, 3))
    model = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 4, "mlp_ratio": 1.0}
    values = {"method": "semanir", "task": {"patch_size": 8}, "model": model, "lr_scheduler_type": "constant"}
    values |= {"hub_model_id": "me/run", "hub_private_repo": True, "hub_strategy": "checkpoint"}
    return write_config(tmp_path, tmp_path / "photos", **values, per_device_train_batch_size=8)


@pytest.mark.slow
def test_two_processes_train_one_of_our_models_on_from_a_hub(tmp_path, recipe, monkeypatch):
    """The first two steps, pushed and resumed in another folder, and two more equal four at once."""
    with EmbeddedHub(tmp_path / "hub") as hub:
        for name, value in client_environment(hub.url, tmp_path / "home", token="any").items():
            monkeypatch.setenv(name, value)
        command = ["hf_ext_cli.main", "train", recipe, "--output_dir"]
        for name, *words in (("whole", "4"), ("half", "2"), ("moved", "4", "--resume_from_checkpoint", "me/run")):
            launch_two(*command, str(tmp_path / name), "--max_steps", *words)
            if name == "half":
                shutil.rmtree(tmp_path / name)
        assert not list_errors(tmp_path / "moved")
        api = HfApi(endpoint=hub.url, token="any")
        assert {"model.safetensors", "README.md"} <= {*api.list_repo_files("me/run")}
        assert api.model_info("me/run").private
    for file in ("snapshot/model.safetensors", "state/step-4/optimizer.bin", "state/step-4/model.safetensors"):
        assert (tmp_path / "moved" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_a_model_whose_state_is_gone_takes_no_earlier_ones_place(tmp_path, examples, monkeypatch, strategy):
    folder, hub = RunFolder(tmp_path / "run"), {"hub_model_id": "me/run", "hub_private_repo": True}
    run(TinyTask(), make_arguments(folder.path, examples, max_steps=1))
    monkeypatch.setattr(PushModels, "_start", lambda _: None)
    push = PushModels(make_arguments(folder.path, examples, **hub, hub_strategy=strategy), folder)
    folder.state(1).rename(folder.state(2))
    push.on_begin(2, folder.path, None)
    assert push.copies.exists() == (strategy != "checkpoint")
    folder.state(2).rename(folder.state(1))
    push.on_begin(1, folder.path, None)
    assert push.copies.exists()


TRAIN = "import sys; from hf_ext_cli.main import main; main(['train', *sys.argv[1:]])"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "best"])
def test_a_hub_that_fails_in_the_middle_of_a_push_ends_no_run_and_is_repaired_by_the_next(tmp_path, recipe, strategy):
    """The commit of the first model fails after its weights were sent; of a state, that after its model's."""
    commits, place = [], 2 if strategy == "checkpoint" else 1

    def rule(method, path, body, forward):
        if method == "POST" and path.startswith("/api/models/me/run/commit/"):
            commits.append(path)
            if len(commits) == place:
                return Reply(403, b'{"error": "no room is left"}', {"Content-Type": "application/json"})
        return forward(body)

    photos = f"--data.eval.path={tmp_path / 'photos'}"
    words = [recipe, f"--output_dir={tmp_path / 'run'}", "--max_steps=8", "--eval_steps=2", photos]
    command = [sys.executable, "-c", TRAIN, *words, f"--hub_strategy={strategy}"]
    with EmbeddedHub(tmp_path / "hub") as hub:
        proxy = UnfaithfulHub(hub.url)
        proxy.rule = rule
        environment = client_environment(proxy.url, tmp_path / "home", token="any")
        # The next push is that of a later model, or of the same command once more.
        done = [warm_python.run(command, env=environment, cwd=tmp_path, timeout=420) for _ in range(2)]
        proxy.stop()
        assert [each.returncode for each in done] == [0, 0], done[0].stderr
        there = Path(HfApi(endpoint=hub.url, token="any").snapshot_download("me/run", local_dir=tmp_path / "there"))
    assert done[0].stderr.count("not pushed to me/run") == len(list_errors(tmp_path / "run")) == 1
    assert len(commits) > place and not [*(tmp_path / "run" / ".push").iterdir()]
    sent = tmp_path / "run" / ("best" if strategy == "best" else "snapshot")
    assert (there / "model.safetensors").read_bytes() == (sent / "model.safetensors").read_bytes()
    state = tmp_path / "run" / "state" / "step-8"
    pushed = {path.name: path.read_bytes() for path in (there / "last-checkpoint").glob("state/step-8/*")}
    assert pushed == ({path.name: path.read_bytes() for path in state.iterdir()} if place == 2 else {})
