"""`hf-ext doctor`: says what an issue needs, and no secret."""

import json

import pytest
from click.testing import CliRunner

from hf_ext_cli.doctor import hide_login
from hf_ext_cli.main import main


@pytest.fixture
def told(monkeypatch):
    """What it prints as JSON, beside secrets in the environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 34)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "7")
    monkeypatch.setenv("HF_MIRROR", "https://me:word@hub.example/x")
    monkeypatch.setenv("UNRELATED", "not told")
    result = CliRunner().invoke(main, ["doctor", "--offline", "--json"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_says_what_an_issue_needs(told):
    found = json.loads(told)
    assert found["libraries"]["torch"] and "cores" in found["devices"]["cpu"]
    assert {"train", "fast", "audio"} <= set(found["extras"])
    assert found["environment"]["HF_HUB_ETAG_TIMEOUT"] == "7" and found["hub"]["answers"] == "not asked"


def test_no_secret_is_printed(told):
    assert "sss" not in told and "word" not in told and "not told" not in told
    assert json.loads(told)["hub"]["token"] == "there"
    assert hide_login("no: https://a:b@c/d failed") == "no: https://...@c/d failed"


def test_a_hub_that_answers(url, run_client):
    told = run_client("""
        from click.testing import CliRunner
        from hf_ext_cli.main import main
        print(CliRunner().invoke(main, ["doctor"]).stdout)
    """)
    assert "answers yes, 200" in told and url in told
