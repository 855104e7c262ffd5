"""The benchmarks beside other models: what they compare and count, and the frame that runs them."""

import json
import sys
from argparse import Namespace

import pytest
import torch

from tests.kit.studies import EXAMPLES, module_loader

load_module = module_loader(EXAMPLES / "benchmarks")


@pytest.fixture
def load(load_module, monkeypatch):
    """A benchmark, which puts other examples on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield load_module
    sys.modules.pop("peers", None)


def find(module, **words) -> tuple[dict, str]:
    """The last result of a benchmark as its JSON has it, and its table."""
    content = list(module.measure(Namespace(**words)))[-1]
    return json.loads(json.dumps(content)), module.markdown(content)


def test_the_frame_reads_words_and_keeps_notes_below_a_table(load, monkeypatch, tmp_path):
    timing = load("timing")

    def measure(words):
        yield {"sides": words.sides, "word": words.word}

    for _ in range(2):
        output = tmp_path / "out" / "result.json"
        monkeypatch.setattr(sys, "argv", ["x", "--sides", "1", "2", "--output", str(output)])
        timing.run(
            "x", "Help.", measure, lambda _: timing.markdown_table(["a"], [["1"]]), sides=[8], word="n", rounds=3
        )
        content = json.loads(output.read_text())
        assert content["sides"] == [1, 2] and content["word"] == "n" and content["versions"]["torch"]
        page = output.with_suffix(".md")
        assert page.read_text().partition("\nnote")[0] == "| a |\n|---|\n| 1 |\n"
        page.write_text(page.read_text().rstrip("\n") + "\n\nnote\n" * ("note" not in page.read_text()))
    assert page.read_text().count("note") == 1
    assert timing.apart(abs, -3) == 3


def test_two_installations_are_compared_number_by_number(load, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import json, sys; open(sys.argv[-1], 'w').write(json.dumps({'rows': [{'s': 2.5, 'k': 3}]}))")
    load("before").main(sys.executable, str(script), [])
    assert "| /rows/0/s | 1.000 | 1.000 | 1.000 |" in capsys.readouterr().out


def test_memory_is_what_a_call_holds_at_once(load):
    peak_bytes = load("mrconv_inference").peak_bytes

    def call():
        # Two of a megabyte at once, and after they are gone a third.
        torch.zeros(2**18) + 1
        return torch.zeros(2**18)

    torch.zeros(1)
    assert 2 * 2**20 <= peak_bytes(call) < 2.1 * 2**20


@pytest.mark.slow
def test_times_and_memory_against_length(load):
    result, table = find(load("mrconv_inference"), lengths=[64, 128], rounds=1, width=64)
    assert set(result["results"]["blocks"]) == {"64", "128"}
    for row in result["results"]["blocks"]["128"].values():
        assert row["seconds"] > 0 and row["bytes"] >= 4 * 64 * 128
    assert set(result["results"]["blocks"]["64"]) == {
        "MRConv merged", "MRConv branches", "S4D", "SDPA attention", "Mamba 2",
    }  # fmt: skip
    assert "| blocks, length | MRConv merged | MRConv branches | S4D |" in table


@pytest.mark.slow
def test_every_token_of_a_stream_is_timed(load, tmp_path):
    result, table = find(load("mrconv_latency"), contexts=[64], output=tmp_path / "latency.json")
    rows = result["contexts"]["64"]
    streaming = rows["MRConv, streaming"]
    assert streaming["tokens"] == 64 and streaming["p50"] <= streaming["p99"] <= streaming["worst"]
    assert streaming["state_bytes"] > 0 and streaming["shared_bytes"] > 0
    assert set(rows) == {"MRConv, streaming", "MRConv, recomputing", "Mamba 2", "attention (SDPA)"}
    assert table.count("\n") == 6 and (tmp_path / "latency.png").is_file()
