"""open_checkpoint over HTTP: exact ranges, one commit, the cache, cut connections, redirects without the token."""

import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
from huggingface_hub import HfApi, close_session, constants, hf_hub_download, set_client_factory
from huggingface_hub.utils._http import default_client_factory
from safetensors.torch import save, save_file

from hf_ext.hub import diffusers_folders, range_readers
from hf_ext.hub.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from hf_ext.hub.diffusers_folders import read_headers, read_remote_headers
from hf_ext.hub.range_readers import RemoteFile
from tests.kit.hub import ask, commit_body, commit_large, create_repository
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .checkpoint_files import assert_same, sharded, some_tensors
from .published import contents
from .unfaithful_hub import Reply, UnfaithfulHub

OTHER_COMMIT = "f" * 40
WEIGHTS = "model.safetensors"


class Served(NamedTuple):
    """A model on an embedded Hub, behind a proxy that a test can tell to cut, redirect, lie or forget."""

    proxy: UnfaithfulHub
    commit: str
    content: bytes
    tensors: dict[str, torch.Tensor]

    def open(self, source: str = "me/model", **options: Any) -> Checkpoint:
        return open_checkpoint(source, endpoint=self.proxy.url, **({"token": False} | options))

    def ranges(self) -> list[str]:
        """The ranges of the weights that were asked for."""
        return [one.range for one in self.proxy.asked if one.range and one.path.endswith(WEIGHTS)]

    def change(self, answer: Callable[[Reply], Reply | None]) -> None:
        """Changes the answers to requests for files, from now on."""
        self.proxy.asked.clear()
        self.proxy.rule = lambda method, path, body, forward: (
            answer(forward(body)) if "/resolve/" in path else forward(body)
        )


@pytest.fixture
def served(hub, hub_cache, tmp_path, monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr(range_readers, "_FIRST_WAIT_SECONDS", 0.01)
    tensors = some_tensors()
    save_file(tensors, tmp_path / WEIGHTS)
    content = (tmp_path / WEIGHTS).read_bytes()
    create_repository(hub.url, "me/model")
    commit = commit_large(hub.url, {WEIGHTS: content})
    proxy = UnfaithfulHub(hub.url)
    yield Served(proxy, commit, content, tensors)
    close_session()
    proxy.stop()


def with_headers(**changes: str | None) -> Callable[[Reply], Reply]:
    """An answer with some headers changed or left out."""

    def change(reply: Reply) -> Reply:
        headers = {key.lower(): value for key, value in reply.headers.items()}
        headers |= {key.lower().replace("_", "-"): value for key, value in changes.items()}
        return reply._replace(headers={key: value for key, value in headers.items() if value is not None})

    return change


def test_remote_tensors_are_read_by_exact_ranges_at_the_resolved_commit(served):
    header = struct.unpack("<Q", served.content[:8])[0]
    with served.open("me/model@main") as checkpoint:
        assert checkpoint.commit == served.commit
        assert served.ranges() == ["bytes=0-7", f"bytes=8-{7 + header}"]
        offset = checkpoint.info("single").offset
        checkpoint["single"]
        assert served.ranges()[-1] == f"bytes={offset}-{offset + 95}"
        checkpoint.read_into("single", 5, 7, torch.empty(2))
        assert served.ranges()[-1] == f"bytes={offset + 20}-{offset + 27}"
        assert checkpoint.bytes_read == 8 + header + 96 + 8
        assert_same(checkpoint, served.tensors)
    assert all(served.commit in one.path for one in served.proxy.asked if one.range)


def test_remote_pickles_shards_and_unknown_repositories(served, tmp_path, hub, api):
    api.delete_file(WEIGHTS, "me/model")
    commit = commit_large(hub.url, {"pytorch_model.bin": b"x"})
    with refused(CheckpointError, f"me/model@{commit[:12]}", "pytorch_model.bin"):
        served.open()
    with refused(CheckpointError, "me/absent@main"):
        served.open("me/absent")
    assert not [one for one in served.proxy.asked if one.range]
    (tmp_path / "shards").mkdir()
    expected = sharded(tmp_path / "shards")
    files = contents(tmp_path / "shards")
    commit_large(hub.url, files)
    with served.open() as checkpoint:
        assert_same(checkpoint, expected)
        assert checkpoint.bytes_read == sum(map(len, files.values()))
    api.delete_file("model-00002-of-00003.safetensors", "me/model")
    with refused(CheckpointError, "model-00002-of-00003.safetensors"):
        served.open()


def test_the_parts_of_a_pipeline_are_counted_alike_in_a_folder_and_on_a_hub(hub, hub_cache, tmp_path, monkeypatch):
    """Parts whose files have the same name are two files, and a variant beside the plain weights is left out."""
    parts = {"unet": ["diffusers", "A"], "vae": ["diffusers", "B"], "scheduler": ["diffusers", "C"]}
    parts |= {"checker": [None, None], "sizes": [8, 8]}
    files = {"model_index.json": json.dumps(parts).encode(), "scheduler/scheduler_config.json": b"{}"}
    files |= dict.fromkeys(("unet/config.json", "vae/config.json"), b"{}")
    for name in ("unet/diffusion_pytorch_model", "unet/diffusion_pytorch_model.fp16", "vae/diffusion_pytorch_model"):
        files[f"{name}.safetensors"] = save({"w": torch.ones(2)})
    write_files(tmp_path / "pipeline", files)
    create_repository(hub.url, "me/pipeline")
    assert ask(hub.url, "POST", "/api/models/me/pipeline/commit/main", commit_body(files)).status == 200
    monkeypatch.setattr(diffusers_folders, "HfApi", lambda: HfApi(endpoint=hub.url, token=False))
    tensors = read_headers(tmp_path / "pipeline")
    assert [one.file for one in tensors] == [f"{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae")]
    assert read_remote_headers("me/pipeline")[0] == tensors
    # Of a cache that lacks a part, no sum is told.
    cached = [*(name for name in files if "fp16" not in name)]
    for number, name in enumerate(cached, 1):
        hf_hub_download("me/pipeline", name, endpoint=hub.url, token=False, cache_dir=constants.HF_HUB_CACHE)
        with monkeypatch.context() as offline:
            offline.setattr(constants, "HF_HUB_OFFLINE", True)
            close_session()
            found = read_remote_headers("me/pipeline")
        close_session()
        assert (found is None) == (number < len(cached)) and (found is None or found[0] == tensors)


def test_a_cached_file_is_not_fetched_again_and_serves_offline(served, request):
    cache = constants.HF_HUB_CACHE
    hf_hub_download("me/model", WEIGHTS, endpoint=served.proxy.url, token=False, cache_dir=cache)
    for is_offline in (False, True):
        served.proxy.asked.clear()
        if is_offline:
            request.getfixturevalue("offline")
        with served.open() as checkpoint:
            assert_same(checkpoint, served.tensors)
            assert checkpoint.commit == served.commit
        assert served.ranges() == [] and (served.proxy.asked == []) == is_offline
    for absent in ("me/other", f"me/model@{OTHER_COMMIT}"):
        with refused(CheckpointError, "reached", "cache"):
            served.open(absent)


def test_a_connection_cut_in_the_middle_resumes_at_the_byte_reached(served):
    with served.open() as checkpoint:
        start = checkpoint.info("double").offset
        keeps = [50, 0, 30, None]
        served.change(lambda reply: reply._replace(sent=keeps.pop(0)))
        assert checkpoint["double"].equal(served.tensors["double"])
        assert served.ranges() == [f"bytes={start + n}-{start + 119}" for n in (0, 50, 50, 80)]
        # A busy Hub is asked again too, and neither for ever.
        answers = [503, 429]
        served.change(lambda reply: Reply(answers.pop(), b"") if answers else reply)
        assert checkpoint["double"].equal(served.tensors["double"]) and answers == []
        served.change(lambda reply: reply._replace(sent=1))
        with refused(CheckpointError, f"model@{served.commit[:12]}/model.safetensors", "120 bytes"):
            checkpoint["double"]
        assert len(served.ranges()) == 5
    # One that is gone.
    close_session()
    served.proxy.stop()
    with refused(CheckpointError, "reached"):
        served.open()


MISBEHAVIOUR: dict[str, tuple[Callable[[Reply], Reply], str]] = {
    "commit moved": (with_headers(X_Repo_Commit=OTHER_COMMIT), f"answered for commit {OTHER_COMMIT}; open the check"),
    "no commit": (with_headers(X_Repo_Commit=None), "answered for commit None"),
    "etag moved": (with_headers(X_Linked_Etag=None, ETag='"new"'), "the file changed"),
    "linked etag moved": (with_headers(X_Linked_Etag='"new"'), "the file changed"),
    "no etag": (with_headers(ETag=None, X_Linked_Etag=None), "now it is None"),
    "other range": (with_headers(Content_Range="bytes 0-119/9999"), "Content-Range is 'bytes 0-119/9999'"),
    "no range": (with_headers(Content_Range=None), "Content-Range is None"),
    "range ignored": (lambda reply: reply._replace(status=200), "HTTP 200 instead of 206"),
    "vanished": (lambda reply: reply._replace(status=404), "no such file at this commit"),
    "no access": (lambda reply: reply._replace(status=401), "pass a token that may read"),
    "teapot": (lambda reply: reply._replace(status=418), "answered HTTP 418"),
    "more bytes": (lambda reply: reply._replace(body=reply.body + b"x"), "more than the 120 bytes"),
    "redirected for ever": (lambda reply: Reply(302, b"", {"Location": WEIGHTS}), "the Hub redirects"),
    "redirected to a file": (lambda reply: Reply(302, b"", {"Location": "file:///etc/passwd"}), "the Hub redirects"),
}


@pytest.mark.parametrize("case", MISBEHAVIOUR)
def test_what_a_hub_may_not_answer(served, case):
    change, message = MISBEHAVIOUR[case]
    with served.open() as checkpoint:
        served.change(change)
        with pytest.raises(CheckpointError, match=rf"^me/model@{served.commit[:12]}/{WEIGHTS}: .*{message}"):
            checkpoint["double"]
        assert len(served.proxy.asked) == 1 or case == "redirected for ever"


def test_a_server_without_ranges_can_still_give_a_whole_file(served):
    buffer = bytearray(len(served.content))
    file = RemoteFile(HfApi(served.proxy.url, token=False), "me/model", WEIGHTS, served.commit, len(buffer))
    served.change(lambda reply: reply._replace(status=200))
    file.read_into(memoryview(buffer), 0)
    assert bytes(buffer) == served.content


def redirect_to(url: str):
    """A rule that sends who asks for a file to the same path of another server."""

    def rule(method, path, body, forward):
        reply = forward(body)
        return Reply(302, b"", reply.headers | {"Location": url + path}) if "/resolve/" in path else reply

    return rule


def test_the_token_never_follows_a_redirect_to_another_origin(served):
    # Another server, to which the Hub redirects; it serves the same files and is no Hub itself.
    storage = UnfaithfulHub(f"http://{served.proxy.address}")
    as_storage = with_headers(X_Repo_Commit=None, ETag='"storage"')
    storage.rule = lambda method, path, body, forward: as_storage(forward(body))
    for host in ("127.0.0.1", "localhost"):
        storage.asked.clear()
        served.proxy.rule = redirect_to(f"http://{host}:{storage.server.server_port}")
        with served.open(token="hf_secret") as checkpoint:
            assert_same(checkpoint, served.tensors)
        assert {one.token for one in served.proxy.asked} == {"Bearer hf_secret"}
        assert {one.token for one in storage.asked} == {None}
    # Nor does it come back after it was dropped.
    storage.rule = redirect_to(f"{served.proxy.url}/elsewhere")
    with refused(CheckpointError, WEIGHTS):
        served.open(token="hf_secret")
    last = served.proxy.asked[-1]
    assert "/elsewhere" in last.path and last.token is None
    close_session()
    storage.stop()


def test_a_redirect_within_the_hub_keeps_the_token(served):
    moved = re.compile(r"/resolve/[^?]*$")
    served.proxy.rule = lambda method, path, body, forward: (
        Reply(307, b"", {"Location": f"{path}?moved"}) if moved.search(path) else forward(body)
    )
    with served.open(token="hf_secret") as checkpoint:
        assert_same(checkpoint, served.tensors)
    assert {one.token for one in served.proxy.asked if one.path.endswith("?moved")} == {"Bearer hf_secret"}


def test_a_redirect_from_https_to_http_is_refused(monkeypatch):
    asked: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        location = {"Location": "http://hub.example/x"}
        return httpx2.Response(206, content=b"x" * 8) if len(asked) > 1 else httpx2.Response(302, headers=location)

    set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(answer)))
    try:
        file = RemoteFile(HfApi("https://hub.example", token="hf_secret"), "me/model", WEIGHTS, "0" * 40, 8)
        with refused(CheckpointError, "redirects", "https"):
            file.read_into(memoryview(bytearray(8)), 0)
    finally:
        set_client_factory(default_client_factory)
    assert [re.sub("hf_.*", "", request.headers.get("Authorization", "")) for request in asked] == ["Bearer ", ""]
