"""huggingface_hub's own tests, which were written for the public Hub, run against the embedded one."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import client_environment, find_damage

TOKEN = "hf_" + "a" * 34
FILES = [
    "test_hf_api.py", "test_commit_api.py", "test_commit_scheduler.py", "test_file_download.py", "test_lfs.py",
    "test_hf_file_system.py", "test_repocard.py", "test_snapshot_download.py", "test_tree_cache.py",
    "test_upload_pipeline.py", "test_utils_errors.py", "test_utils_http.py", "test_utils_pagination.py",
]  # fmt: skip

# What the embedded Hub does not have, by the tests that need it. Each of them must fail: the list names no others.
_API, _CARD = "test_hf_api.py::Test", "test_repocard.py::Test"
_OF_CARDS = """
load_repocard_from_file change_repocard_data repo_card_from_custom_template_path repo_card_data_must_be_dict
repo_card_without_metadata validate_repocard preserve_windows_linebreaks preserve_linebreaks_when_saving
updating_text_updates_content
"""
_OF_MODEL_CARDS = """
model_card_with_invalid_model_index_and_ignore_error model_card_with_model_index load_model_card_from_file
model_card_from_custom_template model_card_from_template_eval_results
"""
FAILING = {
    "there are pull requests, but no discussions": [f"{_API}HfApiDiscussions::*"],
    "there are no collections": [f"{_API}CollectionAPI::*"],
    "there are no webhooks": [f"{_API}WebhookApi::*"],
    "histories are not rewritten": ["test_*.py::*squash*"],
    "a branch hides no tag of its name": [f"{_API}HfApiBranchEndpoint::test_create_branch_existing_tag_does_not_fail"],
    "large files stay in the history": [f"{_API}ListAndPermanentlyDeleteLFSFiles::*"],
    "nobody can like a repository": [f"{_API}ActivityApi::*like*"],
    "access is by token, and never gated by requests": [
        *(f"{_API}AccessRequestAPI::*", f"{_API}HfApiAuthCheck::test_auth_check_gated_repo"),
        *(f"{_API}HfApiEndpoints::test_update_{kind}repo_settings" for kind in ("", "dataset_")),
        "test_file_download.py::TestStagingDownload::test_download_from_a_gated_repo_with_hf_hub_download",
    ],
    "there is one user, and no organisation": [
        f"{_API}HfApiEndpoints::test_whoami_with_passing_token",
        f"{_API}CommitApi::test_create_repo_already_exists_but_no_write_permission*",
        f"{_API}CommitApi::test_create_repo_private_by_default",
        f"{_API}CommitApi::test_create_commit_create_pr_on_foreign_repo",
    ],
    "ids are case-sensitive": [f"{_API}CommitApi::test_create_commit_repo_id_case_insensitive"],
    "a path with a backslash is refused with 400, not 422": [
        *(
            f"{_API}CommitApi::test_create_file_with_relative_path",
            "test_file_download.py::TestHfHubDownloadRelativePaths::*",
        )
    ],
    "the whole text of a refusal is compared, and ours says which repository": [
        f"{_API}CommitApi::test_create_commit_repo_does_not_exist"
    ],
    "the sdist lacks the files that it reads": [
        *(f"{_CARD}RepoCard::test_{name}" for name in _OF_CARDS.split()),
        *(f"{_CARD}ModelCard::test_{name}" for name in _OF_MODEL_CARDS.split()),
        *(
            f"{_CARD}DatasetCard::test_{name}"
            for name in ("load_datasetcard_from_file", "dataset_card_from_custom_template")
        ),
    ],
    "needs a plugin of pytest for async functions, and no server": ["test_utils_http.py::test_raise_on_status_async*"],
    "compares addresses with those of the public Hub": ["test_utils_http.py::test_fix_hf_endpoint_in_url*-None-*"],
}
# These compare seconds to a tenth, and a busy machine is late.
_WAITS = [f"test_utils_http.py::TestHttpBackoff::test_backoff_{name}" for name in ("sleep_time", "on_429_*")]
UNSURE = dict.fromkeys(_WAITS, "measures how long it waited")
# These ask a site on the internet, and pass or fail with it.
ONLINE = [
    "test_hf_api.py::TestHfApiInferenceCatalog::test_list_inference_catalog",
    "test_utils_http.py::test_client_get_request",
    "test_utils_http.py::test_async_client_get_request",
    "test_utils_pagination.py::TestPagination::test_paginate_hf_api",
]


def fetch_tests(folder: Path) -> None:
    """Get the tests of the installed huggingface_hub from its sdist, and the plugin that they need."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    sdist = ["download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(folder)]
    plugin = ["install", "-q", "--no-deps", "--target", str(folder / "plugin"), "pytest-mock"]
    for words in ([*sdist, f"huggingface_hub=={version('huggingface_hub')}"], plugin):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip()[-300:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (source,) = folder.glob("huggingface_hub-*/tests")
    shutil.copytree(source, folder / "tests")
    shutil.copy(source.parent / "pyproject.toml", folder)
    (folder / "tests" / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("client_suite_conftest.py"), folder / "tests" / "conftest.py")


@pytest.mark.slow
def test_the_tests_of_huggingface_hub_pass(tmp_path: Path) -> None:
    fetch_tests(tmp_path)
    failing = {pattern: reason for reason, patterns in FAILING.items() for pattern in patterns}
    (tmp_path / "lists.json").write_text(json.dumps({"failing": failing, "unsure": UNSURE, "online": ONLINE}))
    with EmbeddedHub(tmp_path / "hub", token=TOKEN) as hub:
        constants = tmp_path / "tests" / "testing_constants.py"
        changed = {"USER": "local", "FULL_NAME": "local", "TOKEN": TOKEN, "ENDPOINT_STAGING": hub.url}
        lines = [constants.read_text(), *(f"{name} = {value!r}" for name, value in changed.items())]
        constants.write_text("\n".join(lines) + "\n")
        environment = client_environment(hub.url, tmp_path / "home") | {
            "CLIENT_SUITE_LISTS": str(tmp_path / "lists.json"),
            "PYTHONPATH": str(tmp_path / "plugin"),
            "HF_TOKEN": "",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
        command += ["--junitxml", str(tmp_path / "results.xml"), *(f"tests/{name}" for name in FILES)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
            stdin=subprocess.DEVNULL,
        )
        assert find_damage(hub.store) == []
    cases = list(ElementTree.parse(tmp_path / "results.xml").iter("testcase"))
    counts = Counter(next((child.tag for child in case if child.tag != "system-out"), "passed") for case in cases)
    told = [line for line in done.stdout.splitlines() if re.match("(FAILED|ERROR) ", line)]
    assert done.returncode == 0, "\n".join([*told, done.stdout[-5000:], done.stderr[-2000:]])
    # 2.4.0 has 557; fewer would mean that they were not found.
    assert counts["passed"] > 550, counts
    assert not os.listdir(tmp_path / "hub" / "incoming")
