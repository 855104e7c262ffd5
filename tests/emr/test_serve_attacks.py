"""examples/emr/serve.py against outsiders: names, bodies that are no input, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the example needs fastapi")
pytest.importorskip("uvicorn", reason="the example needs uvicorn")

from hf_ext.answers.limits import ClientLeft, Clock, Limits, TookTooMuch  # noqa: E402
from hf_ext.answers.merged_task import AnsweringTask  # noqa: E402
from tests.emr.emr_testing import tiny_bert, tiny_gpt2, tiny_semanir  # noqa: E402
from tests.emr.test_serve_example import client, load  # noqa: E402
from tests.kit.pictures import claim, encode  # noqa: E402
from tests.kit.refusals import refused  # noqa: E402

# Names that a web page or a proxy may put into the header Host, and the answer.
HOSTS = [
    ("127.0.0.1", 200), ("127.0.0.1:8000", 200), ("LOCALHOST:8000", 200), ("lab", 200), ("[::1]", 200),
    ("evil.example", 403), ("evil.example:8000", 403), ("localhost.", 403), ("127.0.0.1.", 403), ("127.1", 403),
    ("127.0.0.1.evil.example", 403), ("evil.example, 127.0.0.1", 403), ("127.0.0.1, evil.example", 403),
    ("127.0.0.1@evil.example", 403), ("evil@127.0.0.1", 403), ("127.0.0.1:8000:1", 403), ("127.0.0.1:x", 403),
    ("[::ffff:127.0.0.1]", 403), ("[fd00::1]", 403), ("[::1]evil", 403), ("0.0.0.0", 403), ("", 403),
    ("http://127.0.0.1", 403), ("127.0.0.1/", 403), ("127.0.0.1 evil", 403), ("2130706433", 403), ("0x7f000001", 403),
]  # fmt: skip


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_names(example, host: str, status: int, shared_bert):
    assert client(example, shared_bert).get("/tasks", headers={"host": host}).status_code == status


@pytest.fixture(scope="module")
def shared_bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("bert"), tiny_bert)


@pytest.fixture(scope="module")
def shared_restorer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("semanir"), tiny_semanir)


WHITE = Image.new("L", (8, 8), 255)
GREY = np.zeros((9, 11), np.uint16)
PICTURES = [
    ("nine megapixels in few bytes", encode(Image.new("L", (3000, 3000)), compress_level=9), 400),
    ("a claim of 4 gigapixels", claim(65500, 65500), 400),
    ("a claim of no pixel", claim(0, 5), 400),
    ("a claim that the file does not hold", claim(100, 100), 400),
    ("one by 60,000", encode(Image.new("RGB", (1, 60000))), 400),
    ("an animation", encode(WHITE, "GIF", save_all=True, append_images=[Image.new("L", (8, 8))]), 400),
    ("16 bits", encode(Image.fromarray(GREY)), 200),
    ("CMYK", encode(Image.new("CMYK", (16, 12)), "JPEG"), 200),
    ("cut off", encode(Image.new("RGB", (64, 64), (9, 8, 7)), "BMP")[:900], 400),
    ("nothing", b"", 400),
    ("a page", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status"), [row[1:] for row in PICTURES], ids=[row[0] for row in PICTURES])
def test_pictures(example, shared_restorer, body: bytes, status: int, tmp_path: Path):
    answer = client(example, shared_restorer, megapixels=0.05).post("/restore/a", content=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert len(answer.json()["detail"]) > 20 and str(tmp_path.parent) not in answer.text


TEXTS = [
    ("/classify/a", b"a " * 500_000, 400), ("/classify/a", b"", 400), ("/classify/a", b"\xff\xfe", 400),
    ("/classify/a", b"\x00", 200), ("/classify/../a", b"a", 404), ("/restore/a", b"a", 400),
    ("/classify/%2e%2e%2fa", b"a", 404), ("/classify/a%00", b"a", 404), ("/generate/a?max_tokens=nan", b"a", 400),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status"), TEXTS)
def test_texts(example, shared_bert, path: str, body: bytes, status: int):
    answer = client(example, shared_bert).post(path, content=body)
    assert answer.status_code in (status, 422) if "nan" in path else answer.status_code == status, answer.text
    assert len(answer.content) < 1000


@pytest.mark.parametrize("sound", ["[]", "[NaN]", "[1e999]", '["a"]', "{}", "[[1], [2, 3]]", "[" * 100_000, "null"])
def test_what_is_no_sound_is_refused(example, shared_bert, sound: str, monkeypatch: pytest.MonkeyPatch):
    asked = client(example, shared_bert)
    monkeypatch.setattr(AnsweringTask, "reads", "Audio", raising=False)
    for route in asked.app.routes:
        if getattr(route, "path", "") == "/classify/{name}":
            tasks = next(cell.cell_contents for cell in route.endpoint.__closure__ if callable(cell.cell_contents))
            tasks("a", "classification").reads = "Audio"
    assert asked.post("/classify/a", content=sound.encode()).status_code in (400, 500)


def test_more_temperature_than_numbers_hold_is_an_error_in_words(example, tmp_path: Path):
    asked = client(example, load(tmp_path, tiny_gpt2))
    for temperature, statuses in (("nan", (400,)), ("inf", (400,)), ("-1", (400,)), ("1e-45", (200, 400, 500))):
        answer = asked.post(f"/generate/a?temperature={temperature}&max_tokens=2", content="a b")
        assert answer.status_code in statuses and answer.json()


def test_a_text_without_a_limit_of_length_is_bounded_by_its_attention(tmp_path: Path):
    task = AnsweringTask(load(tmp_path, tiny_bert), "a", 1e-6)
    task.limit = None
    assert task.encode("a b c")
    with refused(ValueError, "1e-06", "100"):
        task.encode("a " * 98 + "b c")


def test_memory_that_grows_beyond_the_limit_ends_a_request():
    clock = Clock(60, 0.05)
    with refused(TookTooMuch, "0.05 GB"), clock:
        kept = []
        for _ in range(30):
            time.sleep(0.11)
            kept.append(torch.ones(4_000_000))
    assert 3 <= len(kept) < 10


@pytest.mark.parametrize("how", ["limits", "seconds"])
def test_sounds_are_measured_by_what_they_would_need(how: str):
    limits = Limits(gigabytes=0.1)
    limits.check_sound(1, 8000 * 60, 8000, 8000)
    bomb = (8, 50_000_000, 44100, 8000) if how == "limits" else (1, 100_000, 1, 8000)
    with refused(TookTooMuch, "0.1 GB"):
        limits.check_sound(*bomb)


class Gone:
    """A request whose client leaves after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    async def is_disconnected(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_the_work_of_a_client_that_leaves_ends(example, monkeypatch: pytest.MonkeyPatch):
    """Before it begins, and while it runs; the next client has its turn at once."""
    monkeypatch.setattr(example, "POLL", 0.02)
    turns, steps = example.Turns(Limits()), []

    def work() -> None:
        for _ in range(1000):
            time.sleep(0.01)
            torch.ones(1)
            steps.append(1)

    async def ask() -> float:
        for looks, least, most in ((0, 0, 0), (3, 1, 100)):
            steps.clear()
            with refused(ClientLeft, "disconnected"):
                await turns.take(Gone(looks), Limits().clock(), work)
            assert least <= len(steps) <= most
        begun = time.monotonic()
        await turns.take(Gone(9), Limits().clock(), lambda: None)
        return time.monotonic() - begun

    assert asyncio.run(ask()) < 1


def test_a_request_ends_with_its_time_while_it_waits_and_while_it_sends(example):
    """A client that sends a byte now and then holds nothing."""

    async def send() -> None:
        turns = example.Turns(Limits(seconds=0.2))
        with pytest.raises(example.HTTPException) as error:
            async with turns.request():
                await asyncio.sleep(30)
        assert error.value.status_code == 504 and turns.waiting == 0

    begun = time.monotonic()
    asyncio.run(send())
    assert time.monotonic() - begun < 5


def test_no_more_requests_wait_than_allowed(example, shared_bert, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(example, "MAX_WAITING", 2)
    inside, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> Any:
        inside.set()
        go.wait(30)
        return "x", [1.0]

    monkeypatch.setattr(example.AnsweringTask, "classify", hold)
    with client(example, shared_bert) as asked:
        threads, found = [], []
        for _ in range(6):
            threads.append(threading.Thread(target=lambda: found.append(asked.post("/classify/a", content="a"))))
            threads[-1].start()
        assert inside.wait(30)
        while len(found) < 4:
            time.sleep(0.01)
        go.set()
        for thread in threads:
            thread.join(30)
    statuses = sorted(answer.status_code for answer in found)
    assert statuses == [200, 200, 503, 503, 503, 503] and json.loads(found[0].content)


def test_a_body_beyond_the_limit_is_not_read_to_its_end(example, shared_bert, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(example, "MAX_BYTES", 1000)
    assert client(example, shared_bert).post("/classify/a", content=b"a" * 1001).status_code == 413
