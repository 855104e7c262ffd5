"""The functions behind the tabs of `hf-ext app` against the API, and what its command says."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from gradio.utils import get_upload_folder
from PIL import Image

import hf_ext
from hf_ext import EMRModel, SemanIRForImageRestoration, app, restore_image
from hf_ext import app_work as work
from hf_ext.answers.limits import Limits
from hf_ext.audio_stream import Listener, Stream
from hf_ext.hub.released import list_released
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel
from hf_ext.tasks.diffusion_grids import draw_grid
from tests.kit import command_line
from tests.kit.refusals import refused

run = partial(command_line.run, "app")
DIGITS, DENOISER, TASKS = (str(hf_ext.released(name)) for name in ("spoken-digits", "denoise-color", "restore-tasks"))


def make_dit(folder: Path, **more) -> str:
    """A Disentangled DiT that was not trained, whose last layer is not zero."""
    torch.manual_seed(0)
    options = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "num_classes": 3, **more}
    transformer = DisentangledDiTTransformer2DModel(sample_size=8, patch_size=4, in_channels=3, **options)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.normal_(0, 0.2)
    names = {"0": "cat", "1": "dog", "2": "ship"}
    DisentangledDiTPipeline(transformer, DDIMScheduler(), None, None, None, id2label=names).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def dit(tmp_path_factory) -> str:
    return make_dit(tmp_path_factory.mktemp("models") / "dit")


def write_sound(path: Path, rate: int = 8000) -> np.ndarray:
    """Two made words, tones that swell and fade, with pauses."""
    time = np.arange(int(0.4 * rate)) / rate
    words = [0.5 * np.sin(np.pi * time / 0.4) * np.sin(2 * np.pi * pitch * time) for pitch in (200, 900)]
    sound = np.concatenate([part for word in words for part in (np.zeros(rate // 2), word)])
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((32767 * sound).astype("<i2").tobytes())
    return sound


def test_each_model_has_its_tab(dit, tmp_path):
    Path(tmp_path, "snapshot").symlink_to(dit)
    models = work.find_models([dit, str(tmp_path / "snapshot")])
    others = {"restore-tasks", "spoken-digits", "cifar10", "demosaick"}
    assert set(models["restore"]) == {model.name for model in list_released()} - others
    # Others need not know where a folder lies.
    draw = {"cifar10": str(hf_ext.released("cifar10")), "dit": dit, "dit (2)": str(tmp_path / "snapshot")}
    assert models["draw"] == draw and list(models["merge"]) == ["restore-tasks"]
    assert models["listen"] == {"spoken-digits": DIGITS}
    Path(tmp_path, "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with refused(work.NoTab, "BertModel"):
        work.find_models([str(tmp_path)])
    # It travels with the package and has no tab: left out, unless it is asked for.
    with refused(work.NoTab, "mosaics"):
        work.find_models([str(hf_ext.released("demosaick"))])


@pytest.mark.parametrize(
    ("name", "strength", "size"),
    [("denoise-color", 1.0, (40, 24)), ("denoise-color", 0.5, (40, 24)), ("super-resolution-x2", 0.5, (80, 48))],
)
def test_a_picture_is_restored_as_by_the_api(photo, name, strength, size):
    """A model that enlarges takes no strength, and the slider shows one size."""
    source = str(hf_ext.released(name))
    before, after = work.restore(source, str(photo), strength)
    model, scale = SemanIRForImageRestoration.from_pretrained(source).eval(), size[0] // 40
    assert np.array_equal(before, np.asarray(Image.open(photo)))
    assert np.array_equal(after, restore_image(model, before, strength=strength if scale == 1 else None))
    assert [picture.size for picture in work.pair(before, after)] == [size, size]


def test_a_bar_never_goes_back_and_tells_the_time_left(monkeypatch):
    told, clock = [], iter([0.0, 0.5, 2.0, 3.0, 4.0])
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    show = work.follow(lambda share, desc: told.append((share, desc)))
    for share in (0.1, 0.5, 0.4, 1.0):
        show(share)
    assert [share for share, _ in told] == [0.1, 0.5, 0.5, 1.0]
    assert [words for _, words in told] == ["just begun", "about 2 s left", "about 3 s left", "about 0 s left"]


CONTROLS = ("original_size", "crop", "flip")


@pytest.mark.parametrize("known", [CONTROLS, (), ("crop",), ("original_size", "flip")])
def test_drawing_varies_the_controls_that_a_model_knows_and_nothing_else(known, tmp_path):
    source = make_dit(tmp_path / "dit", control_alpha=dict.fromkeys(known, 1.0))
    given = dict(zip(CONTROLS, ((16, 16), (4, 2), True), strict=True))
    pipeline = work.load_drawer(source)
    rows = []
    for controls in ({}, {name: given[name] for name in known}):
        noise = [torch.Generator().manual_seed(7 * 100_003 + column) for column in range(work.COLUMNS)]
        settings = {"num_inference_steps": 2, "guidance_scale": 3.0, "generator": noise, **controls}
        rows.append(pipeline(class_labels=["dog"] * work.COLUMNS, **settings).images)
    drawn = work.draw(source, "dog", 2, 0.5, 0.25, True, 2, 3.0, 7)
    assert np.array_equal(np.asarray(drawn), np.asarray(draw_grid(rows, ["default", "yours"], work.SIDE)))
    assert np.array_equal(*[np.asarray(row[0]) for row in rows]) == (not known)
    page = app.build_app({tab: {"dit": source} if tab == "draw" else {} for tab in work.TABS})
    moved = (block for block in page.blocks.values() if isinstance(block, gr.Slider | gr.Checkbox))
    shown = {block.label: block.visible for block in moved}
    assert [shown["Size of the original"], shown["Crop: top"], shown["Flip"]] == [name in known for name in CONTROLS]


def test_classes_with_one_name_are_told_apart_by_their_numbers(tmp_path):
    source = make_dit(tmp_path / "dit")
    index = Path(source, "model_index.json")
    names = {"0": "crane", "1": "dog", "2": "crane"}
    index.write_text(json.dumps(json.loads(index.read_text()) | {"id2label": names}))
    assert work.list_classes(source) == ["crane (0)", "dog", "crane (2)"]
    given = (1, 0, 0, False, 1, 3.0, 7)
    first, last = (np.asarray(work.draw(source, f"crane ({number})", *given)) for number in (0, 2))
    assert (first != last).any()
    with refused(ValueError, "crane"):
        work.draw(source, "crane", *given)


def test_a_file_is_heard_while_it_comes_and_as_the_listener_hears_it(tmp_path):
    sound = write_sound(tmp_path / "a.wav")
    heard = [list(words) for words in work.hear_file(DIGITS, str(tmp_path / "a.wav"))]
    listener, expected = Listener(DIGITS), []
    padded = np.concatenate([(32767 * sound).astype("<i2") / np.float32(32768), np.zeros(2400)]).astype(np.float32)
    for place in range(0, len(padded) // 80 * 80, 80):
        if (word := listener.hear(padded[place : place + 80])) is not None:
            expected.append((pytest.approx((place + 80) / 8000), str(word)))
    assert len(expected) == 2 and heard[-1] == expected
    # The first word is there before the sound has ended.
    assert heard[0] == [] and any(len(words) == 1 for words in heard)


def test_a_microphone_of_another_rate_is_heard_in_pieces_and_its_last_word_when_it_stops(tmp_path):
    sound = np.concatenate([write_sound(tmp_path / "a.wav", 48000), np.zeros(24000)])
    state, words = work.hear_piece(DIGITS, None, None)
    assert (state, words) == (None, [])
    pieces = [(32767 * part).astype(np.int16) for part in np.array_split(sound, 13)]
    for piece in pieces:
        state, words = work.hear_piece(DIGITS, state, (48000, np.stack([piece, piece], 1)))
    whole = Stream(Listener(DIGITS), 48000).hear(np.concatenate(pieces) / np.float32(32768))
    assert len(words) == 2 and words == whole
    # At 0.9 and 1.8 s they end, and a pause of 0.2 s says so.
    assert [second for second, _ in words] == pytest.approx([1.1, 2.0], abs=0.1)
    shown = work.show_words(words)
    assert shown.startswith(f"## {words[0][1]} {words[1][1]}\n") and "| 1.1" in shown
    # It stops with the sound: no pause says that the second word has ended.
    samples = (32767 * write_sound(tmp_path / "a.wav")[: int(1.8 * 8000)]).astype(np.int16)
    state, words = work.hear_piece(DIGITS, None, (8000, samples))
    assert len(words) == 1
    state, words = work.end_sound(state)
    assert state is None and len(words) == 2 and work.end_sound(None) == (None, [])


def test_every_task_of_a_merge_answers_as_its_model_does(photo):
    answers = work.answer_all(TASKS, str(photo), None, None)
    merged, pixels = EMRModel.from_pretrained(TASKS), np.asarray(Image.open(photo))
    assert list(answers) == merged.tasks == ["noise", "jpeg", "blur", "resize"]
    assert work.list_inputs(TASKS) == {"picture"}
    for name, (before, after) in answers.items():
        merged.set_task(name)
        assert np.array_equal(np.asarray(before), pixels)
        assert np.array_equal(np.asarray(after), restore_image(merged.model, pixels)), name
    assert len({np.asarray(after).tobytes() for _, after in answers.values()}) == 4


def test_what_is_wrong_is_said_on_the_page(dit, tmp_path):
    page = app.build_app({tab: {} for tab in work.TABS})
    texts = [block.value for block in page.blocks.values() if isinstance(block, gr.Markdown)]
    assert sum("There is no model for this tab. Give one: `hf-ext app MODEL`" in text for text in texts) == 4
    (tmp_path / "a.png").write_bytes(b"no picture")
    with refused(gr.Error, "no picture yet"):
        work.told(work.restore, DENOISER, None, 1.0)
    with refused(gr.Error, "class or text"):
        work.told(work.draw, dit, "", 1, 0, 0, False, 2, 3.0, 0)
    # what a user cleared
    for place, what in {1: "size", 3: "left", 5: "number of steps", 6: "guidance", 7: "seed"}.items():
        given = ["cat", 1, 0, 0, False, 2, 3.0, 0]
        given[place] = None
        with refused(gr.Error, f"no {what}"):
            work.told(work.draw, dit, *given)
    with refused(gr.Error, "no strength"):
        work.told(work.restore, DENOISER, str(tmp_path / "a.png"), None)
    with refused(gr.Error, "Pillow"):
        work.told(work.restore, DENOISER, str(tmp_path / "a.png"), 1.0)
    with pytest.raises(gr.Error, match="cannot be read|not a readable sound file"):
        work.told(next, work.hear_file(DIGITS, str(tmp_path / "a.png")), None)


def test_a_request_has_limits(photo):
    for limits in (Limits(megapixels=5e-4), Limits(gigabytes=2e-4)):
        with refused(ValueError, limits.megapixels if limits.megapixels < 1 else "40 x 24"):
            work.restore(DENOISER, str(photo), 1.0, limits=limits)
        with refused(ValueError):
            work.answer_all(TASKS, str(photo), None, None, limits=limits)
    with refused(gr.Error, "1e-06 s"):
        work.told(work.restore, DENOISER, str(photo), 1.0, clock=Limits(seconds=1e-6).clock())


def test_a_process_may_serve_one_app_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(app, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=0))
    page = SimpleNamespace(launch=lambda **_: list((tmp_path / "new").iterdir()))
    monkeypatch.setattr(app, "build_app", lambda *_: page)
    assert [len(app.serve({})) for _ in range(2)] == [1, 1] and page.launch() == []


@contextlib.contextmanager
def serve(*words: str | Path) -> Iterator[str]:
    """The address of the app as its command serves it with these words and the further name `lab`."""
    command = [sys.executable, "-um", "hf_ext_cli.main", "app", *words, "--allowed-host", "lab"]
    # Its folder is within the one of this process, so that tests can look for the name.
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GRADIO_TEMP_DIR": get_upload_folder()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            told = next(line for line in process.stdout if "http://127.0.0.1:" in line)
            yield told.split()[-1].rstrip("/")
        finally:
            process.terminate()


def ask(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    request = urllib.request.Request(url, data, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def upload(url: str, photo: Path) -> str:
    """The path of an uploaded file, as the server names it."""
    head = b'--XX\r\nContent-Disposition: form-data; name="files"; filename="photo.png"\r\n'
    body = head + b"Content-Type: image/png\r\n\r\n" + photo.read_bytes() + b"\r\n--XX--\r\n"
    (path,) = json.loads(ask(f"{url}/gradio_api/upload", body, Content_Type="multipart/form-data; boundary=XX")[1])
    return path


def join(url: str, name: str, *given: object) -> str:
    """The path of a call's answer; waits while as many others wait as may."""
    body, status, told = json.dumps({"data": given}).encode(), 503, b""
    end = time.monotonic() + 120
    while status == 503 and time.monotonic() < end:
        status, told = ask(f"{url}/gradio_api/call/{name}", body, Content_Type="application/json")
        if status == 503:
            time.sleep(0.2)
    assert status == 200, told
    return f"/gradio_api/call/{name}/{json.loads(told)['event_id']}"


def call(url: str, *given: object) -> bytes:
    """The events of a restoration."""
    return ask(f"{url}{join(url, 'run', *given)}")[1]


def test_a_program_gets_its_result_and_no_folder_is_told(dit, photo):
    with serve(dit, "--megapixels", "0.01") as served:
        path = upload(served, photo)
        picture = {"path": path, "meta": {"_type": "gradio.FileData"}}
        done = call(served, "denoise-color", picture, 1.0)
        status, after = ask(json.loads(done.partition(b"data: ")[2])[0][1]["url"])
        expected = work.restore(DENOISER, str(photo), 1.0)[1]
        assert status == 200 and np.array_equal(np.asarray(Image.open(io.BytesIO(after))), expected)
        Image.new("RGB", (300, 200)).save(photo)
        large = call(served, "denoise-color", {**picture, "path": upload(served, photo)}, 1.0)
        assert b"photo.png" in large and b"0.01" in large and b"max-megapixels" not in large
        stolen = {**picture, "path": "/etc/passwd"}
        foreign = call(served, dit, picture, 1.0) + call(served, "denoise-color", stolen, 1.0)
        assert foreign.count(b"event: error") == 2
        pages = [ask(f"{served}/{name}")[1] for name in ("", "config", "gradio_api/info")]
    released = str(hf_ext.released("denoise-color").parent)
    folders = [get_upload_folder(), dit.rpartition("/")[0], released, str(Path.cwd())]
    for text in (path.encode(), done, large, *pages):
        assert not [folder for folder in folders if folder.encode() in text]


# Runs the command with words, and tells to whom the process connected and where the page is.
STARTED = """
import json, os, socket, sys, urllib.request
import gradio
from hf_ext_cli.main import main
asked, connect, launch = set(), socket.socket.connect, gradio.Blocks.launch
def watched(self, to):
    asked.add(to[0] if isinstance(to, tuple) else "local")
    return connect(self, to)
def launched(self, **options):
    socket.socket.connect = watched
    _, url, shared = launch(self, prevent_thread_lock=True, quiet=True, **options)
    page = urllib.request.urlopen(url).read().decode()
    found = {"asked": sorted(asked), "url": url, "shared": shared, "analytics": self.analytics_enabled, "page": page}
    print(json.dumps({**found, "host": options["server_name"]}), flush=True)
    os._exit(0)
gradio.Blocks.launch = launched
main(["app", *sys.argv[1:]])
"""


def test_it_starts_on_this_machine_alone_and_asks_no_other(dit):
    done = subprocess.run([sys.executable, "-c", STARTED, dit], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["host"] == "127.0.0.1" and found["url"].startswith("http://127.0.0.1:")
    assert set(found["asked"]) <= {"127.0.0.1", "local"} and found["shared"] is None and not found["analytics"]
    assert "fonts.googleapis" not in found["page"] and "Draw" in found["page"]


@pytest.mark.slow
def test_the_program_of_a_space_serves_the_app():
    page = Path(app.__file__).parents[1] / "docs" / "app.md"
    program = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    # Everybody may call a Space, by whatever name the Hub gives it.
    environment = os.environ | {"SPACE_HOST": "me-space.hf.space"}
    pipes = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-c", program], **pipes) as process:
        try:
            told = next(line for line in process.stdout if "http://127.0.0.1:" in line)
            for host in ("me-space.hf.space", "127.0.0.1"):
                status, page = ask(told.split()[-1], Host=host)
                assert status == 200 and b"hf-ext" in page
        finally:
            process.terminate()


@pytest.mark.parametrize(("words", "message"), [(["nowhere/at-all"], "couldn't connect"), (["--port", "0"], "--port")])
def test_what_cannot_be_served_is_refused_without_a_traceback(words, message, offline):
    result = run(*words, code=None)
    assert result.exit_code in (1, 2) and message in result.output and "Traceback" not in result.output
