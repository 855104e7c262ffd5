"""Resume states that were damaged are named; the run goes on from the last whole one as if nothing had happened."""

import random
import shutil
from pathlib import Path

import pytest

from hf_ext.errors import DataError
from hf_ext.training.state import RunFolder
from tests.kit.refusals import refused

from .tiny import TinyTask, contents, evaluated, make_arguments, run, run_interrupted, write_shards


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data, a run that is `whole`, and one that was interrupted after its third state."""
    root = tmp_path_factory.mktemp("runs")
    write_shards(root / "examples", shards=2, examples=9)
    run(TinyTask(), arguments(root, root / "whole"))
    run_interrupted(arguments(root, root / "interrupted"), 6)
    assert RunFolder(root / "interrupted").saved_steps() == [3, 4, 6]
    return root


def arguments(root: Path, output: Path):
    return make_arguments(output, evaluated(root / "examples"), save_total_limit=3)


def flip_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


DAMAGES = {
    "flip": flip_bit,
    "cut": lambda path, rng: path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)]),
    "remove": lambda path, rng: path.unlink(),
}
# A damage, the file or one at random, and what is said of it.
CHANGED = ("flip model.safetensors", "flip optimizer.bin", "cut custom_checkpoint_2.pkl")
STEP_6 = {words: f"{words.partition(' ')[2]} changed after being saved" for words in CHANGED}
STEP_6 |= dict.fromkeys(("flip manifest.json", "cut manifest.json"), "manifest.json is damaged")
STEP_6 |= {f"remove {name}": f"{name} is missing" for name in ("model.safetensors", "manifest.json")}


@pytest.mark.parametrize(
    ("damages", "start"), [*(({6: words}, 4) for words in STEP_6), ({6: "cut", 4: "remove"}, 3)], ids=str
)
def test_the_run_goes_on_from_the_last_whole_state(runs, tmp_path, capsys, damages, start):
    output, rng = tmp_path / "run", random.Random(str(damages))
    shutil.copytree(runs / "interrupted", output)
    for step, words in damages.items():
        damage, _, name = words.partition(" ")
        folder = output / "state" / f"step-{step}"
        DAMAGES[damage](folder / (name or rng.choice(sorted(path.name for path in folder.iterdir()))), rng)
    capsys.readouterr()
    run(TinyTask(), arguments(runs, output))
    assert contents(output) == contents(runs / "whole")
    said = capsys.readouterr().err
    assert f"from step {start}" in said
    assert all(f"state/step-{step} is damaged: {STEP_6.get(words, '')}" in said for step, words in damages.items())
    # What was set aside is gone, now that there are later states.
    assert not [*(output / "state").glob("damaged-*")]


@pytest.mark.parametrize(
    ("name", "taken"),
    [("step-6", True), ("step-6.tmp", False), ("step-06", False), ("step-６", False), ("damaged-step-6", True)],
)
def test_what_is_no_state_is_in_nobodys_way(runs, tmp_path, name, taken):
    shutil.copytree(runs / "interrupted", tmp_path / "run")
    if taken:
        shutil.rmtree(tmp_path / "run" / "state" / "step-6")
        (tmp_path / "run" / "state" / "step-6").touch()
    (tmp_path / "run" / "state" / name).touch()
    run(TinyTask(), arguments(runs, tmp_path / "run"))
    found, expected = contents(tmp_path / "run"), contents(runs / "whole")
    assert {file: found[file] for file in expected} == expected


def test_without_a_whole_state_nothing_is_begun_anew(runs, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(runs / "interrupted", output)
    for step in (3, 4, 6):
        (output / "state" / f"step-{step}" / "optimizer.bin").unlink()
    files = [path for path in output.rglob("*") if path.is_file() and not path.name.startswith(".")]
    before = {path: path.read_bytes() for path in files}
    with refused(DataError, "optimizer.bin"):
        run(TinyTask(), arguments(runs, output))
    assert before == {path: path.read_bytes() for path in before}
    shutil.rmtree(output / "state")
    run(TinyTask(), arguments(runs, output))
    assert contents(output) == contents(runs / "whole")


def test_a_state_holds_nothing_that_is_not_read(runs):
    names = {path.name for path in (runs / "whole" / "state" / "step-7").iterdir()}
    checkpoints = {f"custom_checkpoint_{number}.pkl" for number in range(3)}
    assert names == {"manifest.json", "model.safetensors", "optimizer.bin", *checkpoints}
