"""open_checkpoint over HTTP: exact ranges, one commit, the cache, cut connections, redirects without the token."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import pytest
import torch
from huggingface_hub import close_session, constants, hf_hub_download
from safetensors.torch import save_file

from hf_ext.hub import range_readers
from hf_ext.hub.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from hf_ext.hub.range_readers import RemoteFile
from tests.kit.refusals import refused

from .checkpoint_files import assert_same, sharded, some_tensors
from .misbehaving_hub import COMMIT, MisbehavingHub

OTHER_COMMIT = "f" * 40


@pytest.fixture
def hub(hub_cache, monkeypatch) -> Iterator[MisbehavingHub]:
    monkeypatch.setattr(range_readers, "_FIRST_WAIT_SECONDS", 0.01)
    hub = MisbehavingHub()
    yield hub
    close_session()
    hub.stop()


@pytest.fixture
def tensors(hub, tmp_path) -> dict[str, torch.Tensor]:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    hub.files["model.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
    hub.files["config.json"] = b"{}"
    return tensors


def remote(hub: MisbehavingHub, source: str = "org/name", **options: object) -> Checkpoint:
    return open_checkpoint(source, endpoint=hub.url, **({"token": False} | options))


def test_remote_tensors_are_read_by_exact_ranges_at_the_resolved_commit(hub, tensors):
    header = struct.unpack("<Q", hub.files["model.safetensors"][:8])[0]
    with remote(hub, "org/name@main") as checkpoint:
        assert checkpoint.commit == COMMIT
        assert hub.ranges() == [("model.safetensors", "bytes=0-7"), ("model.safetensors", f"bytes=8-{7 + header}")]
        offset = checkpoint.info("single").offset
        checkpoint["single"]
        assert hub.ranges()[-1][1] == f"bytes={offset}-{offset + 95}"
        checkpoint.read_into("single", 5, 7, torch.empty(2))
        assert hub.ranges()[-1][1] == f"bytes={offset + 20}-{offset + 27}"
        assert checkpoint.bytes_read == 8 + header + 96 + 8
        assert_same(checkpoint, tensors)
    assert all(COMMIT in path for path, asked, _ in hub.requests if asked)


def test_remote_shards(hub, tmp_path):
    (tmp_path / "shards").mkdir()
    expected = sharded(tmp_path / "shards")
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    with remote(hub) as checkpoint:
        assert_same(checkpoint, expected)
        whole = sum(len(content) for content in hub.files.values())
        assert checkpoint.bytes_read == whole
    del hub.files["model-00002-of-00003.safetensors"]
    with refused(CheckpointError, "model-00002-of-00003.safetensors"):
        remote(hub)


def test_remote_pickles_and_unknown_repositories(hub):
    hub.files["pytorch_model.bin"] = b"x"
    with refused(CheckpointError, "org/name@0123456789ab", "pytorch_model.bin"):
        remote(hub)
    with refused(CheckpointError, "org/absent@main"):
        remote(hub, "org/absent")
    assert hub.ranges() == []


def test_a_cached_file_is_not_fetched_again_and_serves_offline(hub, tensors, request):
    cache = constants.HF_HUB_CACHE
    hf_hub_download("org/name", "model.safetensors", endpoint=hub.url, token=False, cache_dir=cache)
    for is_offline in (False, True):
        hub.requests.clear()
        if is_offline:
            request.getfixturevalue("offline")
        with remote(hub) as checkpoint:
            assert_same(checkpoint, tensors)
            assert checkpoint.commit == COMMIT
        assert hub.ranges() == [] and (hub.requests == []) == is_offline
    for absent in ("org/other", f"org/name@{OTHER_COMMIT}"):
        with refused(CheckpointError, "reached", "cache"):
            remote(hub, absent)


def test_a_hub_that_cannot_be_reached(hub):
    gone = MisbehavingHub()
    gone.stop()
    with refused(CheckpointError, "reached"):
        remote(gone)


def test_a_connection_cut_in_the_middle_resumes_at_the_byte_reached(hub, tensors):
    with remote(hub) as checkpoint:
        start = checkpoint.info("double").offset
        keeps = [50, 0, 30, None]
        hub.resolve = lambda handler, name: handler.send_file(name, keep=keeps.pop(0))
        hub.requests.clear()
        assert checkpoint["double"].equal(tensors["double"])
        assert [asked for _, asked in hub.ranges()] == [f"bytes={start + n}-{start + 119}" for n in (0, 50, 50, 80)]
        # Not for ever.
        hub.resolve = lambda handler, name: handler.send_file(name, keep=1)
        hub.requests.clear()
        with refused(CheckpointError, "name@0123456789ab/model.safetensors", "120 bytes"):
            checkpoint["double"]
        assert len(hub.requests) == 5


def test_a_busy_hub_is_asked_again(hub, tensors):
    answers = [503, 429, None]

    def resolve(handler, name):
        status = answers.pop(0) if answers else None
        handler.send_file(name) if status is None else handler.send(status, b"", {})

    with remote(hub) as checkpoint:
        hub.resolve = resolve
        assert checkpoint["double"].equal(tensors["double"])
    assert answers == []


MISBEHAVIOUR = {
    "commit moved": ({"X_Repo_Commit": OTHER_COMMIT}, f"answered for commit {OTHER_COMMIT}; open the checkpoint"),
    "no commit": ({"X_Repo_Commit": None}, "answered for commit None"),
    "etag moved": ({"ETag": '"new"'}, "the file changed"),
    "linked etag moved": ({"X_Linked_Etag": '"new"'}, "the file changed"),
    "no etag": ({"ETag": None}, "now it is None"),
    "other range": ({"Content_Range": "bytes 0-119/9999"}, "Content-Range is 'bytes 0-119/9999'"),
    "no range": ({"Content_Range": None}, "Content-Range is None"),
    "range ignored": ({"status": 200}, "HTTP 200 instead of 206"),
    "vanished": ({"status": 404}, "no such file at this commit"),
    "no access": ({"status": 401}, "pass a token that may read"),
    "teapot": ({"status": 418}, "answered HTTP 418"),
    "redirected for ever": ({"status": 302, "Location": "model.safetensors"}, "5 redirects"),
    "redirected to a file": ({"status": 302, "Location": "file:///etc/passwd"}, "redirects .*file"),
}


@pytest.mark.parametrize("case", MISBEHAVIOUR)
def test_what_a_hub_may_not_answer(hub, tensors, case):
    changes, message = MISBEHAVIOUR[case]
    with remote(hub) as checkpoint:
        hub.resolve = lambda handler, name: handler.send_file(name, **changes)
        hub.requests.clear()
        with pytest.raises(CheckpointError, match=rf"^org/name@0123456789ab/model\.safetensors: .*{message}"):
            checkpoint["double"]
        assert len(hub.requests) == 1 or case == "redirected for ever"


def test_more_bytes_than_asked_for(hub, tensors):
    def resolve(handler, name):
        start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"]).groups())
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
        headers["Content-Range"] = f"bytes {start}-{stop}/{len(hub.files[name])}"
        handler.send(206, hub.files[name][start : stop + 2], headers)

    with remote(hub) as checkpoint:
        hub.resolve = resolve
        with refused(CheckpointError, "120 bytes"):
            checkpoint["double"]


def test_a_server_without_ranges_can_still_give_a_whole_file(hub, tensors):
    size = len(hub.files["model.safetensors"])
    file = RemoteFile("org/name", "model.safetensors", COMMIT, size, False, hub.url)
    hub.resolve = lambda handler, name: handler.send_file(name, status=200)
    buffer = bytearray(size)
    file.read_into(memoryview(buffer), 0)
    assert bytes(buffer) == hub.files["model.safetensors"]


@pytest.fixture
def storage(hub) -> Iterator[MisbehavingHub]:
    """Another server, to which the Hub redirects; it serves the same files and is no Hub itself."""
    storage = MisbehavingHub()
    storage.files = hub.files
    storage.resolve = lambda handler, name: handler.send_file(name, X_Repo_Commit=None, ETag='"storage"')
    yield storage
    close_session()
    storage.stop()


def redirect_to(location: str):
    def resolve(handler, name):
        handler.send(302, b"", {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Location": location + handler.path})

    return resolve


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_token_never_follows_a_redirect_to_another_origin(hub, storage, tensors, host):
    hub.resolve = redirect_to(f"http://{host}:{storage.server.server_port}")
    with remote(hub, token="hf_secret") as checkpoint:
        assert_same(checkpoint, tensors)
    assert {authorization for _, _, authorization in hub.requests} == {"Bearer hf_secret"}
    assert storage.requests and {authorization for _, _, authorization in storage.requests} == {None}


def test_the_token_does_not_come_back_after_it_was_dropped(hub, storage, tensors):
    storage.resolve = redirect_to(f"{hub.url}/elsewhere")
    hub.resolve = redirect_to(storage.url)
    with refused(CheckpointError, "commit", "file"):
        remote(hub, token="hf_secret")
    path, _, authorization = hub.requests[-1]
    assert path.startswith("/elsewhere") and authorization is None


def test_a_redirect_within_the_hub_keeps_the_token(hub, tensors):
    def resolve(handler, name):
        if "moved" in handler.path:
            handler.send_file(name)
        else:
            handler.send(307, b"", {"Location": f"/org/name/resolve/moved/{name}"})

    hub.resolve = resolve
    with remote(hub, token="hf_secret") as checkpoint:
        assert_same(checkpoint, tensors)
    moved = [authorization for path, _, authorization in hub.requests if "moved" in path]
    assert moved and set(moved) == {"Bearer hf_secret"}


def test_a_redirect_from_https_to_http_is_refused():
    file = RemoteFile("org/name", "model.safetensors", COMMIT, 8, "hf_secret", "https://hub.example")
    with refused(CheckpointError, "redirects", "http"):
        file.headers_for("http://hub.example/x", "https://hub.example/x", {"authorization": "Bearer hf_secret"})
