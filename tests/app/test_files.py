"""The files of the app: whose they are, when they go, and how much they may take."""

import asyncio
import hashlib
import http.client
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from hf_ext import app_files
from hf_ext.app_files import Files
from hf_ext.app_guard import Guard
from tests.app.test_app import ask, call, serve, upload

SIZE = 2 * 2**20


def put(folder: Path, name: str, idle: float = 0) -> tuple[Path, bytes]:
    """A file where gradio would write it, unused for some seconds, and a message that names it."""
    path = folder / hashlib.sha256(name.encode()).hexdigest() / name
    path.parent.mkdir()
    path.write_bytes(bytes(SIZE))
    os.utime(path.parent, (time.time() - idle,) * 2)
    return path, f'{{"session_hash": "page", "data": ["{path}"]}}'.encode()


def test_files_go_with_the_last_page_that_names_them(tmp_path):
    example, named = put(tmp_path, "example")
    files = Files(tmp_path)
    (one, first), (both, second) = put(tmp_path, "one"), put(tmp_path, "both")
    files.hold("a", named + first + second)
    files.hold("b", second)
    files.release("a")
    assert example.exists() and both.exists() and not one.exists()
    files.release("b")
    files.release("b")
    assert example.exists() and not both.exists()


def test_a_page_that_comes_back_soon_keeps_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(app_files, "LEFT", 0.05)
    files, (path, message) = Files(tmp_path), put(tmp_path, "a")

    async def visit() -> None:
        with files.keep_open("page"):
            files.hold("page", message)
        with files.keep_open("page"):
            await asyncio.sleep(0.2)
            assert path.exists()
        await asyncio.sleep(0.2)

    asyncio.run(visit())
    assert not path.exists()


def test_where_there_is_no_room_unused_files_go_first(tmp_path, monkeypatch):
    put(tmp_path, "example")
    files = Files(tmp_path)
    monkeypatch.setattr(app_files, "TOTAL", 3 * SIZE)
    old, older, new = (put(tmp_path, name, idle)[0] for name, idle in (("old", 100), ("older", 200), ("new", 0)))
    with files.reserve(SIZE // 2) as room:
        assert room and old.exists() and not older.exists()
        # What is under way counts.
        with files.reserve(SIZE) as room:
            assert room and not old.exists() and new.exists()
            with files.reserve(SIZE) as room:
                assert not room and new.exists()
    # A broken upload lies beside the folders.
    broken, coming = tmp_path / "tmpbroken", tmp_path / "tmpcoming"
    broken.write_bytes(b"a")
    coming.write_bytes(b"a")
    os.utime(broken, (time.time() - 100,) * 2)
    with files.reserve(1) as room:
        assert room and not broken.exists() and coming.exists()
    monkeypatch.setattr(app_files, "FREE", 2**60)
    with files.reserve(1) as room:
        assert not room and new.exists()


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    """Sends a request through the guard to an application that answers with JSON; gives the status."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(app_files, "LEFT", 0)
    guard = Guard(answer_json, [])

    def send(path: str, body: bytes | None = None, kind: str = "application/json", query: str = "") -> int:
        sent = []

        async def receive() -> dict:
            return {"type": "http.request", "body": (body or b"").replace(bytes(tmp_path), guard._alias)}

        async def remember(message: dict) -> None:
            sent.append(message)

        async def visit() -> None:
            headers = [(b"host", b"127.0.0.1"), (b"content-type", kind.encode())]
            scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": headers}
            await guard({**scope, "server": ("a", 1), "query_string": query.encode()}, receive, remember)
            await asyncio.sleep(0.05)

        asyncio.run(visit())
        return sent[0]["status"]

    return send


async def answer_json(scope, receive, send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    result = next(Path(os.environ["GRADIO_TEMP_DIR"]).glob("*/result"), "")
    body = b'{"event_id": "event"}' if "/call/" in scope["path"] else str(result).encode()
    await send({"type": "http.response.body", "body": body})


def test_the_files_of_a_page_go_when_it_closes(guarded, tmp_path):
    (sent, message), (result, _), (other, _) = (put(tmp_path, name) for name in ("sent", "result", "other"))
    assert guarded("/gradio_api/queue/join", message) == 200
    assert guarded("/gradio_api/queue/data", query="session_hash=page") == 200
    assert guarded("/gradio_api/heartbeat/another") == 200 and sent.exists() and result.exists()
    assert guarded("/gradio_api/heartbeat/page") == 200
    assert not sent.exists() and not result.exists() and other.exists()


def test_the_files_of_a_call_go_when_its_answer_is_read(guarded, tmp_path):
    sent, message = put(tmp_path, "sent")
    assert guarded("/gradio_api/call/run", message.replace(b"session_hash", b"x")) == 200 and sent.exists()
    assert guarded("/gradio_api/call/run/another") == 200 and sent.exists()
    assert guarded("/gradio_api/call/run/event") == 200 and not sent.exists()


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=XX"])
def test_what_has_no_room_is_refused(guarded, monkeypatch, kind):
    monkeypatch.setattr(app_files, "TOTAL", 1000)
    path = "/gradio_api/queue/join" if kind == "application/json" else "/gradio_api/upload"
    assert guarded(path, b"{}", kind) == 507
    assert guarded("/config") == 200


def test_the_app_has_a_folder_of_its_own_which_goes_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    Image.new("RGB", (12, 8)).save(tmp_path / "photo.png")
    with serve("--seconds", "60") as address:
        (folder,) = tmp_path.glob("hf-ext-app-*")
        examples = set(folder.iterdir())
        path = upload(address, tmp_path / "photo.png")
        (uploaded,) = set(folder.iterdir()) - examples
        done = call(address, "denoise-color", {"path": path, "meta": {"_type": "gradio.FileData"}}, 1.0)
        # The file goes after the last byte of the answer, which may be read before.
        end = time.monotonic() + 30
        while uploaded.exists() and time.monotonic() < end:
            time.sleep(0.1)
        assert b"event: complete" in done and not uploaded.exists() and examples < set(folder.iterdir())
    assert not folder.exists()


@pytest.mark.slow
def test_a_browser_that_leaves_takes_its_uploads_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    Image.new("RGB", (12, 8)).save(tmp_path / "photo.png")
    with serve("--seconds", "60") as address:
        (folder,) = tmp_path.glob("hf-ext-app-*")
        examples = set(folder.iterdir())
        host, _, port = address.rpartition("/")[2].partition(":")
        page = http.client.HTTPConnection(host, int(port), timeout=60)
        page.request("GET", "/gradio_api/heartbeat/page")
        page.getresponse().read(4)
        path = upload(address, tmp_path / "photo.png")
        data = f'{{"session_hash": "page", "fn_index": 1, "data": ["x", {{"path": "{path}"}}, 1.0]}}'.encode()
        ask(f"{address}/gradio_api/queue/join", data, Content_Type="application/json")
        (uploaded,) = set(folder.iterdir()) - examples
        page.close()
        end = time.monotonic() + 10 * app_files.LEFT
        while uploaded.exists() and time.monotonic() < end:
            time.sleep(0.5)
        assert not uploaded.exists()
