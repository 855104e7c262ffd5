"""The app, `hf-ext app`: restore, draw, listen and merge in a browser; a function lays out each tab."""

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image
from starlette.middleware import Middleware

from hf_ext import app_work as work
from hf_ext.answers.limits import Clock, Limits, read_piece
from hf_ext.app_guard import Guard
from hf_ext.hub.released import list_released
from hf_ext.semanir.image_processing_semanir import from_unit
from hf_ext.tasks.degradations import blur, gaussian_noise, jpeg, matlab_bicubic
from hf_ext.terminal import count_of

# Letters of a text at most, and requests that may wait; the next one is refused.
LETTERS, WAITING = 100_000, 32
# Where pictures come from, and what their frames offer: nothing that sends them elsewhere.
_SOURCES, _SAVE = ["upload", "clipboard"], ["download", "fullscreen"]
_SHOWN: dict[str, Any] = {"format": "png", "interactive": False}
# What needs a model's memory stands in one row; the microphone and what is shown have rows of their own.
ONE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
# Damages of the picture of the examples, and the text for a merge.
DAMAGES = ("noise", "jpeg", "small", "blurred")
TEXT = "At last it works, and I am glad."
# Limits of the models of each tab, from their cards.
WARNINGS = {
    "restore": (
        "It does not detect the degradation of a picture. Where information was lost, its details are plausible, not "
        "true: do not judge faces, text, number plates, medical or forensic pictures by its results."
    ),
    "draw": "Its pictures are generated: they show no real events and must not be presented as photographs.",
    "listen": "It knows only the words of its training, and classifies every other sound as one of them.",
    "merge": "A task answers every input, even of a kind that it was not trained on.",
}
DRAWN = (
    "Both rows start from the same noise. The upper row has the default controls, the lower row those of the sliders, "
    "as shares of the picture's size. A control that did not vary in training has little effect."
)
# Controls of the examples of a drawing: size, top, left, flip.
_EXAMPLES = {
    "default": (1, 0, 0, False),
    "size 3": (3, 0, 0, False),
    "size 0.5": (0.5, 0, 0, False),
    "crop": (1, 0.25, 0.25, False),
    "flip": (1, 0, 0, True),
}


@dataclass(frozen=True)
class Tab:
    """Materials of a tab: its models by name, the choice of one, the limits of a request, and files of examples."""

    name: str
    sources: dict[str, str]
    model: gr.Dropdown
    limits: Limits
    examples: dict[str, str]

    @property
    def first(self) -> str:
        return next(iter(self.sources.values()))

    def ask(self, function: Callable[..., Any], name: str, *given: Any, **options: Any) -> Any:
        """The answer of a function of this file for the model of a name."""
        return work.told(function, self.sources[name], *given, clock=self.clock(), **options)

    def clock(self) -> Clock:
        """The limits of the request that begins."""
        return self.limits.clock(work.find_left())

    def describe(self) -> None:
        """Lays out a line about the model that is chosen."""
        first = next(iter(self.sources))
        about = gr.Markdown(describe_model(self.name, first, self.first), elem_id=f"{self.name}-about")
        self.model.input(lambda name: describe_model(self.name, name, self.sources[name]), self.model, about)

    def offer(self, inputs: list[Any], rows: list[list[Any]], labels: list[str] | None = None) -> None:
        """Lays out examples that fill the inputs."""
        gr.Examples(rows, inputs, example_labels=labels, cache_examples=False, elem_id=f"{self.name}-examples")


def build_app(models: dict[str, dict[str, str]], limits: Limits = work.LIMITS) -> gr.Blocks:
    """The page with its four tabs; `models` are those of [`find_models`], `limits` those of a request."""
    # Nothing is told to anybody; what a page that stays open has uploaded goes after an hour.
    page = gr.Blocks(title="hf-ext", analytics_enabled=False, delete_cache=(60, 3600))
    with tempfile.TemporaryDirectory() as folder, page as app:
        # gradio copies what it offers.
        examples = write_examples(Path(folder))
        gr.Markdown("# hf-ext\nFour NeurIPS 2024 methods on small models, which run on the machine of this page.")
        for name, lay_out in zip(work.TABS, (_restore_tab, _draw_tab, _listen_tab, _merge_tab), strict=True):
            with gr.Tab(name.capitalize(), id=name):
                if models[name]:
                    choice = gr.Dropdown(list(models[name]), label="Model", elem_id=f"{name}-model")
                    tab = Tab(name, models[name], choice, limits, examples)
                    tab.describe()
                    lay_out(tab)
                else:
                    gr.Markdown("There is no model for this tab. Give one: `hf-ext app MODEL`, a folder or org/name.")
    # None goes past the queue.
    app.queue(max_size=WAITING, api_open=False)
    return app


def _picture(**options: Any) -> gr.Image:
    """A picture that is uploaded; the file is read by us, within limits and with its errors in words."""
    picture = gr.Image(type="filepath", image_mode=None, sources=_SOURCES, **options)
    picture.preprocess = lambda payload: payload.path if payload else None
    return picture


def _restore_tab(tab: Tab) -> None:
    with gr.Row():
        with gr.Column():
            picture = _picture(label="Picture")
            tab.offer([picture], [[tab.examples[name]] for name in DAMAGES], list(DAMAGES))
            strength = gr.Slider(0, 1, 1, step=0.05, label="Strength", elem_id="restore-strength")
            gr.Markdown("Blend of input and result. A model that enlarges always returns its full result.")
            button = gr.Button("Restore", variant="primary", elem_id="restore-run")
        with gr.Column():
            slider = gr.ImageSlider(label="Before and after", **_SHOWN, elem_id="restore-result")
            said = gr.Markdown(elem_id="restore-said")

    def run(name: str, path: str | None, share: float, bar: Any = gr.Progress()) -> Any:  # noqa: B008
        begun = time.monotonic()
        before, after = tab.ask(work.restore, name, path, share, tab.limits, bar)
        return work.pair(before, after), describe_restoration(name, before, after, share, time.monotonic() - begun)

    button.click(run, [tab.model, picture, strength], [slider, said], show_progress_on=slider, **ONE)


def _draw_tab(tab: Tab) -> None:
    classes, takes = work.list_classes(tab.first), work.list_controls(tab.first)
    with gr.Row():
        with gr.Column():
            first = (classes or [""])[0]
            label = gr.Dropdown(classes, value=first, allow_custom_value=True, label="Class, or text of a text model")
            sized = "original_size" in takes
            size = gr.Slider(0.25, 4, 1, step=0.25, label="Size of the original", elem_id="draw-size", visible=sized)
            top = gr.Slider(0, 1, 0, step=0.125, label="Crop: top", visible="crop" in takes)
            left = gr.Slider(0, 1, 0, step=0.125, label="Crop: left", visible="crop" in takes)
            flip = gr.Checkbox(label="Flip", visible="flip" in takes)
            if classes:
                chosen = [classes[number % len(classes)] for number in range(len(_EXAMPLES))]
                rows = [[name, *controls] for name, controls in zip(chosen, _EXAMPLES.values(), strict=True)]
                names = [f"{name}, {how}" for name, how in zip(chosen, _EXAMPLES, strict=True)]
                tab.offer([label, size, top, left, flip], rows, names)
            with gr.Accordion("More", open=False):
                steps = gr.Slider(1, 100, 20, step=1, label="Steps")
                guidance = gr.Slider(1, 8, 3, step=0.5, label="Guidance")
                seed = gr.Number(0, label="Seed of the noise", precision=0, minimum=0, maximum=2**32)
            button = gr.Button("Draw", variant="primary", elem_id="draw-run")
        with gr.Column():
            result = gr.Image(show_label=False, buttons=_SAVE, **_SHOWN, elem_id="draw-result")
            said = gr.Markdown(elem_id="draw-said")
            gr.Markdown(DRAWN)

    def run(name: str, bar: Any = gr.Progress(), *given: Any) -> Any:  # noqa: B008
        begun = time.monotonic()
        drawn = tab.ask(work.draw, name, *given, bar=bar)
        done = f"**{name}** generated two rows of {work.COLUMNS} pictures of {given[0]!s:.60}"
        how = f"in {given[5]:g} steps with guidance {given[6]:g} and seed {given[7]}"
        texts = {"original_size": f"size {given[1]:g}", "crop": f"crop {given[2]:g}, {given[3]:g}", "flip": "flipped"}
        takes = work.list_controls(tab.sources[name]) - (set() if given[4] else {"flip"})
        below = ", ".join(text for control, text in texts.items() if control in takes) or "the same controls"
        return drawn, f"{done} {how}, in {time.monotonic() - begun:.1f} s. Lower row: {below}."

    inputs = [tab.model, label, size, top, left, flip, steps, guidance, seed]
    button.click(run, inputs, [result, said], show_progress_on=result, **ONE)

    def choose(name: str) -> tuple[Any, ...]:
        names, takes = tab.ask(work.list_classes, name), work.list_controls(tab.sources[name])
        shown = [gr.update(visible=each in takes) for each in ("original_size", "crop", "crop", "flip")]
        return gr.Dropdown(names, value=(names or [""])[0]), *shown

    tab.model.input(choose, tab.model, [label, size, top, left, flip])


def _listen_tab(tab: Tab) -> None:
    heard = gr.State()
    with gr.Row():
        with gr.Column():
            listening: dict[str, Any] = {"sources": ["microphone"], "streaming": True, "type": "filepath"}
            microphone = gr.Audio(**listening, label="Microphone", elem_id="listen-mic")
            sound = gr.Audio(sources=["upload"], type="filepath", label="File", buttons=[], elem_id="listen-file")
            tab.offer([sound], [[tab.examples["digits"]]], ["a synthetic voice says four digits"])
            button = gr.Button("Listen to the file", variant="primary", elem_id="listen-run")
        words = gr.Markdown(work.show_words([]), elem_id="listen-result", container=True)

    def run(name: str, path: str | None) -> Iterator[str]:
        clock, begun, found, parts = tab.clock(), time.monotonic(), work.Words(), 0
        pieces = work.hear_file(tab.sources[name], path, tab.limits)

        def hear() -> work.Words | None:
            # A piece is short: looking between them costs less than at each operation.
            clock.check()
            return next(pieces, None)

        while (more := work.told(hear)) is not None:
            found, parts = more, parts + 1
            yield work.show_words(found, f"{parts * work.PIECE:.1f} s processed.")
        yield work.show_words(found, describe_sound(name, len(found), parts * work.PIECE, time.monotonic() - begun))

    def run_piece(name: str, state: Any, path: str | None) -> tuple[Any, str]:
        def hear(source: str) -> Any:
            return work.hear_piece(source, state, read_piece(path, tab.limits) if path else None)

        state, found = tab.ask(hear, name)
        return state, work.show_words(found)

    def end(state: Any) -> tuple[Any, str]:
        state, found = work.told(work.end_sound, state)
        said = "The microphone is off." if found else "The microphone is off; no word was recognised."
        return state, work.show_words(found, said)

    button.click(run, [tab.model, sound], words, **ONE)
    microphone.start_recording(lambda: (None, work.show_words([])), None, [heard, words])
    microphone.stream(run_piece, [tab.model, heard, microphone], [heard, words], stream_every=0.3)
    microphone.stop_recording(end, heard, [heard, words])
    tab.model.input(lambda: None, None, heard)


def _merge_tab(tab: Tab) -> None:
    answers, takes = gr.State({}), work.list_inputs(tab.first)
    with gr.Row():
        with gr.Column():
            picture = _picture(label="Picture", visible="picture" in takes)
            sound = gr.Audio(sources=["upload"], type="filepath", label="Sound", buttons=[], visible="sound" in takes)
            text = gr.Textbox(label="Text", visible="text" in takes, max_length=LETTERS)
            for kind, place, given in (
                ("picture", picture, [[tab.examples[name]] for name in DAMAGES]),
                ("sound", sound, [[tab.examples["digits"]]]),
                ("text", text, [[TEXT]]),
            ):
                if kind in takes:
                    tab.offer([place], given, list(DAMAGES) if kind == "picture" else None)
            button = gr.Button("Run every task", variant="primary", elem_id="merge-run")
            task = gr.Radio(list(work.load_merge(tab.first)[1]), label="Task", elem_id="merge-task")
        with gr.Column():
            slider = gr.ImageSlider(label="Before and after", **_SHOWN, elem_id="merge-result")
            said = gr.Markdown(elem_id="merge-text")
            size: dict[str, Any] = {"columns": 2, "height": "auto", "object_fit": "contain", "buttons": _SAVE}
            every = gr.Gallery(label="Every task", **size, **_SHOWN, elem_id="merge-all")
            done = gr.Markdown(elem_id="merge-said")

    def show(found: dict[str, work.Answer], name: str | None) -> tuple[Any, str]:
        one = found.get(name or "", "")
        lines = [f"**{key}**: {value}" for key, value in found.items() if isinstance(value, str)]
        return (None if isinstance(one, str) else one), "\n\n".join(lines)

    def run(name: str, bar: Any = gr.Progress(), *given: str | None) -> tuple[Any, ...]:  # noqa: B008
        begun = time.monotonic()
        found = tab.ask(work.answer_all, name, *given, limits=tab.limits, bar=bar)
        first = next(iter(found))
        pictures = [(value[1], key) for key, value in found.items() if not isinstance(value, str)]
        sentence = f"**{name}** ran {len(found)} tasks in {time.monotonic() - begun:.1f} s."
        return found, gr.Radio(value=first), pictures, *show(found, first), sentence

    def choose(name: str) -> tuple[Any, ...]:
        takes = tab.ask(work.list_inputs, name)
        inputs = [gr.update(visible=kind in takes) for kind in ("picture", "sound", "text")]
        return {}, gr.Radio(list(work.load_merge(tab.sources[name])[1]), value=None), [], None, "", "", *inputs

    shown = [answers, task, every, slider, said, done]
    button.click(run, [tab.model, picture, sound, text], shown, show_progress_on=every, **ONE)
    task.input(show, [answers, task], [slider, said])
    tab.model.input(choose, tab.model, [*shown, picture, sound, text])


def describe_model(tab: str, name: str, source: str) -> str:
    """The purpose of a model and its limits, as Markdown."""
    for model in list_released():
        if str(model.folder) == source:
            return f"**{name}**: {model.task}. {WARNINGS[tab]} Licence of its weights: {model.license}."
    return f"**{name}**: a model of yours; its card names its purpose. {WARNINGS[tab]}"


def describe_restoration(name: str, before: np.ndarray, after: np.ndarray, strength: float, seconds: float) -> str:
    """The result of a restoration: model, size, strength, time, and what was changed or left out."""
    size, new_size = (f"{pixels.shape[1]} × {pixels.shape[0]} pixels" for pixels in (before, after))
    if size == new_size:
        change = np.abs(before.astype(np.float32) - after).mean() * 255 / np.iinfo(after.dtype).max
        done = f"**{name}** restored {size} at strength {strength:g} in {seconds:.1f} s."
        done += f" Its values changed by {change:.2g} of 255 levels on average."
    else:
        done = f"**{name}** enlarged {size} to {new_size} in {seconds:.1f} s."
    if before.dtype != np.uint8:
        done += " The picture has 16 bits per channel; the page shows 8."
    if before.shape[2] in (2, 4):
        done += " Its transparency is not shown."
    return done


def describe_sound(name: str, words: int, sound: float, seconds: float) -> str:
    heard = count_of(words, "word") if words else "no word"
    return f"**{name}** recognised {heard} in {sound:.1f} s of sound; the work took {seconds:.1f} s."


def write_examples(folder: Path) -> dict[str, str]:
    """Writes a picture of each damage and the sound `digits`; their paths by name."""
    scene = np.asarray(Image.open(Path(__file__).with_name("app_scene.png")))
    noisy = from_unit(gaussian_noise(scene, 25, np.random.default_rng(0)))
    blurred = from_unit(gaussian_noise(blur(scene, 1), 8, np.random.default_rng(0)))
    damaged = (noisy, jpeg(scene, 12), matlab_bicubic(scene, 0.5), blurred)
    for how, pixels in zip(DAMAGES, damaged, strict=True):
        Image.fromarray(pixels).save(folder / f"{how}.png")
    shutil.copy(Path(__file__).with_name("app_digits.flac"), folder / "digits.flac")
    return {path.stem: str(path) for path in folder.iterdir()}


def serve(
    models: dict[str, dict[str, str]],
    limits: Limits = work.LIMITS,
    allowed_hosts: Iterable[str] = (),
    server_name: str | None = None,
    **where: Any,
) -> tuple[Any, str, str | None]:
    """Serves the app; `where` are further options of gradio's `launch`. Letters are the system's: none is fetched."""
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    # Everybody may call a Space, by whatever name the Hub gives it.
    names = None if "SPACE_HOST" in os.environ else [*allowed_hosts, *([server_name] if server_name else [])]
    # `kill` ends it as Ctrl-C does, so that the folder of its files goes.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # As gradio does. The next app of this process finds it again.
    given = os.environ.get("GRADIO_TEMP_DIR") or tempfile.gettempdir()
    os.makedirs(given, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(os.environ.__setitem__, "GRADIO_TEMP_DIR", given)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-ext-app-", dir=given))
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder).resolve())
        # Not shared, whatever the environment says: a tunnel would make the page public.
        where |= {"share": False, "ssr_mode": False, "footer_links": [], "max_file_size": "100mb", "theme": theme}
        where |= {"app_kwargs": {"middleware": [Middleware(Guard, names)]}, "server_name": server_name}
        launched: tuple[Any, str, str | None] = build_app(models, limits).launch(**where)
        return launched
