"""The app against outsiders: names, other sites, routes of gradio, files, bodies, pictures, sounds, and who leaves."""

import http.client
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
import soundfile
import torch
from gradio.context import LocalContext
from gradio.utils import get_upload_folder
from PIL import Image

from hf_ext import app_work as work
from hf_ext.answers.limits import ClientLeft, Limits, read_piece, read_sound
from hf_ext.app import describe_sound
from tests.app.test_app import DIGITS, ask, call, join, make_dit, serve, upload
from tests.kit.pictures import SENT
from tests.kit.refusals import refused


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The address of the app with small limits and one more name."""
    model = make_dit(tmp_path_factory.mktemp("attacked") / "dit")
    with serve(model, "--megapixels", "0.05", "--seconds", "60", "--gigabytes", "1") as served:
        yield served


def send(address: str, raw: bytes) -> int:
    """The status of an answer to raw bytes; 0 if the connection is closed without one."""
    host, _, port = address.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(raw)
        answer = connection.recv(1000)
    return int(answer.split()[1]) if answer else 0


# The rules of names are those of the embedded Hub, whose tests have more.
HOSTS = [("LOCALHOST", 200), ("lab:1", 200), ("evil.example:7860", 403), ("", 403), ("evil@127.0.0.1", 403)]
HEADERS = [
    ({"X-Forwarded-Host": "evil.example"}, 403), ({"X-Forwarded-Host": "evil.example, 127.0.0.1"}, 403),
    ({"X-Forwarded-Host": "lab"}, 200), ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
    ({"Origin": "http://localhost:1"}, 403), ({"Origin": "file://"}, 403), ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "script"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, 200),
    ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, 200),
]  # fmt: skip


PATHS = ["config", "gradio_api/heartbeat/x", "gradio_api/queue/data?session_hash=x"]
# An accepted stream has no end: those are asked for by the refused headers alone.
VISITS = [(path, *row) for path in PATHS for row in HEADERS if path == "config" or row[1] != 200]
VISITS += [("config", {"Host": host}, status) for host, status in HOSTS]


@pytest.mark.parametrize(("path", "headers", "status"), VISITS)
def test_names_and_pages_of_other_sites(address, path, headers, status):
    assert ask(f"{address}/{path}", **headers)[0] == status


def test_requests_that_name_another_server(address):
    absolute = "GET http://{}/config HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"
    own = address.rpartition("/")[2]
    upgrade = f"GET /gradio_api/queue/join HTTP/1.1\r\nHost: {own}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    for raw, refusals in (
        (absolute.format("evil.example", own), (400, 403, 404)),
        (absolute.format(own, "evil.example"), (400, 403, 404)),
        (f"GET /config HTTP/1.1\r\nHost: {own}\r\nHost: evil\r\n\r\n", (400, 403)),
        ("GET /config HTTP/1.0\r\n\r\n", (400, 403)),
        (upgrade + key, (400, 403, 404, 405, 426)),
    ):
        assert send(address, raw.encode()) in refusals, raw


ROUTES = [
    "gradio_api/proxy=http://127.0.0.1:1/x", "gradio_api/run/run", "gradio_api/api/run", "gradio_api/vibe-edit",
    "gradio_api/process_recording", "gradio_api/vibe-code", "gradio_api/run-history/buckets", "gradio_api/token",
    "gradio_api/deep_link?session_hash=a", "gradio_api/dev/reload", "gradio_api/component_server", "monitoring",
    "monitoring/summary", "custom_component/a/client/component/index.js", "runs", "gradio_api/file/etc/passwd",
    "gradio_api/run/run/", "gradio_api/%72un/run", "gradio_api/profiling/traces",
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", [None, b'{"data": []}'])
def test_routes_that_the_page_does_not_need(address, path, body):
    # What has a queue is not run beside it, and nothing is read there.
    assert ask(f"{address}/{path}", body, Content_Type="application/json")[0] in (404, 405)


FILES = [
    "/etc/passwd", "../../../../etc/passwd", "//etc/passwd", "%2fetc%2fpasswd", "{alias}/../../etc/passwd",
    "{alias}/%2e%2e/%2e%2e/etc/passwd", "{alias}//etc/passwd", "{alias}", "http://127.0.0.1:1/", "HTTPS://evil.example/",
    "file:///etc/passwd", "{folder}/x", "pyproject.toml", "/proc/self/environ", "{alias}/none.png", "%00", "",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files(address, photo, name):
    alias = upload(address, photo).rpartition("/")[0].rpartition("/")[0]
    path = name.format(alias=alias, folder=get_upload_folder())
    status, body = ask(f"{address}/gradio_api/file={path}")
    assert status in (403, 404) and b"root:" not in body
    assert get_upload_folder().encode() not in body and str(Path.cwd()).encode() not in body


def test_a_name_of_an_upload_leads_nowhere(address, photo):
    head = b'--XX\r\nContent-Disposition: form-data; name="files"; filename="../../../evil.png"\r\n\r\n'
    body = head + photo.read_bytes() + b"\r\n--XX--\r\n"
    status, told = ask(f"{address}/gradio_api/upload", body, Content_Type="multipart/form-data; boundary=XX")
    assert status == 200 and ".." not in json.loads(told)[0]
    assert not (Path(get_upload_folder()).parent / "evil.png").exists()


def restore(address: str, path: object, strength: object = 1.0, model: object = "denoise-color") -> bytes:
    """The events of a restoration of a file by its name on the server."""
    return call(address, model, {"path": path, "meta": {"_type": "gradio.FileData"}}, strength)


BODIES = [
    (b"{", 400), (b"[" * 100_000, 400), (b'{"data": [' + b" " * 5 * 2**20 + b"]}", 413),
    (b'{"data": ["denoise-color", {"path": "http://127.0.0.1:1/a.png", "meta": {"_type": "gradio.FileData"}}]}', 400),
    (b'{"data": [[{"a": {"path": "FTP\\u003a//evil/a.png"}}]]}', 400), (b"\xff\xfe", 400), (b"", 422),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status"), BODIES)
def test_bodies(address, body, status):
    try:
        found, text = ask(f"{address}/gradio_api/call/run", body, Content_Type="application/json")
    except (ConnectionError, http.client.HTTPException, OSError):
        # The server has closed the connection before all was sent.
        assert status == 413
        return
    assert found == status and str(Path.cwd()).encode() not in text


@pytest.mark.parametrize(
    "given", [("/etc/passwd", 1.0), (None, 1.0), ("", 1.0), (7, 1.0), ("a", 9e99), ("a", "b"), ("a", 1.0, "x" * 1000)]
)
def test_what_no_page_sends_ends_without_a_folder(address, given):
    found = restore(address, *given)
    assert b"event: error" in found
    assert get_upload_folder().encode() not in found and str(Path.cwd()).encode() not in found


@pytest.mark.parametrize("name", SENT)
def test_pictures_are_restored_or_refused_in_words(address, tmp_path, name):
    data, good = SENT[name]
    (tmp_path / "a.png").write_bytes(data)
    found = restore(address, upload(address, tmp_path / "a.png"))
    assert get_upload_folder().encode() not in found and str(tmp_path).encode() not in found
    if good:
        assert b"event: complete" in found and b" in " in found
    else:
        told = json.loads(found.rpartition(b"data: ")[2])
        assert len(told["error"]) > 20 and told["title"] == "Not done"


@pytest.mark.parametrize(
    ("rate", "samples", "said"),
    [(1, 100, "samples a second"), (2**31 - 1, 100, "samples a second"), (8000, 0, "no samples")],
)
def test_headers_of_sounds(tmp_path, rate, samples, said):
    head, data = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate * 2 % 2**32, 2, 16), b"\0\0" * samples
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    with refused(ValueError, said):
        list(work.hear_file(DIGITS, str(tmp_path / "a.wav")))
    with refused(ValueError, said):
        read_piece(str(tmp_path / "a.wav"), Limits())


def test_a_sound_that_is_long_when_unpacked_is_measured_first_and_one_of_no_numbers_is_silence(tmp_path):
    """A FLAC of silence; in pieces it is heard, at once it is refused."""
    soundfile.write(tmp_path / "a.flac", np.zeros((2_000_000, 2), np.int16), 8000)
    assert (tmp_path / "a.flac").stat().st_size < 100_000
    with refused(ValueError, "0.02 GB"):
        read_sound(str(tmp_path / "a.flac"), 8000, Limits(gigabytes=0.02))
    assert list(work.hear_file(DIGITS, str(tmp_path / "a.flac"), Limits(gigabytes=0.02)))[-1] == []
    # Numbers that are none are silence.
    sound = np.full(8000, np.nan, np.float32)
    sound[::7] = np.inf
    soundfile.write(tmp_path / "a.wav", sound, 8000, subtype="FLOAT")
    *_, words = work.hear_file(DIGITS, str(tmp_path / "a.wav"))
    assert words == [] and "no word" in describe_sound("x", len(words), 1.0, 0.1)


def test_more_requests_than_may_wait_are_refused(address):
    """They wait for the first ones; the others are short, for later tests wait for them."""
    bodies = [json.dumps({"data": ["dit", "cat", 1, 0, 0, False, steps, 3, 0]}).encode() for steps in (100, 1)]
    found = [
        ask(f"{address}/gradio_api/call/run_1", bodies[number > 2], Content_Type="application/json")[0]
        for number in range(60)
    ]
    assert set(found) == {200, 503} and found.count(200) < 60


def test_the_work_of_a_client_that_leaves_ends():
    event = SimpleNamespace(alive=True, closed=False)
    blocks = SimpleNamespace(_queue=SimpleNamespace(event_ids_to_events={"e": event}))
    set_before = LocalContext.blocks.set(blocks), LocalContext.event_id.set("e")
    try:
        clock, steps = Limits().clock(work.find_left()), 0
        with pytest.raises(ClientLeft), clock:
            while steps < 100:
                torch.ones(1)
                steps += 1
                event.alive = steps < 3
        assert steps == 3
        event.alive = True
        with refused(gr.Error, "disconnected"):
            event.closed = True
            work.told(lambda: None, clock=Limits().clock(work.find_left()))
    finally:
        LocalContext.blocks.reset(set_before[0])
        LocalContext.event_id.reset(set_before[1])
    assert not work.find_left()()


@pytest.mark.slow
def test_a_connection_that_closes_ends_the_work(address, tmp_path):
    """The next restoration does not wait for the drawing of the client that left."""
    for _ in range(3):
        # The requests of the test before, for which nobody waits, may fill the queue.
        answer = join(address, "run_1", "cifar10", "horse", 1, 0, 0, False, 100, 3, 0)
        host, _, port = address.rpartition("/")[2].partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", answer)
        time.sleep(0.5)
        connection.close()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    begun = time.monotonic()
    assert b"event: complete" in restore(address, upload(address, tmp_path / "a.png"))
    assert time.monotonic() - begun < 60
