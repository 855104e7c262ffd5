"""examples/emr/serve.py: each task's own answers, in turns, within limits, and what it refuses to outsiders."""

import asyncio
import gc
import io
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from starlette.testclient import TestClient
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_ext.answers import limits as answer_limits
from hf_ext.answers.classifying import Classifier, Input
from hf_ext.answers.limits import ClientLeft, Clock, Limits, TookTooLong, TookTooMuch
from hf_ext.answers.merged_task import AnsweringTask
from hf_ext.embedded_hub.access import Access
from hf_ext.emr import EMRModel
from hf_ext.errors import DataError
from hf_ext.restoration.encoding import Frames, encode_frames
from hf_ext.restoration.files import read_image
from hf_ext.restoration.tiles import restore_image
from tests.emr.emr_testing import WORDS, maker, tiny_bert, tiny_gpt2, tiny_semanir, write_tokenizer
from tests.emr.use_testing import merge_family
from tests.hub.published import tiny_model
from tests.kit.pictures import SENT, chunk, encode
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader

pytest.importorskip("fastapi", reason="the example needs fastapi")
load = module_loader(EXAMPLES / "emr")
Models = dict[str, EMRModel]
Client = Callable[..., TestClient]


@pytest.fixture
def example(load: Callable[[str], Any]) -> Any:
    return load("serve")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Merges of the tasks `a` and `b` that classify, generate and restore."""
    found = {}
    for kind, make in {"classify": tiny_bert, "generate": tiny_gpt2, "restore": tiny_semanir}.items():
        found[kind] = EMRModel.from_pretrained(merge_family(tmp_path_factory.mktemp(kind), make, noise=0.2))
    return found


@pytest.fixture
def client(example: Any, models: Models) -> Client:
    """Makes a client of the server of a merge."""

    def make(kind: str, token: str | None = None, **limits: float) -> TestClient:
        access = Access(token, allowed_hosts=[*example.OWN_NAMES, "lab"])
        return TestClient(example.make_app(models[kind], access, Limits(**limits)), base_url="http://127.0.0.1:8000")

    return make


def test_classify(client: Client, models: Models):
    emr, asked = models["classify"], client("classify")
    for task in "ab":
        found = asked.post(f"/classify/{task}", content="a b c").json()
        with emr.task(task) as model, torch.no_grad():
            wanted = model(torch.tensor([[4, 5, 6]])).logits.softmax(-1)[0]
            assert found["label"] == model.config.id2label[int(wanted.argmax())]
        torch.testing.assert_close(torch.tensor(found["probabilities"]), wanted, atol=1e-5, rtol=0)
    assert asked.get("/tasks").json()["a"] == {"kind": "classification", "reads": "Sequence"}


def test_hidden_colours_are_not_seen_and_values_are_no_shares(tmp_path: Path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4}
    config = ViTConfig(**sizes, num_labels=3, problem_type="regression")
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    emr = EMRModel.from_pretrained(
        merge_family(tmp_path, maker(lambda: ViTForImageClassification(config), processor.save_pretrained))
    )
    clear, white = Image.new("RGBA", (8, 8), (0, 90, 200, 0)), processor(Image.new("RGB", (8, 8), "white"))
    wanted = emr(torch.tensor(np.array(white["pixel_values"]))).logits[0].tolist()
    assert AnsweringTask(emr, "a").classify(clear)[1] == pytest.approx(wanted, abs=1e-5)


def test_host_and_token(client: Client):
    """Names are told apart by `Access`, as tests/embedded_hub has it."""
    guarded, asked, right = client("classify", token="secret"), client("classify"), {"authorization": "Bearer secret"}
    hosts = ("evil.example", "lab.evil:8000", "127.0.0.1.evil.example", "evil@127.0.0.1", "0.0.0.0", "", "2130706433")
    for headers in (*({"host": name} for name in hosts), {"origin": "http://evil.example"}):
        assert asked.get("/tasks", headers=headers).status_code == 403
        assert guarded.get("/tasks", headers=headers | right).status_code == 403
    for headers in ({}, {"host": "lab:8000"}, {"host": "[::1]:8000"}, {"origin": "http://127.0.0.1:8000"}):
        assert asked.get("/tasks", headers=headers).status_code == 200
        assert guarded.get("/tasks", headers=headers | right).status_code == 200
    for headers in ({}, {"authorization": "Bearer secrets"}, {"authorization": "secret"}):
        assert guarded.get("/tasks", headers=headers).status_code == 401


def test_restore(client: Client):
    body = encode(Image.new("RGB", (12, 10), (90, 120, 30)))
    answer = client("restore").post("/restore/b", content=body)
    assert answer.status_code == 200 and Image.open(io.BytesIO(answer.content)).size == (12, 10)
    for limit, status in (({"megapixels": 1e-5}, 400), ({"gigabytes": 1e-6}, 400), ({"seconds": 1e-6}, 504)):
        assert client("restore", **limit).post("/restore/b", content=body).status_code == status


def test_generate_in_turns(client: Client, example: Any, models: Models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(example, "TURN_TOKENS", 2)
    with models["generate"].task("b") as model:
        ids = torch.tensor([[4, 5]])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)[0, 2:]
    found = client("generate").post("/generate/b?max_tokens=7", content="a b").json()
    assert found["tokens"] == len(wanted) and found["ended"] == (3 in wanted.tolist())
    assert client("generate", seconds=1e-9).post("/generate/b?max_tokens=7", content="a b").status_code == 504


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "suppress_tokens": [7]},
    {"min_length": 6},
    {"forced_eos_token_id": 3},
    {"num_beams": 3},
    {"num_beams": 3, "length_penalty": 2.0},
    {"num_beams": 3, "num_return_sequences": 2},
    {"min_new_tokens": 5},
    {"exponential_decay_length_penalty": (2, 3.0)},
    {"begin_suppress_tokens": list(range(4, 20))},
    {"encoder_repetition_penalty": 3.0},
    {"guidance_scale": 3.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_served_text_is_that_of_the_model(
    example: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def build() -> Any:
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), bos_token_id=2, eos_token_id=3, **sizes))
        model.generation_config = GenerationConfig(bos_token_id=2, eos_token_id=3, pad_token_id=0, **settings)
        return model

    monkeypatch.setattr(example, "TURN_TOKENS", 2)
    emr = EMRModel.from_pretrained(merge_family(tmp_path, maker(build, write_tokenizer)), "a")
    asked = serve(example, emr)
    for text in ("a b", "q r s", "z"):
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        wanted = emr.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=11)[0, ids.shape[1] :].tolist()
        wanted = wanted[: wanted.index(3) + 1] if 3 in wanted else wanted
        found = asked.post("/generate/a?max_tokens=11", content=text).json()
        words = " ".join(WORDS[token] for token in wanted if token > 3)
        assert found == {"text": words, "tokens": len(wanted), "ended": 3 in wanted}


def test_a_short_request_does_not_wait_for_a_long_one(client: Client, example: Any, monkeypatch: pytest.MonkeyPatch):
    order, inside = [], threading.Event()
    monkeypatch.setattr(example, "TURN_TOKENS", 1)
    run = AnsweringTask.generate

    def watched(self: Any, prompt: list[int], *given: Any, **options: Any) -> Any:
        order.append(len(prompt))
        inside.set()
        found, _ = run(self, prompt, *given, **options)
        threading.Event().wait(0.1)
        return found, False

    monkeypatch.setattr(AnsweringTask, "generate", watched)
    with client("generate") as asked:
        long = threading.Thread(target=lambda: asked.post("/generate/a?max_tokens=12", content="a b"))
        long.start()
        assert inside.wait(30)
        assert asked.post("/generate/b?max_tokens=1", content="a").status_code == 200
        assert order.count(2) < 12
        long.join(60)
    assert order.count(2) == 12 and order.count(1) == 1


def test_a_turn_ends_when_its_time_is_over(models: Models):
    """Not before it begins, nor after it has done all of its work."""
    calls, clock = [], Clock(60)

    def count(*_: Any) -> None:
        calls.append(1)
        clock.end = time.monotonic() - 1

    with models["generate"].task("a") as model, clock, refused(TookTooLong, "60 s"):
        handle = model.register_forward_hook(count)
        for _ in range(3):
            model(torch.tensor([[4, 5]]))
    handle.remove()
    assert len(calls) == 1


def test_a_time_changes_nothing_of_what_is_compiled():
    """A compiled graph must not hold the clock of the request that compiled it."""
    model = tiny_model()
    model.compile(backend="aot_eager")
    pixels = np.random.default_rng(0).random((16, 16, 3), np.float32)
    expected = restore_image(model, pixels)
    for clock in (Limits().clock(), Limits().clock()):
        with clock:
            np.testing.assert_array_equal(restore_image(model, pixels), expected)
    clock.end = time.monotonic() - 1
    with refused(TookTooLong), clock:
        restore_image(model, pixels)


# Kind, path, body, statuses.
BODIES = [
    *(("restore", "/restore/a", body, (200 if good else 400,)) for body, good in SENT.values()),
    ("classify", "/classify/a", b"a " * 500_000, (400,)),
    ("classify", "/classify/a", b"a " * 50, (400,)),
    ("classify", "/classify/a", b"\xff\xfe", (400,)),
    ("classify", "/classify/a", b"\x00", (200,)),
    ("classify", "/classify/c", b"a", (404,)),
    ("classify", "/classify/%2e%2e%2fa", b"a", (404,)),
    ("classify", "/classify/a%00", b"a", (404,)),
    ("classify", "/restore/a", b"a", (400,)),
    ("classify", "/generate/a?max_tokens=nan", b"a", (400, 422)),
    ("generate", "/generate/b?max_tokens=15", b"a b", (400,)),
    ("generate", "/generate/a?temperature=nan", b"a b", (400,)),
    ("generate", "/generate/a?temperature=-1", b"a b", (400,)),
    ("generate", "/generate/a?max_tokens=2&temperature=1e-45", b"a b", (200, 400, 500)),
]


def test_bodies(client: Client, models: Models, tmp_path: Path):
    """Each is answered, or refused in words that name no folder of this machine."""
    asked = {kind: client(kind, megapixels=0.05) for kind in models}
    for kind, path, body, statuses in BODIES:
        answer = asked[kind].post(path, content=body)
        assert answer.status_code in statuses, (path, body[:80], answer.text)
        if answer.status_code == 400:
            assert 20 < len(answer.content) < 1200 and str(tmp_path.parent.parent) not in answer.text


def serve(example: Any, emr: EMRModel) -> TestClient:
    access = Access(None, allowed_hosts=example.OWN_NAMES)
    return TestClient(example.make_app(emr, access, Limits()), base_url="http://127.0.0.1:8000")


_CONVOLUTIONS = {"conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (5,), "num_feat_extract_layers": 1}
_POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 4}
_SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM", "UniSpeech"])
def test_sounds_are_heard_by_classes_that_are_named_after_texts(example: Any, tmp_path: Path, kind: str):
    config = getattr(transformers, f"{kind}Config")(**_CONVOLUTIONS, **_POSITIONS, **_SMALL, num_labels=3)
    reader = transformers.Wav2Vec2FeatureExtractor()
    make = maker(lambda: getattr(transformers, f"{kind}ForSequenceClassification")(config), reader.save_pretrained)
    emr = EMRModel.from_pretrained(merge_family(tmp_path, make), "a")
    asked, sound = serve(example, emr), [0.5, -0.25, 0.125] * 40
    assert asked.get("/tasks").json()["a"] == {"kind": "classification", "reads": "Audio"}
    found = asked.post("/classify/a", json=sound).json()["probabilities"]
    with emr.task("a") as model, torch.no_grad():
        given = reader([np.array(sound, np.float32)], sampling_rate=16_000, return_tensors="pt")
        torch.testing.assert_close(torch.tensor(found), model(**given).logits[0].softmax(-1), atol=1e-5, rtol=0)
    for wrong in ("[]", "[NaN]", "[1e999]", '["a"]', "{}", "[[1], [2, 3]]", "[" * 100_000, "null"):
        assert asked.post("/classify/a", content=wrong.encode()).status_code in (400, 500)


# Kind of model, its sizes, and the most tokens that it takes: RoBERTa's heirs count on behind the padding's position.
TAKEN = [
    *(("RobertaForSequenceClassification", 18), ("CamembertForSequenceClassification", 18)),
    *(("MPNetForSequenceClassification", 18), ("BertForSequenceClassification", 20)),
]


@pytest.mark.parametrize(("kind", "most"), TAKEN)
def test_texts_as_long_as_a_model_takes_and_one_token_longer(example: Any, tmp_path: Path, kind: str, most: int):
    build = getattr(transformers, kind)
    config = build.config_class(**_SMALL, vocab_size=len(WORDS), max_position_embeddings=20, pad_token_id=1)

    def finish(folder: Path) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(folder))
        tokenizer.model_max_length = 10**30
        tokenizer.save_pretrained(folder)

    folder = merge_family(tmp_path, maker(lambda: build(config), finish))
    asked = serve(example, EMRModel.from_pretrained(folder, "a"))
    assert asked.post("/classify/a", content="a " * most).status_code == 200
    answer = asked.post("/classify/a", content="a " * (most + 1))
    assert answer.status_code == 400 and f"takes 1 to {most}" in answer.json()["detail"]
    # as `hf-ext classify` does, which cuts
    classifier = Classifier(str(tmp_path / "a"), device="cpu")
    assert classifier.classify(Input("long", "a " * (most + 9)), 1)


_HEADS = {"decoder_attention_heads": 2, "encoder_attention_heads": 2, "decoder_layers": 1, "encoder_layers": 1}
_TOKENS = {"vocab_size": len(WORDS), "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
_MODEL = {"d_model": 8, "decoder_ffn_dim": 8, "encoder_ffn_dim": 8, "max_position_embeddings": 12}
MADE = {
    **dict.fromkeys(("MarianMTModel", "PegasusForConditionalGeneration"), {**_HEADS, **_MODEL}),
    "BartForConditionalGeneration": {**_HEADS, **_MODEL, "forced_eos_token_id": None},
    "T5ForConditionalGeneration": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("kind", MADE)
def test_an_encoder_decoder_makes_no_more_tokens_than_it_has_positions(example: Any, tmp_path: Path, kind: str):
    build = getattr(transformers, kind)
    config = build.config_class(**MADE[kind], **_TOKENS)
    emr = EMRModel.from_pretrained(merge_family(tmp_path, maker(lambda: build(config), write_tokenizer)), "a")
    asked = serve(example, emr)
    assert asked.post("/generate/a?max_tokens=12", content="a b").status_code == 200
    assert asked.post("/generate/a?max_tokens=13", content="a b").status_code == (200 if kind[:2] == "T5" else 400)


def test_what_cannot_be_served_is_said_without_a_traceback(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "token").write_text(" \n")
    config = transformers.BertConfig(**_SMALL, vocab_size=len(WORDS))
    folder = merge_family(tmp_path, maker(lambda: transformers.BertForTokenClassification(config), write_tokenizer))
    monkeypatch.setattr(example.uvicorn, "run", lambda *_, **__: pytest.fail("it is served"))
    for words, said in (
        ([], "no classifier, generator or restorer"),
        (["--token-file", str(tmp_path / "token")], "may not be empty"),
        (["--token-file", str(tmp_path / "missing")], "missing"),
        (["--token-file", str(tmp_path)], str(tmp_path)),
        (["--host", "0.0.0.0"], "set --token-file"),
        (["--seconds", "0"], "seconds must be above 0"),
    ):
        monkeypatch.setattr("sys.argv", ["serve.py", str(folder), *words])
        with pytest.raises(SystemExit) as ended:
            example.main()
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_text_without_a_limit_of_length_is_bounded_by_its_attention(models: Models):
    task = AnsweringTask(models["classify"], "a", 1e-6)
    task.limit = None
    assert task.encode("a b c")
    with refused(ValueError, "1e-06", "100"):
        task.encode("a " * 98 + "b c")


def test_memory_that_grows_beyond_the_limit_ends_a_request():
    clock = Clock(60, 0.1)
    with refused(TookTooMuch, "0.1 GB"), clock:
        kept = []
        for _ in range(30):
            time.sleep(0.11)
            # 40 MB: less may come from memory that other tests have left, and the process does not grow.
            kept.append(torch.ones(10_000_000))
    assert 3 <= len(kept) < 10


SMALL = encode(Image.new("RGB", (4, 4), (9, 8, 7)))
HOSTILE = {
    "two billion frames": (SMALL[:33] + chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)) + SMALL[33:], DataError),
    "texts without end": (SMALL[:33] + chunk(b"tEXt", b"a\0b") * 400_000 + SMALL[33:], TookTooLong),
    # 340 MB: the process may use again what other tests have left, and that does not count.
    "more pixels than memory": (encode(Image.new("RGB", (7000, 7000)), compress_level=1), TookTooMuch),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_decoding_ends_with_the_limits_of_the_request(name: str):
    data, error = HOSTILE[name]
    # Pixels alone want more memory than this; texts alone more time.
    limits = Limits(seconds=0.1, gigabytes=2) if error is TookTooLong else Limits(seconds=60, gigabytes=0.01)
    gc.collect()
    begun = time.monotonic()
    with pytest.raises(error):
        limits.read(data)
    assert time.monotonic() - begun < 5 and not multiprocessing.active_children()


def test_decoding_apart_gives_what_decoding_here_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exif = Image.Exif()
    exif[271], exif[270] = "maker", "described"
    plain = encode(Image.new("RGBA", (5, 3), (9, 8, 7, 6)), exif=exif, icc_profile=b"a profile", dpi=(300, 300))
    deep = encode(Image.fromarray(np.arange(99, dtype=np.uint16).reshape(9, 11) * 600))
    for data in (plain, deep, encode(Image.new("L", (4, 4)), "JPEG")):
        here, apart = read_image(data), Limits().read(data)
        np.testing.assert_array_equal(here.pixels, apart.pixels, strict=True)
        assert encode_frames(Frames([here]), "PNG") == encode_frames(Frames([apart]), "PNG")
    (tmp_path / "a.png").write_bytes(b"no picture")
    for source in (tmp_path / "a.png", b"no picture"):
        with refused(DataError, "Pillow"):
            Limits().read(source)
    monkeypatch.setattr(answer_limits, "read_image", lambda *_: os._exit(1))
    with refused(DataError, "crashed"):
        Limits().read(plain)


def test_the_work_of_a_client_that_leaves_ends(example: Any, monkeypatch: pytest.MonkeyPatch):
    """Before it begins, and while it runs; the next client has its turn at once."""
    monkeypatch.setattr(example, "POLL", 0.02)
    turns, steps = example.Turns(Limits()), []

    def work() -> None:
        for _ in range(1000):
            time.sleep(0.01)
            torch.ones(1)
            steps.append(1)

    def leaving_after(looks: int) -> SimpleNamespace:
        answers = iter([False] * looks)

        async def is_disconnected() -> bool:
            return next(answers, True)

        return SimpleNamespace(is_disconnected=is_disconnected)

    async def ask() -> float:
        for looks, least, most in ((0, 0, 0), (3, 1, 100)):
            steps.clear()
            with refused(ClientLeft, "disconnected"):
                await turns.take(leaving_after(looks), Limits().clock(), work)
            assert least <= len(steps) <= most
        begun = time.monotonic()
        await turns.take(leaving_after(9), Limits().clock(), lambda: None)
        return time.monotonic() - begun

    assert asyncio.run(ask()) < 1


def test_a_request_ends_with_its_time_while_it_waits_and_while_it_sends(example: Any):
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


def test_no_more_requests_wait_and_no_more_is_read_than_allowed(
    client: Client, example: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(example, "MAX_BYTES", 1000)
    assert client("classify").post("/classify/a", content=b"a" * 1001).status_code == 413
    monkeypatch.setattr(example, "MAX_WAITING", 2)
    inside, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> Any:
        inside.set()
        go.wait(30)
        return "x", [1.0]

    monkeypatch.setattr(AnsweringTask, "classify", hold)
    with client("classify") as asked, ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(asked.post, "/classify/a", content="a") for _ in range(6)]
        assert inside.wait(30)
        while sum(answer.done() for answer in sent) < 4:
            time.sleep(0.01)
        go.set()
        found = [answer.result(30) for answer in sent]
    assert sorted(answer.status_code for answer in found) == [200, 200, 503, 503, 503, 503]
    assert all(answer.json() for answer in found)
