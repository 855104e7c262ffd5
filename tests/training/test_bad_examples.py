"""Examples that cannot be used: a few are left out, listed and counted, also after a resume; many end the run."""

import json

import datasets
import numpy as np
import pytest

from hf_ext.data.bad_examples import BadExamples, name_bad, read_example
from hf_ext.data.opening import open_source
from hf_ext.errors import DataError, UsageError
from hf_ext.training import DataSource
from hf_ext.training.data import IndexedSamples
from hf_ext.training.state import RunFolder
from tests.kit.command_line import run as command
from tests.kit.refusals import refused

from .tiny import TinyTask, contents, evaluated, make_arguments, run, run_interrupted, write_config, write_images

# datasets leaves the file of a picture that cannot be decoded to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning"),
]
BAD = ("004.png", "007.png")


@pytest.fixture
def broken(tmp_path):
    """Twelve pictures, one of them cut off and one empty."""
    folder = write_images(tmp_path / "photos", 12)
    whole = (folder / BAD[0]).read_bytes()
    (folder / BAD[0]).write_bytes(whole[: len(whole) // 2])
    (folder / BAD[1]).write_bytes(b"")
    return folder


def listed(folder):
    return [json.loads(line) for line in (folder / "bad_examples.jsonl").read_text().splitlines()]


def arguments(output, photos, share=None, streaming=False, workers=0):
    # A stream's share is taken of a thousand examples at least.
    share = (0.02 if streaming else 0.25) if share is None else share
    data = {"train": {"path": str(photos), "streaming": streaming}, "max_bad_examples": share}
    return make_arguments(output, {**data, "num_workers": workers})


@pytest.mark.parametrize(("streaming", "workers"), [(False, 1), (True, 0)])
def test_a_few_are_left_out_listed_and_counted_also_after_a_resume(tmp_path, broken, streaming, workers, capfd):
    options = {"streaming": streaming, "workers": workers}
    run(TinyTask(), arguments(tmp_path / "whole", broken, **options))
    rows = listed(tmp_path / "whole")
    assert {row["file"].rpartition("/")[2] for row in rows} == set(BAD)
    assert all(row["reason"] for row in rows) and len({row["example"] for row in rows}) == len(rows)
    if not streaming:
        assert sorted(row["example"] for row in rows) == ["4", "7"]
    assert "skipped: example" in capfd.readouterr().err
    assert RunFolder(tmp_path / "whole").read_metrics()[-1]["bad_examples"] == len(rows)

    run_interrupted(arguments(tmp_path / "cut", broken, **options), step=4)
    run(TinyTask(), arguments(tmp_path / "cut", broken, **options))
    whole, cut = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    assert [name for name in whole if whole[name] != cut[name] and "/stream-" not in name] == []
    assert sorted(map(str, listed(tmp_path / "cut"))) == sorted(map(str, rows))


@pytest.mark.parametrize(("streaming", "workers"), [(False, 0), (True, 1)])
def test_too_many_end_the_run_and_name_the_last(tmp_path, broken, streaming, workers):
    if not streaming:
        with refused(DataError, "2 examples", "data.max_bad_examples 0.1", "bad_examples.jsonl"):
            run(TinyTask(), arguments(tmp_path / "few", broken, share=0.1))
        assert len(listed(tmp_path / "few")) == 2
        with refused(UsageError, "data.max_bad_examples", "got 3"):
            arguments(tmp_path / "none", broken, share=3)
    for number in range(12):
        (broken / f"{number:03d}.png").write_bytes(b"no picture")
    with refused((ValueError, OSError), "example", "read"):
        run(TinyTask(), arguments(tmp_path / "run", broken, share=0.001, streaming=streaming, workers=workers))


def test_a_sample_that_the_task_refuses_is_left_out_too(tmp_path, examples):
    class Picky(TinyTask):
        def training_sample(self, example, generator):
            if example["pixels"][0] > 0.075:
                raise ValueError("the pixel is too bright")
            return super().training_sample(example, generator)

    run(Picky(), arguments(tmp_path / "run", examples, share=0.2))
    assert [row["reason"] for row in listed(tmp_path / "run")] == ["the pixel is too bright"]
    with refused(DataError, "example 8", "bright"):
        run(Picky(), arguments(tmp_path / "strict", examples, share=0.0))


def test_a_stand_in_is_of_the_same_group_and_has_the_randomness_of_its_position():
    numbers = datasets.Dataset.from_dict({"row": range(12)})

    def sample(example, generator):
        if example["row"] in (2, 9):
            raise ValueError("not this one")
        return {"row": example["row"], "noise": generator.random()}

    groups = np.array([0] * 6 + [1] * 6)
    strict = IndexedSamples(numbers, lambda example, generator: example, 3, groups, 3)
    samples = IndexedSamples(numbers, sample, 3, groups, 3, bad_allowed=2)
    left_out = []
    for position in range(24):
        meant = strict[position][0]["row"]
        found, bad = samples[position]
        assert groups[found["row"]] == groups[meant]
        assert (found["row"] == meant) == (bad == [])
        assert found["noise"] == np.random.default_rng((3, 1, position)).random()
        left_out += [row["example"] for row in bad]
    assert set(left_out) == {"2", "9"}


@pytest.mark.parametrize("streaming", [False, True])
def test_data_check_reads_everything_once_and_tells(tmp_path, broken, streaming):
    config = write_config(tmp_path, evaluated(broken, streaming=streaming), method="semanir", task={"patch_size": 8})
    words = [config, "--data.max_bad_examples", "0.2"]
    # Of an evaluation nothing may be left out.
    train, evaluation = json.loads(command("data", "check", "--json", *words, code=1).stdout)
    assert (train["section"], train["examples"], train["allowed"]) == ("data.train", 12, 2)
    assert [row["example"] for row in train["bad"]] == ["4", "7"]
    assert all(name in row["file"] + row["reason"] for name, row in zip(BAD, train["bad"], strict=True))
    assert evaluation["allowed"] == 0 and len(evaluation["bad"]) == 2
    words += ["--data.eval", "null"]
    assert len(json.loads(command("data", "check", "--json", *words).stdout)) == 1
    said = command("data", "check", *words).stdout
    assert "12 examples of" in said and "2 cannot be used. example 4" in said


# The plain product of some is a little less than the whole number.
@pytest.mark.parametrize(
    ("share", "total", "allowed"),
    [(0.29, 100, 29), (0.57, 100, 57), (0.0012, 20000, 24), (0.009, 12000, 108), (0.0096, 5000, 48), (0.3, 10, 3)]
    + [(0.299, 10, 2), (0.001, 1999, 1), (0.0, 9, 0), (1.0, 7, 7), (0.29, None, 290)],
)
def test_a_share_allows_as_many_as_it_says(share, total, allowed):
    bad = BadExamples(share, total)
    assert bad.count_allowed(5) == allowed
    bad.add([name_bad(str(number), "", ValueError("broken")) for number in range(allowed)], 5)
    with refused(DataError, f"{share:g}"):
        bad.add([name_bad("x", "", ValueError("broken"))], 5)


def test_a_list_that_was_cut_off_is_mended(tmp_path):
    file, rows = tmp_path / "bad_examples.jsonl", [name_bad(str(row), "", ValueError("broken")) for row in range(3)]
    bad = BadExamples(1.0, 10, file)
    bad.add(rows[:2], 0)
    # As a crash leaves it, with half of a letter at the end.
    file.write_bytes(file.read_bytes()[:-20] + "é".encode()[:1])
    for _ in range(2):
        bad = BadExamples(1.0, 10, file)
        bad.add(rows, 0)
        assert [row["example"] for row in listed(tmp_path)] == ["0", "1", "2"] and bad.found == {"0", "1", "2"}


@pytest.mark.parametrize(("kind", "streaming"), [(RuntimeError, False), (KeyError, True), (TypeError, False)])
def test_whatever_a_decoder_raises_is_a_bad_example(tmp_path, monkeypatch, kind, streaming):
    photos, decode = write_images(tmp_path / "photos", 12), datasets.Image.decode_example

    def fail(self, value, token_per_repo_id=None):
        if str(value["path"]).endswith("004.png"):
            raise kind("damaged")
        return decode(self, value, token_per_repo_id)

    monkeypatch.setattr(datasets.Image, "decode_example", fail)
    run(TinyTask(), arguments(tmp_path / "run", photos, streaming=streaming))
    rows = listed(tmp_path / "run")
    assert rows and all("damaged" in row["reason"] and row["file"].endswith("004.png") for row in rows)
    with refused(OSError, "example 4", "004"):
        read_example(open_source(DataSource(str(photos))), 4)
