"""Caches that cannot be written and a Hub that was not asked are told as such."""

import errno

import datasets
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from hf_ext.data import opening
from hf_ext.data.caching import CacheError
from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.errors import FAILED, DataError, classify
from tests.kit.refusals import refused


def raising(error, cause=None):
    def fail(*words, **options):
        raise error from cause

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("kind", ["in the way", "full", "full below", "too small"])
def test_a_cache_that_cannot_be_written_is_no_fault_of_the_data(tmp_path, monkeypatch, kind, parts):
    (place := tmp_path / "a.csv").write_text("text,label\na,b\n")
    (tmp_path / "cache").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache" / "datasets"))
    if kind != "in the way":
        cause = datasets.exceptions.DatasetGenerationError("An error occurred"), FULL
        errors = {"full": (FULL,), "full below": cause, "too small": (OSError("Not enough disk space. Needed: 1 B"),)}
        monkeypatch.setattr(opening, "_build", raising(*errors[kind]))
    with refused(CacheError, "cache", "set HF_HOME or HF_DATASETS_CACHE") as caught:
        open_source(DataSource([{"path": str(place)}] * 2 if parts else str(place)), "data.train")
    assert classify(caught.value).exit_code == FAILED and "data.train" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda *words, **options: False, "the Hub confirms no data set of that name"),
        (raising(OfflineModeIsEnabled("offline")), "the Hub was not asked for one, or gave no answer"),
        (raising(ConnectionError("refused")), "the Hub was not asked for one, or gave no answer"),
    ],
)
def test_the_hub_confirms_only_what_it_was_asked(monkeypatch, answer, told):
    monkeypatch.setattr(opening.HfApi, "repo_exists", answer)
    with refused(DataError, told):
        open_source(DataSource("nowhere"))
