"""examples/emr/serve.py: each task's own answers, in turns, within limits."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the example needs fastapi")
pytest.importorskip("uvicorn", reason="the example needs uvicorn")
from starlette.testclient import TestClient  # noqa: E402

from hf_ext.answers.limits import Clock, Limits, TookTooLong  # noqa: E402
from hf_ext.embedded_hub.access import Access  # noqa: E402
from hf_ext.emr import EMRModel  # noqa: E402
from hf_ext.restoration.tiles import restore_image  # noqa: E402
from tests.emr.emr_testing import tiny_bert, tiny_gpt2, tiny_semanir  # noqa: E402
from tests.emr.use_testing import merge  # noqa: E402
from tests.hub.published import tiny_model  # noqa: E402
from tests.kit.refusals import refused  # noqa: E402


def load(folder: Path, make: Any) -> EMRModel:
    base = make(folder / "base")
    return EMRModel.from_pretrained(
        merge(base, {n: make(folder / n, s, base=base, noise=0.2) for s, n in enumerate("ab", 1)}, folder / "merged")
    )


def client(example: ModuleType, emr: EMRModel, token: str | None = None, **limits: float) -> TestClient:
    access = Access(token, allowed_hosts=[*example.OWN_NAMES, "lab"])
    return TestClient(example.make_app(emr, access, Limits(**limits)), base_url="http://127.0.0.1:8000")


def test_classify(example: ModuleType, tmp_path: Path):
    emr = load(tmp_path, tiny_bert)
    asked = client(example, emr)
    for task in "ab":
        found = asked.post(f"/classify/{task}", content="a b c").json()
        with emr.task(task) as model, torch.no_grad():
            ids = torch.tensor([[4, 5, 6]])
            wanted = model(ids).logits.softmax(-1)[0]
        torch.testing.assert_close(torch.tensor(found["probabilities"]), wanted, atol=1e-5, rtol=0)
        assert found["label"] == model.config.id2label[int(wanted.argmax())] or emr.current != task
    assert asked.post("/classify/c", content="a").status_code == 404
    assert asked.post("/generate/a", content="a").status_code == 400
    assert asked.post("/classify/a", content="a " * 50).status_code == 400
    assert asked.post("/classify/a", content=b"\xff").status_code == 400
    assert asked.get("/tasks").json()["a"] == {"kind": "classification", "reads": "Sequence"}


def test_host_and_token(example: ModuleType, tmp_path: Path):
    emr = load(tmp_path, tiny_bert)
    guarded, asked, right = (
        client(example, emr, token="secret"),
        client(example, emr),
        {"authorization": "Bearer secret"},
    )
    for headers in ({"host": "evil.example"}, {"host": "lab.evil:8000"}, {"origin": "http://evil.example"}):
        assert asked.get("/tasks", headers=headers).status_code == 403
        assert guarded.get("/tasks", headers=headers | right).status_code == 403
    for headers in ({}, {"host": "lab:8000"}, {"host": "[::1]:8000"}, {"origin": "http://127.0.0.1:8000"}):
        assert asked.get("/tasks", headers=headers).status_code == 200
        assert guarded.get("/tasks", headers=headers | right).status_code == 200
    for headers in ({}, {"authorization": "Bearer secrets"}, {"authorization": "secret"}):
        assert guarded.get("/tasks", headers=headers).status_code == 401


def test_restore(example: ModuleType, tmp_path: Path):
    emr = load(tmp_path, tiny_semanir)
    file = io.BytesIO()
    Image.new("RGB", (12, 10), (90, 120, 30)).save(file, "PNG")
    answer = client(example, emr).post("/restore/b", content=file.getvalue())
    assert answer.status_code == 200 and Image.open(io.BytesIO(answer.content)).size == (12, 10)
    for limit, status in (({"megapixels": 1e-5}, 400), ({"gigabytes": 1e-6}, 400), ({"seconds": 1e-6}, 504)):
        assert client(example, emr, **limit).post("/restore/b", content=file.getvalue()).status_code == status


def test_a_turn_ends_when_its_time_is_over(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not before it begins, nor after it has done all of its work."""
    emr, calls = load(tmp_path, tiny_gpt2), 0
    clock = Clock(60)

    def count(self: Any, *given: Any) -> None:
        nonlocal calls
        calls += 1
        clock.end = time.monotonic() - 1

    with emr.task("a") as model, clock, refused(TookTooLong, "60 s"):
        model.register_forward_hook(count)
        for _ in range(3):
            model(torch.tensor([[4, 5]]))
    assert calls == 1


def test_a_time_changes_nothing_of_what_is_compiled():
    """flex_attention is compiled in one graph, which must not hold the clock of the request that compiled it."""
    model = tiny_model(attn_implementation="flex_attention")
    pixels = np.random.default_rng(0).random((16, 16, 3), np.float32)
    expected = restore_image(model, pixels)
    for clock in (Limits().clock(), Limits().clock()):
        with clock:
            np.testing.assert_array_equal(restore_image(model, pixels), expected)
    clock.end = time.monotonic() - 1
    with refused(TookTooLong), clock:
        restore_image(model, pixels)


def test_what_is_no_picture_is_said(example: ModuleType, tmp_path: Path):
    emr = load(tmp_path, tiny_semanir)
    assert client(example, emr).post("/restore/b", content=b"no picture").status_code == 400


def test_generate_in_turns(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    emr = load(tmp_path, tiny_gpt2)
    monkeypatch.setattr(example, "TURN_TOKENS", 2)
    asked = client(example, emr)
    with emr.task("b") as model:
        ids = torch.tensor([[4, 5]])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)[0, 2:]
    found = asked.post("/generate/b?max_tokens=7", content="a b").json()
    assert found["tokens"] == len(wanted)
    assert found["ended"] == (3 in wanted.tolist())
    assert asked.post("/generate/b?max_tokens=2000", content="a b").status_code == 400
    assert asked.post("/generate/b?max_tokens=15", content="a b").status_code == 400
    assert client(example, emr, seconds=1e-9).post("/generate/b?max_tokens=7", content="a b").status_code == 504


def test_a_short_request_does_not_wait_for_a_long_one(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    emr, order, inside = load(tmp_path, tiny_gpt2), [], threading.Event()
    monkeypatch.setattr(example, "TURN_TOKENS", 1)
    run = example.AnsweringTask.generate

    def watched(self: Any, prompt: list[int], *given: Any, **options: Any) -> Any:
        order.append(len(prompt))
        inside.set()
        found, _ = run(self, prompt, *given, **options)
        threading.Event().wait(0.1)
        return found, False

    monkeypatch.setattr(example.AnsweringTask, "generate", watched)
    with client(example, emr) as asked:
        long = threading.Thread(target=lambda: asked.post("/generate/a?max_tokens=12", content="a b"))
        long.start()
        assert inside.wait(30)
        assert asked.post("/generate/b?max_tokens=1", content="a").status_code == 200
        assert order.count(2) < 12
        long.join(60)
    assert order.count(2) == 12 and order.count(1) == 1
