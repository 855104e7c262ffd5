"""hf-ext emr serve: its routes answer as the exported tasks do, and refuse in words."""

from __future__ import annotations

import base64
import io
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hf_ext.emr import EMRModel
from hf_ext.emr.weights import TaskWeights
from hf_ext.mrconv import MRConvConfig, MRConvFeatureExtractor, MRConvForAudioClassification
from hf_ext.restoration.encoding import Frames, Picture, encode_frames
from hf_ext.restoration.tiles import restore_image
from tests.emr.emr_testing import perturb, tiny_bert, tiny_gpt2, tiny_semanir, tiny_unet, write_tokenizer
from tests.emr.use_testing import merge, merge_berts

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from starlette.testclient import TestClient  # noqa: E402

from hf_ext.serving.application import load_application  # noqa: E402
from hf_ext.serving.worker import Job, Worker  # noqa: E402

TEXTS = ["a b c", "d", "e f g h i j k", "z y x w v u t s r q p o", "m n"]


def client_of(merged: Path, **options: Any) -> TestClient:
    app, _ = load_application(str(merged), **options)
    return TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)


def refusal(response: Any, status: int) -> str:
    """What a refused request was told."""
    assert response.status_code == status and "Traceback" not in response.text, response.text
    return str(response.json()["error"]["message"])


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classifiers, of 2, 5 and 5 labels, far from one another; the exported ones lie beside the merge."""
    place = tmp_path_factory.mktemp("classifiers")
    base = tiny_bert(place / "base")
    labels = {"two": 2, "five": 5, "other": 5}
    tasks = {
        name: tiny_bert(place / name, seed, base=base, num_labels=count, noise=0.3)
        for seed, (name, count) in enumerate(labels.items(), 1)
    }
    merged = merge(base, tasks, place / "merged")
    for name in labels:
        TaskWeights(merged).export(name, place / f"{name}-exported")
    return merged


@pytest.fixture(scope="module")
def classify(classifiers: Path) -> Iterator[TestClient]:
    with client_of(classifiers) as client:
        yield client


@pytest.fixture(scope="module")
def generators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("generators")
    base = tiny_gpt2(place / "base")
    tasks = {name: tiny_gpt2(place / name, seed, base=base, noise=0.3) for seed, name in enumerate("ab", 1)}
    for folder in (base, *tasks.values()):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = (
            "{% for message in messages %}"
            "{% if message.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}"
            "{{ message.content }} {% endfor %}"
        )
        tokenizer.save_pretrained(folder)
    return merge(base, tasks, place / "merged")


@pytest.fixture(scope="module")
def generate(generators: Path) -> Iterator[TestClient]:
    with client_of(generators) as client:
        yield client


def exported_answers(merged: Path, task: str) -> list[list[float]]:
    folder = merged.parent / f"{task}-exported"
    model, tokenizer = BertForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model.eval()(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).tolist() for text in TEXTS]


def test_models_are_the_tasks(classify: TestClient):
    found = classify.get("/v1/models").json()
    assert [(model["id"], model["kind"]) for model in found["data"]] == [
        ("two", "classification"),
        ("five", "classification"),
        ("other", "classification"),
    ]


def test_many_clients_of_all_tasks_get_the_answers_of_their_own(classifiers: Path, classify: TestClient):
    right = {task: exported_answers(classifiers, task) for task in ("two", "five", "other")}
    assert np.abs(np.subtract(right["five"], right["other"])).max(1).min() > 5e-3
    asked = [(task, place) for task in right for place in range(len(TEXTS))] * 4

    def ask(task: str, place: int) -> float:
        answer = classify.post("/v1/classify", json={"model": task, "input": TEXTS[place]}).json()["data"][0]
        assert answer["label"] == f"seed{list(right).index(task) + 1}-{int(np.argmax(right[task][place]))}"
        return float(np.abs(np.subtract(answer["probs"], right[task][place])).max())

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, *zip(*asked, strict=True))) < 1e-5


def test_several_texts_in_one_request(classifiers: Path, classify: TestClient):
    found = classify.post("/v1/classify", json={"model": "five", "input": TEXTS}).json()
    assert [answer["index"] for answer in found["data"]] == list(range(len(TEXTS)))
    probabilities = [answer["probs"] for answer in found["data"]]
    np.testing.assert_allclose(probabilities, exported_answers(classifiers, "five"), atol=1e-5)


def test_requests_of_several_tasks_pass_in_one_forward(classifiers: Path, monkeypatch: pytest.MonkeyPatch):
    batches: list[list[str]] = []
    forward = EMRModel.__call__

    def record(self: EMRModel, *arguments: Any, task_ids: Any = None, **batch: Any) -> Any:
        batches.append(list(task_ids))
        return forward(self, *arguments, task_ids=task_ids, **batch)

    monkeypatch.setattr(EMRModel, "__call__", record)
    # The first waits a minute for the second, which fills the batch.
    with client_of(classifiers, max_batch=2, wait_ms=60_000) as client, ThreadPoolExecutor(2) as pool:
        asked = [{"model": task, "input": "a b c"} for task in ("two", "five")]
        counts = [
            r.json()["data"][0]["num_classes"] for r in pool.map(lambda b: client.post("/v1/classify", json=b), asked)
        ]
    assert counts == [2, 5] and [sorted(batch) for batch in batches] == [["five", "two"]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            {"model": "six", "input": "a"},
            404,
            "there is no model 'six'; the models are the tasks of the merge: two, five",
        ),
        ({"model": "two", "input": " ".join("abcdefghijklmnopq")}, 400, "the input has 17 tokens; task 'two' takes"),
        ({"model": "two", "input": ""}, 400, "task 'two' classifies texts"),
        ({"model": "two", "input": []}, 400, "`input` has 0 samples; give 1 to 256"),
        ({"model": "two", "input": ["a"] * 257}, 400, "`input` has 257 samples"),
        ({"model": "two", "input": [0.5]}, 400, "task 'two' classifies texts"),
        ({"model": "two"}, 400, "input: Field required"),
        ({"model": "two", "input": "a", "top": 1}, 400, "top: Extra inputs are not permitted"),
        ("text", 400, "body: Input should be"),
    ],
)
def test_a_wrong_request_is_refused_in_words(classify: TestClient, body: Any, status: int, message: str):
    assert message in refusal(classify.post("/v1/classify", json=body), status)


def test_requests_that_are_no_requests(classify: TestClient):
    assert refusal(classify.get("/v2"), 404) == "Not Found"
    assert refusal(classify.get("/v1/classify"), 405) == "Method Not Allowed"
    assert "body" in refusal(classify.post("/v1/classify", content=b"{"), 400)
    assert "Content-Length" in refusal(classify.post("/v1/classify", content=iter([b"{}"])), 411)
    large = {"content-length": str(10**9)}
    assert "at most 67,108,864 are taken" in refusal(classify.post("/v1/classify", content=b"", headers=large), 413)
    assert "does classification, not generation" in refusal(
        classify.post("/v1/completions", json={"model": "two", "prompt": "a"}), 400
    )


def test_without_a_token_the_server_answers_to_names_of_this_machine_only(classify: TestClient):
    for name, status in (("localhost", 200), ("localhost:80", 200), ("[::1]:80", 200), ("evil.example", 403)):
        assert classify.get("/v1/models", headers={"Host": name}).status_code == status
    assert "it answers to 127.0.0.1" in refusal(classify.get("/v1/models", headers={"Host": "a.b:127"}), 403)
    # A web page elsewhere that a browser shows can post without asking.
    page = {"Host": "localhost", "Origin": "http://evil.example"}
    assert "no web page" in refusal(classify.post("/v1/restore", content=b"x", headers=page), 403)


def test_the_first_of_many_wrong_inputs_is_told_alone(classify: TestClient):
    answer = classify.post("/v1/classify", json={"model": "two", "input": [{}] * 1000})
    assert answer.status_code == 400 and len(answer.content) < 2000


def test_a_token_is_asked_for(classifiers: Path):
    with client_of(classifiers, token="secret", names=["five"]) as client:
        assert "a token is needed" in refusal(client.get("/v1/models", headers={"Host": "any.name"}), 401)
        assert "a token is needed" in refusal(client.get("/v1/models", headers={"Authorization": "Bearer no"}), 401)
        found = client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
        assert [model["id"] for model in found["data"]] == ["five"]


def test_completions_are_those_of_the_task(generators: Path, generate: TestClient):
    for task in "ab":
        model: Any = GPT2LMHeadModel.from_pretrained(
            TaskWeights(generators).export(task, generators.parent / f"x{task}")
        )
        tokenizer = AutoTokenizer.from_pretrained(generators.parent / f"x{task}")
        tokens = tokenizer("a b c", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            right = tokenizer.decode(
                model.eval().generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 3:]
            )
        body = {"model": task, "prompt": "a b c", "max_tokens": 6, "temperature": 0}
        found = generate.post("/v1/completions", json=body).json()
        assert found["choices"][0] == {"index": 0, "text": right, "finish_reason": "length", "logprobs": None}
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
        cut = generate.post("/v1/completions", json=body | {"stop": right.split()[2]}).json()["choices"][0]
        assert cut["finish_reason"] == "stop" and cut["text"] == right[: right.index(right.split()[2])]
        lines = generate.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert "".join(event["choices"][0]["text"] for event in events) == right and lines[-2] == "data: [DONE]"
        assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
        assert found["choices"] == generate.post("/v1/completions", json=body).json()["choices"]


def test_prompts_of_several_tasks_and_lengths_are_continued_together(
    generators: Path, generate: TestClient, monkeypatch: pytest.MonkeyPatch
):
    bodies: list[dict[str, Any]] = [
        {"model": task, "prompt": prompt, "max_tokens": 5, "temperature": 0}
        for task, prompt in (("a", "a b c"), ("b", "a b c"), ("b", "d"), ("a", "e f g h i"))
    ]
    alone = [generate.post("/v1/completions", json=body).json() for body in bodies]
    batches, forward = [], EMRModel.generate

    def record(self: EMRModel, *arguments: Any, task_ids: Any = None, **options: Any) -> Any:
        batches.append(sorted(task_ids))
        return forward(self, *arguments, task_ids=task_ids, **options)

    monkeypatch.setattr(EMRModel, "generate", record)
    # The first waits a minute for the others, which fill the batch.
    with client_of(generators, max_batch=4, wait_ms=60_000) as client, ThreadPoolExecutor(4) as pool:
        found = [r.json() for r in pool.map(lambda body: client.post("/v1/completions", json=body), bodies)]
    assert batches == [["a", "a", "b", "b"]]
    for one, together in zip(alone, found, strict=True):
        assert (one["choices"], one["usage"]) == (together["choices"], together["usage"])
    assert alone[0]["choices"] != alone[1]["choices"]


def test_the_end_of_a_text_ends_the_answer(generators: Path, tmp_path: Path):
    """A head that always says the end."""
    folder = TaskWeights(generators).export("a", tmp_path / "a")
    model: Any = GPT2LMHeadModel.from_pretrained(folder)
    model.transformer.ln_f.weight.data.zero_()
    model.transformer.ln_f.bias.data.copy_(10 * model.transformer.wte.weight.data[3])
    model.save_pretrained(folder)
    base = generators.parent / "base"
    with client_of(merge(base, {"a": folder}, tmp_path / "merged", rescale="none")) as client:
        body = {"model": "a", "prompt": "a", "max_tokens": 5, "temperature": 0}
        found = client.post("/v1/completions", json=body).json()
        assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] == 1


def test_a_seed_repeats_a_sample_and_chats_have_a_template(generate: TestClient):
    body = {"model": "a", "prompt": "a b", "max_tokens": 8}
    texts = [generate.post("/v1/completions", json=body | {"seed": seed}).json()["choices"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and not texts[1] == texts[2] == texts[3]
    chat = {"model": "a", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 4, "temperature": 0}
    found = generate.post("/v1/chat/completions", json=chat).json()
    plain = generate.post("/v1/completions", json=body | {"temperature": 0, "max_tokens": 4}).json()
    assert found["choices"][0]["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
    streamed = generate.post("/v1/chat/completions", json=chat | {"stream": True}).text
    assert '"delta": {"content": ' in streamed and streamed.endswith("data: [DONE]\n\n")
    odd = chat | {"messages": [{"role": "odd", "content": "a"}]}
    assert "no such role" in refusal(generate.post("/v1/chat/completions", json=odd), 400)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 16}, "the input has 1 tokens and 16 to generate; task 'a' takes at most 16"),
        ({"max_tokens": 10**9}, "max_tokens: Input should be less than or equal to 8192"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"n": 2}, "n: Input should be less than or equal to 1"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"stream": True, "stop": "a"}, "`stop` does not go with `stream`"),
        ({"stop": ""}, "String should have at least 1 character"),
        ({"stop": ["a", ""]}, "String should have at least 1 character"),
        ({"prompt": "a\ud800"}, "half a surrogate pair"),
        ({"logprobs": 1}, "logprobs: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_completion_is_refused_in_words(generate: TestClient, more: dict[str, Any], message: str):
    body = {"model": "a", "prompt": "a", "max_tokens": 2} | more
    # Not by `json=`: the client refuses half a surrogate pair itself.
    headers = {"Content-Type": "application/json"}
    assert message in refusal(generate.post("/v1/completions", content=json.dumps(body), headers=headers), 400)


def test_an_encoder_decoder_generates_without_its_prompt(tmp_path: Path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=30, decoder_start_token_id=0, **sizes)).save_pretrained(
        tmp_path / "base"
    )
    model: Any = T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    perturb(model, 1, 0.5)
    model.save_pretrained(tmp_path / "a")
    for name in ("base", "a"):
        write_tokenizer(tmp_path / name)
    merged = merge(tmp_path / "base", {"a": tmp_path / "a"}, tmp_path / "merged")
    tokens = torch.tensor([[4, 5]])
    with torch.no_grad():
        out = EMRModel.from_pretrained(merged, "a").model.generate(tokens, max_new_tokens=4, do_sample=False)
    right = AutoTokenizer.from_pretrained(tmp_path / "a").decode(out[0, 1:], skip_special_tokens=True)
    with client_of(merged) as client:
        body = {"model": "a", "prompt": "a b", "max_tokens": 4, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == right


def picture() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (13, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_pictures_are_restored_by_the_task_that_is_named(tmp_path: Path):
    base = tiny_semanir(tmp_path / "base")
    tasks = {name: tiny_semanir(tmp_path / name, seed, base=base, noise=0.3) for seed, name in enumerate("ab", 1)}
    merged = merge(base, tasks, tmp_path / "merged")
    found = {}
    with client_of(merged) as client:
        for task in "ab":
            response = client.post("/v1/restore", params={"model": task}, content=picture())
            assert response.headers["content-type"] == "image/png"
            found[task] = np.asarray(Image.open(io.BytesIO(response.content))).astype(int)
            model = EMRModel.from_pretrained(merged, task).model
            right = restore_image(model, np.asarray(Image.open(io.BytesIO(picture()))))
            assert np.abs(found[task] - right).max() <= 1
        wrong = client.post("/v1/restore", params={"model": "a"}, content=b"no picture")
        assert "no picture that Pillow knows" in refusal(wrong, 400)
        assert "query.model: Field required" in refusal(client.post("/v1/restore", content=b""), 400)
    assert np.abs(found["a"] - found["b"]).max() > 10


@pytest.mark.parametrize("channels", [3, 1])
def test_pictures_are_classified(tmp_path: Path, channels: int):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=channels, **sizes)
    ViTForImageClassification(config).save_pretrained(tmp_path / "base")
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 8}, image_mean=[0.5] * channels, image_std=[0.5] * channels
    )
    model: Any = ViTForImageClassification.from_pretrained(tmp_path / "base")
    perturb(model, 1, 0.3)
    model.save_pretrained(tmp_path / "a")
    processor.save_pretrained(tmp_path / "a")
    merged = merge(tmp_path / "base", {"a": tmp_path / "a"}, tmp_path / "merged")
    with torch.no_grad():
        given = Image.open(io.BytesIO(picture())).convert("RGB" if channels == 3 else "L")
        inputs = processor([given], return_tensors="pt")
        right = EMRModel.from_pretrained(merged, "a").model(**inputs).logits[0].softmax(-1)
    with client_of(merged) as client:
        text = base64.b64encode(picture()).decode()
        deep = Picture(np.asarray(Image.open(io.BytesIO(picture()))).astype(np.uint16) * 257)
        deep_text = base64.b64encode(encode_frames(Frames([deep]), "PNG")).decode()
        for given in (text, f"data:image/png;base64,{text}", deep_text):
            found = client.post("/v1/classify", json={"model": "a", "input": given}).json()["data"][0]
            np.testing.assert_allclose(found["probs"], right, atol=1e-5)
        for given, message in (("a!", "is no base64"), ("aGVsbG8=", "no picture that Pillow knows")):
            assert message in refusal(client.post("/v1/classify", json={"model": "a", "input": given}), 400)


def test_sounds_are_classified(tmp_path: Path):
    config = MRConvConfig(hidden_size=8, num_hidden_layers=1, num_labels=3, vocab_size=None, input_size=1)
    MRConvForAudioClassification(config).save_pretrained(tmp_path / "base")
    model: Any = MRConvForAudioClassification.from_pretrained(tmp_path / "base")
    perturb(model, 1, 0.3)
    model.save_pretrained(tmp_path / "a")
    extractor = MRConvFeatureExtractor()
    extractor.save_pretrained(tmp_path / "a")
    merged = merge(tmp_path / "base", {"a": tmp_path / "a"}, tmp_path / "merged")
    sounds = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    with torch.no_grad():
        inputs = extractor(list(sounds), sampling_rate=16000, return_tensors="pt")
        right = EMRModel.from_pretrained(merged, "a").model(**inputs).logits.softmax(-1)
    with client_of(merged) as client:
        for given, rows in ((sounds.tolist(), right), (sounds[0].tolist(), right[:1])):
            found = client.post("/v1/classify", json={"model": "a", "input": given}).json()["data"]
            np.testing.assert_allclose([answer["probs"] for answer in found], rows, atol=1e-5)
        wrong = client.post("/v1/classify", json={"model": "a", "input": "bang"})
        assert "task 'a' classifies sounds" in refusal(wrong, 400)
        json_type = {"content-type": "application/json"}
        nan = client.post("/v1/classify", content='{"model": "a", "input": [NaN, 1.0]}', headers=json_type)
        assert "Input should be a finite number" in refusal(nan, 400)


def test_what_cannot_be_served_is_refused_at_the_start(tmp_path: Path):
    merged = merge_berts(tmp_path / "berts")
    with pytest.raises(ValueError, match="task 'plain' is a BertModel, which neither"):
        load_application(str(merged))
    with pytest.raises(ValueError, match="there is no task 'six'"):
        load_application(str(merged), names=["six"])
    unet = tiny_unet(tmp_path / "unet")
    unets = merge(unet, {"a": tiny_unet(tmp_path / "a", 1, base=unet)}, tmp_path / "unets")
    with pytest.raises(ValueError, match="only transformers models are served"):
        load_application(str(unets))
    for file in (*merged.glob("tokenizer*"), *merged.glob("tasks/*/tokenizer*")):
        file.unlink()
    with pytest.raises(ValueError, match="task 'two' has no tokenizer"):
        load_application(str(merged), names=["two"])


def run_jobs(_: Any, jobs: Any) -> list[Any]:
    """Doubles numbers; what is no number fails."""
    return [2 * job.inputs if isinstance(job.inputs, int) else job.inputs() for job in jobs]


class Named:
    name = "task"


def test_a_worker_batches_what_waits_and_a_bad_job_fails_alone():
    started, go, batches = threading.Event(), threading.Event(), []

    def run(emr: Any, jobs: Any) -> list[Any]:
        batches.append([job.inputs for job in jobs])
        if jobs[0].inputs == 0:
            started.set()
            go.wait(60)
        return run_jobs(emr, jobs)

    def fail() -> None:
        raise ValueError("bad")

    worker = Worker(None, 3, 0.0, max_waiting=5)
    first = worker.submit(Job(Named, run, 0, "form"))
    assert started.wait(60)
    rest = [worker.submit(Job(Named, run, given, form)) for given, form in ((1, "x"), (2, "y"), (fail, "x"), (4, "x"))]
    rest[3].cancel()
    worker.submit(Job(Named, run, 5, "x"))
    with pytest.raises(queue.Full):
        worker.submit(Job(Named, run, 6, "x"))
    go.set()
    worker.close()
    assert (first.result(), rest[0].result(), rest[1].result()) == (0, 2, 4)
    with pytest.raises(ValueError, match="bad"):
        rest[2].result()
    assert batches == [[0], [1, fail], [1], [fail], [2], [5]] and rest[3].cancelled()


def test_a_full_queue_and_a_bug_are_answered(classifiers: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Worker, job: Job) -> Any:
        raise queue.Full

    def broken(self: EMRModel, **_: Any) -> Any:
        raise RuntimeError("a secret of the server")

    body = {"model": "two", "input": "a"}
    with client_of(classifiers) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "submit", full)
            assert "too many requests are waiting" in refusal(client.post("/v1/classify", json=body), 503)
        with monkeypatch.context() as patch:
            patch.setattr(EMRModel, "__call__", broken)
            assert refusal(client.post("/v1/classify", json=body), 500) == "the server failed; see its log"
        assert client.post("/v1/classify", json=body).status_code == 200


@pytest.mark.slow
def test_the_load_test_counts_no_answer_of_another_task(tmp_path: Path):
    script = Path(__file__).parents[2] / "examples" / "benchmarks" / "emr_serve.py"
    words = ["--requests", "64", "--clients", "4", "--output", str(tmp_path / "results.json")]
    done = subprocess.run([sys.executable, str(script), *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    for name, tasks in (("classification", 8), ("classification, one task", 1), ("generation", 4)):
        assert (found[name]["tasks"], found[name]["wrong_answers"], found[name]["failed"]) == (tasks, 0, 0)
    # A wrong task would have been seen.
    assert found["classification"]["closest_tasks_differ_by"] > 1e-3
