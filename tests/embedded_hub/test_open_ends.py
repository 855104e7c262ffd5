"""Searches by the words that the client sends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from hf_ext.embedded_hub.objects import Snapshot
from hf_ext.embedded_hub.server import EmbeddedHub

CARD = (
    b"---\nlanguage: [en, de]\nlicense: mit\ntask_categories: [translation]\nsize_categories: n<1K\ntags: [a]\n---\n"
)


def test_data_sets_are_found_by_the_tags_of_the_hub(tmp_path: Path) -> None:
    with EmbeddedHub(tmp_path / "hub") as hub:
        api = HfApi(hub.url)
        for kind in ("dataset", "model"):
            api.create_repo("me/mine", repo_type=kind)
            api.upload_file(path_or_fileobj=CARD, path_in_repo="README.md", repo_id="me/mine", repo_type=kind)
        words = ["language:en", "license:mit", "task_categories:translation", "size_categories:n<1K", "a"]
        for wanted in (*words, words):
            assert [found.id for found in api.list_datasets(filter=wanted)] == ["me/mine"], wanted
        assert [found.id for found in api.list_datasets(language="de", task_categories="translation")] == ["me/mine"]
        assert not [*api.list_datasets(filter="language:fr")] and not [*api.list_datasets(filter="en")]
        assert [found.id for found in api.list_models(filter=["en", "license:mit"])] == ["me/mine"]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HfApi]:
    """A Hub with three models and data sets, whose order by time is none of letters."""
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    clock = SimpleNamespace(now=lambda zone: begun + timedelta(seconds=next(seconds)))
    seconds = count()
    monkeypatch.setattr("hf_ext.embedded_hub.repository.datetime", clock)
    with EmbeddedHub(tmp_path / "hub") as hub:
        api = HfApi(hub.url)
        for kind in ("dataset", "model"):
            for name in ("zz/old", "mm/mid", "aa/new"):
                api.create_repo(name, repo_type=kind)
            api.upload_file(path_or_fileobj=CARD, path_in_repo="README.md", repo_id="mm/mid", repo_type=kind)
        yield api


CREATED, CHANGED = ["aa/new", "mm/mid", "zz/old"], ["mm/mid", "aa/new", "zz/old"]


def test_listings_are_sorted_and_told_as_they_are_asked_for(listed: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 3):
        monkeypatch.setattr("hf_ext.embedded_hub.routes._REPOSITORIES_PAGE", number)
        for ask in (listed.list_models, listed.list_datasets):
            for sort, wanted in {"created_at": CREATED, "last_modified": CHANGED, "likes": CREATED}.items():
                assert [found.id for found in ask(sort=sort)] == wanted, sort
                assert [found.id for found in ask(sort=sort, limit=1)] == wanted[:1], sort
            assert [found.id for found in ask(search="m", sort="created_at", filter="a")] == ["mm/mid"]
    for ask, info in ((listed.list_models, listed.model_info), (listed.list_datasets, listed.dataset_info)):
        (told,), whole = ask(search="mid", full=True), info("mm/mid")
        names = ("sha", "tags", "last_modified", "siblings", "author")
        assert [getattr(told, name) for name in names] == [getattr(whole, name) for name in names]
        (told,) = ask(search="mid", expand=["sha", "tags"])
        assert (told.sha, told.tags, told.private) == (whole.sha, whole.tags, None)
        assert len(list(ask(gated=False))) == 3 and not list(ask(gated=True))
    (told,) = listed.list_models(search="mid", cardData=True)
    assert told.card_data == listed.model_info("mm/mid").card_data and told.sha is None
    (told,) = listed.list_datasets(search="mid", full=True)
    assert told.card_data == listed.dataset_info("mm/mid").card_data


@pytest.mark.parametrize(
    "asked", [{"num_parameters": "min:6B"}, {"inference": "warm"}, {"apps": "ollama"}, {"sort": "size"}], ids=str
)
def test_what_a_listing_cannot_choose_by_is_refused(listed: HfApi, asked: dict[str, str]) -> None:
    with pytest.raises(HfHubHTTPError, match=f"this Hub .*{asked.get('sort', next(iter(asked)))}"):
        list(listed.list_models(**asked))


def test_the_sdk_of_a_space_is_kept(listed: HfApi) -> None:
    listed.create_repo("me/space", repo_type="space", space_sdk="gradio")
    assert listed.space_info("me/space").sdk == "gradio"
    assert [found.sdk for found in listed.list_spaces(full=True)] == ["gradio"]


def test_a_listing_by_pages_reads_the_history_once(listed: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ext.embedded_hub.routes._EXPANDED_TREE_PAGE", 1)
    files = [f"d{number}/{name}.txt" for number in range(3) for name in "ab"]
    for number, path in enumerate(files):
        listed.upload_file(
            path_or_fileobj=path.encode(), path_in_repo=path, repo_id="zz/old", commit_message=f"Add {number}"
        )
    loads = []
    load = Snapshot.load
    monkeypatch.setattr(Snapshot, "load", lambda data: loads.append(0) or load(data))
    found = list(listed.list_repo_tree("zz/old", recursive=True, expand=True))
    titles = {each.path: each.last_commit.title for each in found if each.path != ".gitattributes"}
    assert titles == {path: f"Add {number}" for number, path in enumerate(files)} | {
        f"d{number}": f"Add {2 * number + 1}" for number in range(3)
    }
    assert len(loads) <= len(files) + 1
