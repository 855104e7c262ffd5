"""Searches by the words that the client sends."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

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
