"""
The app: restore, draw, listen and merge in a browser. `hf-ext app` serves it, and as `app.py` this file is a Space.

Functions above `build_app` take what a browser sends and give what it shows; those below lay out a tab each.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from starlette.middleware import Middleware
from transformers import AutoConfig

from hf_ext import EMRModel, SemanIRForImageRestoration
from hf_ext.answers.limits import Clock, Limits
from hf_ext.answers.merged_task import AnsweringTask
from hf_ext.app_guard import Guard
from hf_ext.audio_stream import Listener, Stream
from hf_ext.emr.artifact import read_tasks
from hf_ext.hub.checkpoints import split_revision
from hf_ext.hub.disclosure import cut_folders
from hf_ext.hub.released import list_released
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.restoration.comparison import show_colours
from hf_ext.restoration.files import read_8_bits
from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows
from hf_ext.tasks.kernel_plots import draw_merged, load_model
from hf_ext.tasks.signals import read_recording
from hf_ext.training.models import pipeline_index

TABS = ("restore", "draw", "listen", "merge")
# Default limits of a request.
LIMITS = Limits()
# Pictures of a class; they differ by their noise.
COLUMNS = 4
# Pixels of a picture on the page at least.
SIDE = 104
# Seconds of a file between updates of the page.
PIECE = 0.1
# Length of generated texts in tokens.
TOKENS = 40

# Sources and buttons of pictures; none of them sends pictures elsewhere.
_SOURCES, _SAVE = ["upload", "clipboard"], ["download", "fullscreen"]

Words = list[tuple[float, str]]
Pair = tuple[Image.Image, Image.Image]
# Result of a task of a merge: the picture before and after, or a text.
Answer = Pair | str


def find_models(sources: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """The models of each tab by name: the released ones, then `sources`, folders or Hub ids."""
    found: dict[str, dict[str, str]] = {tab: {} for tab in TABS}
    released = {str(model.folder): model.name for model in list_released()}
    for source in [*released, *(source for source in sources if source not in released)]:
        models, name = found[find_tab(source)], released.get(source) or name_model(source)
        possible = (name, *(f"{name} ({number})" for number in range(2, len(models) + 2)))
        models[next(each for each in possible if each not in models)] = source
    return found


def name_model(source: str) -> str:
    """The name of a model on the page; of a folder the last part only, so the path stays private."""
    if not Path(source).is_dir():
        return source
    folder = Path(source).resolve()
    return f"{folder.parent.name}/{folder.name}" if folder.name == "snapshot" else folder.name


def find_tab(source: str) -> str:
    """The tab that a model is for."""
    if read_tasks(source):
        return "merge"
    if pipeline_index(source) is not None:
        return "draw"
    name, revision = split_revision(source)
    config = AutoConfig.from_pretrained(name, revision=revision)
    if config.model_type == "semanir":
        return "restore"
    if config.architectures == ["MRConvForAudioClassification"]:
        return "listen"
    raise ValueError(
        f"{source} is a {', '.join(config.architectures or [config.model_type])}, for which the app has no tab; give "
        "a SemanIR model, a Disentangled DiT, an MRConvForAudioClassification or an artifact of hf-ext merge."
    )


def place() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.lru_cache(maxsize=8)
def load_restorer(source: str) -> Any:
    """A SemanIR model."""
    name, revision = split_revision(source)
    model: Any = SemanIRForImageRestoration.from_pretrained(name, revision=revision)
    return model.eval().to(place())


@functools.lru_cache(maxsize=2)
def load_drawer(source: str) -> DisentangledDiTPipeline:
    """The pipeline of a Disentangled DiT."""
    name, revision = split_revision(source)
    pipeline = DiffusionPipeline.from_pretrained(name, revision=revision)
    if not isinstance(pipeline, DisentangledDiTPipeline):
        raise ValueError(f"{source} contains a {type(pipeline).__name__}; give a DisentangledDiTPipeline.")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(place())


@functools.lru_cache(maxsize=2)
def load_merge(source: str) -> tuple[EMRModel, dict[str, AnsweringTask]]:
    """A merge, and what its tasks can be asked."""
    merged = EMRModel.from_pretrained(source, device=place())
    return merged, {name: AnsweringTask(merged, name) for name in merged.tasks}


def restore(source: str, picture: str | None, strength: float, progress: Any = None, limits: Limits = LIMITS) -> Pair:
    """A picture before and after its restoration, both as large as the result."""
    model = load_restorer(source)
    before = limits.read(require_given(picture, "picture")).pixels
    # One that enlarges has no picture of the same size to mix with.
    strength = strength if model.config.scale == 1 else 1.0
    after = limits.restore(model, before, strength=strength, progress=progress)
    return pair(before, after)


def pair(before: np.ndarray, after: np.ndarray) -> Pair:
    """Pixels as two pictures of one size."""
    result = Image.fromarray(show_colours(after))
    return Image.fromarray(show_colours(before)).resize(result.size, Image.Resampling.BICUBIC), result


def require_given(given: str | None, what: str) -> str:
    """The given value; raises an error if it is missing."""
    if not given:
        raise ValueError(f"There is no {what} yet; add one first.")
    return given


def list_classes(source: str) -> list[str]:
    """Names, or numbers, of the classes of a DiT; none of one that takes texts."""
    pipeline = load_drawer(source)
    names = pipeline.config.id2label or {}
    return [str(names.get(str(number), number)) for number in range(pipeline.transformer.config.num_classes or 0)]


def list_controls(source: str) -> set[str]:
    """The controls that a DiT takes."""
    return set(load_drawer(source).transformer.config.control_alpha)


def draw(
    source: str, label: str, size: float, top: float, left: float, flip: bool, steps: int, guidance: float, seed: int
) -> Image.Image:
    """
    Pictures of a class or text with the controls that are usual, and below them, from the same noise, with those of
    the others that the model takes. `size`, `top` and `left` are shares of the picture's own size.
    """
    pipeline = load_drawer(source)
    height, width = pipeline.image_size(None, None)
    controls = {
        "original_size": (max(1, round(size * height)), max(1, round(size * width))),
        "crop": (round(top * height), round(left * width)),
        "flip": flip,
    }
    controls = {name: value for name, value in controls.items() if name in list_controls(source)}
    classes = list_classes(source)
    wanted: Any = classes.index(label) if label in classes else require_given(label, "class or text")
    options: dict[str, Any] = {"num_inference_steps": int(steps), "guidance_scale": guidance}
    kinds: tuple[dict[str, Any], ...] = ({}, controls)
    rows = [sample_rows(pipeline, [wanted], COLUMNS, int(seed), **options, **more)[0] for more in kinds]
    return draw_grid(rows, ["usual", "yours"], SIDE)


def hear_file(source: str, path: str | None) -> Iterator[Words]:
    """The words of a sound file so far, again and again while it is heard."""
    path, listener = require_given(path, "sound"), Listener(source)
    sound = read_recording({"path": path, "bytes": None}, listener.rate)
    if not len(sound):
        raise ValueError("The sound is empty; record or choose another one.")
    stream, words, size = Stream(listener, listener.rate), Words(), int(PIECE * listener.rate)
    for start in range(0, len(sound), size):
        words += stream.hear(sound[start : start + size], last=start + size >= len(sound))
        yield words


def hear_piece(
    source: str, heard: tuple[Stream, Words] | None, piece: tuple[int, np.ndarray] | None
) -> tuple[tuple[Stream, Words] | None, Words]:
    """The state of a microphone after one more piece of sound: for the next one, and for the page."""
    if piece is None:
        return heard, heard[1] if heard else Words()
    rate, samples = piece
    stream, words = heard or (Stream(Listener(source), rate), Words())
    mono = samples if samples.ndim == 1 else samples.mean(1)
    words = words + stream.hear(mono / np.float32(32768))
    return (stream, words), words


def end_sound(heard: tuple[Stream, Words] | None) -> tuple[None, Words]:
    """The words of a microphone that is switched off, with the last one, after which no silence came."""
    if heard is None:
        return None, Words()
    stream, words = heard
    return None, words + stream.hear(np.zeros(0), last=True)


def show_words(words: Words) -> str:
    """Words in a large line, and the second at which each ended, as Markdown."""
    if not words:
        return "## …"
    rows = "".join(f"| {second:.2f} | {word} |\n" for second, word in words)
    return f"## {' '.join(word for _, word in words)}\n\n| second | heard |\n|---:|:---|\n{rows}"


def list_inputs(source: str) -> set[str]:
    """The inputs that a merge takes: of picture, sound and text those that some task reads."""
    kinds = {"Image": "picture", "Audio": "sound", "Sequence": "text"}
    return {kinds[task.reads] for task in load_merge(source)[1].values()}


def answer(
    source: str, name: str, picture: str | None, sound: str | None, text: str | None, *, limits: Limits = LIMITS
) -> Answer:
    """The answer of one task of a merge to the input that it takes."""
    merged, tasks = load_merge(source)
    task = tasks[name]
    if task.kind == "restoration":
        before = limits.read(require_given(picture, "picture")).pixels
        with merged.task(name) as model:
            return pair(before, limits.restore(model, before))
    if task.kind == "generation":
        prompt = task.encode(require_given(text, "text"), TOKENS)["input_ids"]
        return task.decode(task.generate(prompt, [], TOKENS)[0])
    if task.reads == "Image":
        label, probabilities = task.classify(read_8_bits(require_given(picture, "picture"), limits.megapixels))
    elif task.reads == "Audio":
        recording = {"path": require_given(sound, "sound"), "bytes": None}
        label, probabilities = task.classify(read_recording(recording, task.reader.sampling_rate).tolist())
    else:
        label, probabilities = task.classify(require_given(text, "text"))
    return f"{label}, {max(probabilities):.3f}"


def answer_all(source: str, *given: str | None, limits: Limits = LIMITS) -> dict[str, Answer]:
    """The answer of each task of a merge to the same picture, sound or text."""
    return {name: answer(source, name, *given, limits=limits) for name in load_merge(source)[1]}


def told(function: Callable[..., Any], *given: Any, clock: Clock | None = None, **options: Any) -> Any:
    """The result of a function within a time; errors of its input are shown in their own words, without folders."""
    try:
        with clock or contextlib.nullcontext():
            return function(*given, **options)
    except (ValueError, TypeError, OSError, ImportError, MemoryError, FloatingPointError, RuntimeError) as error:
        raise gr.Error(cut_folders(str(error)), print_exception=False) from error


@dataclass(frozen=True)
class Tab:
    """Materials of a tab: its models by name, the choice of one, and the limits of a request."""

    sources: dict[str, str]
    model: gr.Dropdown
    limits: Limits

    @property
    def first(self) -> str:
        """The model that is shown first."""
        return next(iter(self.sources.values()))

    def ask(self, function: Callable[..., Any], name: str, *given: Any, **options: Any) -> Any:
        """The answer of a function of this file for the model of a name."""
        return told(function, self.sources[name], *given, clock=self.limits.clock(), **options)


def build_app(models: dict[str, dict[str, str]], limits: Limits = LIMITS) -> gr.Blocks:
    """The page with its four tabs; `models` are those of [`find_models`], `limits` those of a request."""
    # Nothing is told to anybody, and what was uploaded goes after an hour.
    with gr.Blocks(title="hf-ext", analytics_enabled=False, delete_cache=(60, 3600)) as app:
        gr.Markdown(
            "# hf-ext\nFour NeurIPS 2024 methods on small models. The models run on the machine that serves this page."
        )
        for tab, lay_out in zip(TABS, (_restore_tab, _draw_tab, _listen_tab, _merge_tab), strict=True):
            with gr.Tab(tab.capitalize(), id=tab):
                if models[tab]:
                    choice = gr.Dropdown(list(models[tab]), label="Model", elem_id=f"{tab}-model")
                    lay_out(Tab(models[tab], choice, limits))
                else:
                    gr.Markdown("There is no model for this tab. Give one: `hf-ext app MODEL`, a folder or org/name.")
    return app


def _restore_tab(tab: Tab) -> None:
    with gr.Row():
        with gr.Column():
            picture = gr.Image(label="Picture", type="filepath", image_mode=None, sources=_SOURCES)
            strength = gr.Slider(0, 1, 1, step=0.05, label="Strength", elem_id="restore-strength")
            gr.Markdown("Blend of input and result. A model that enlarges always returns its full result.")
            button = gr.Button("Restore", variant="primary", elem_id="restore-run")
        slider = gr.ImageSlider(label="Before and after", format="png", interactive=False, elem_id="restore-result")

    def run(name: str, path: str | None, share: float, bar: Any = gr.Progress()) -> Any:  # noqa: B008
        def show(done: int, all_of_it: int) -> None:
            bar((done, all_of_it), unit="pixels")

        return tab.ask(restore, name, path, share, show, limits=tab.limits)

    button.click(run, [tab.model, picture, strength], slider)


def _draw_tab(tab: Tab) -> None:
    with gr.Row():
        with gr.Column():
            classes = list_classes(tab.first)
            label = gr.Dropdown(
                classes, value=(classes or [""])[0], allow_custom_value=True, label="Class, or text of a text model"
            )
            takes = list_controls(tab.first)
            sized = "original_size" in takes
            size = gr.Slider(0.25, 4, 1, step=0.25, label="Size of the original", elem_id="draw-size", visible=sized)
            top = gr.Slider(0, 1, 0, step=0.125, label="Crop: top", visible="crop" in takes)
            left = gr.Slider(0, 1, 0, step=0.125, label="Crop: left", visible="crop" in takes)
            flip = gr.Checkbox(label="Flip", visible="flip" in takes)
            with gr.Accordion("More", open=False):
                steps = gr.Slider(1, 100, 20, step=1, label="Steps")
                guidance = gr.Slider(1, 8, 3, step=0.5, label="Guidance")
                seed = gr.Number(0, label="Seed of the noise", precision=0, minimum=0)
            button = gr.Button("Draw", variant="primary", elem_id="draw-run")
        with gr.Column():
            result = gr.Image(show_label=False, format="png", buttons=_SAVE, interactive=False, elem_id="draw-result")
            gr.Markdown(
                "Both rows start from the same noise. The upper row has the usual controls, the lower row those of "
                "the sliders, as shares of the picture's size. A control that did not vary in training has little "
                "effect."
            )
    button.click(
        functools.partial(tab.ask, draw), [tab.model, label, size, top, left, flip, steps, guidance, seed], result
    )

    def choose(name: str) -> tuple[Any, ...]:
        names, takes = tab.ask(list_classes, name), list_controls(tab.sources[name])
        sliders = [gr.Slider(visible=each in takes) for each in ("original_size", "crop", "crop")]
        return gr.Dropdown(names, value=(names or [""])[0]), *sliders, gr.Checkbox(visible="flip" in takes)

    tab.model.input(choose, tab.model, [label, size, top, left, flip])


def _listen_tab(tab: Tab) -> None:
    heard = gr.State()
    with gr.Row():
        with gr.Column():
            microphone = gr.Audio(sources=["microphone"], streaming=True, label="Microphone", elem_id="listen-mic")
            sound = gr.Audio(sources=["upload"], type="filepath", label="File", buttons=[], elem_id="listen-file")
            button = gr.Button("Listen to the file", variant="primary", elem_id="listen-run")
        words = gr.Markdown(show_words([]), elem_id="listen-result", container=True)
    gr.Markdown("Kernels: how far back, in samples, each layer hears, and with which sign.")
    kernels = gr.Image(
        draw_merged(load_model(tab.first)), show_label=False, format="png", interactive=False, buttons=_SAVE
    )

    def run(name: str, path: str | None) -> Iterator[str]:
        clock = tab.limits.clock()
        pieces = told(hear_file, tab.sources[name], path, clock=clock)
        while (found := told(next, pieces, None, clock=clock)) is not None:
            yield show_words(found)

    def run_piece(name: str, state: Any, piece: Any) -> tuple[Any, str]:
        state, found = tab.ask(hear_piece, name, state, piece)
        return state, show_words(found)

    def end(state: Any) -> tuple[Any, str]:
        state, found = told(end_sound, state)
        return state, show_words(found)

    button.click(run, [tab.model, sound], words)
    microphone.start_recording(lambda: (None, show_words([])), None, [heard, words])
    microphone.stream(run_piece, [tab.model, heard, microphone], [heard, words], stream_every=0.3)
    microphone.stop_recording(end, heard, [heard, words])
    tab.model.input(
        lambda name: (None, tab.ask(lambda source: draw_merged(load_model(source)), name)), tab.model, [heard, kernels]
    )


def _merge_tab(tab: Tab) -> None:
    answers, takes = gr.State({}), list_inputs(tab.first)
    with gr.Row():
        with gr.Column():
            picture = gr.Image(
                label="Picture", type="filepath", image_mode=None, sources=_SOURCES, visible="picture" in takes
            )
            sound = gr.Audio(sources=["upload"], type="filepath", label="Sound", buttons=[], visible="sound" in takes)
            text = gr.Textbox(label="Text", visible="text" in takes)
            button = gr.Button("Ask every task", variant="primary", elem_id="merge-run")
            task = gr.Radio(list(load_merge(tab.first)[1]), label="Task", elem_id="merge-task")
        with gr.Column():
            slider = gr.ImageSlider(label="Before and after", format="png", interactive=False, elem_id="merge-result")
            said = gr.Markdown(elem_id="merge-text")
    options: dict[str, Any] = {"height": "auto", "buttons": _SAVE, "interactive": False, "elem_id": "merge-all"}
    every = gr.Gallery(label="Every task", format="png", columns=4, **options)

    def show(found: dict[str, Answer], name: str | None) -> tuple[Any, str]:
        one = found.get(name or "", "")
        lines = [f"**{key}**: {value}" for key, value in found.items() if isinstance(value, str)]
        return (None if isinstance(one, str) else one), "\n\n".join(lines)

    def run(name: str, *given: str | None) -> tuple[Any, ...]:
        found = tab.ask(answer_all, name, *given, limits=tab.limits)
        first = next(iter(found))
        pictures = [(value[1], key) for key, value in found.items() if not isinstance(value, str)]
        return found, gr.Radio(value=first), pictures, *show(found, first)

    def choose(name: str) -> tuple[Any, ...]:
        takes = tab.ask(list_inputs, name)
        inputs = (gr.Image(visible="picture" in takes), gr.Audio(visible="sound" in takes))
        tasks = gr.Radio(list(load_merge(tab.sources[name])[1]), value=None)
        return {}, tasks, [], None, "", *inputs, gr.Textbox(visible="text" in takes)

    shown = [answers, task, every, slider, said]
    button.click(run, [tab.model, picture, sound, text], shown)
    task.input(show, [answers, task], [slider, said])
    tab.model.input(choose, tab.model, [*shown, picture, sound, text])


def serve(
    models: dict[str, dict[str, str]],
    limits: Limits = LIMITS,
    allowed_hosts: Iterable[str] = (),
    server_name: str | None = None,
    **where: Any,
) -> tuple[Any, str, str | None]:
    """Serves the app; `where` are further options of gradio's `launch`. Letters are the system's: none is fetched."""
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    # Everybody may call a Space, by whatever name the Hub gives it.
    names = None if "SPACE_HOST" in os.environ else [*allowed_hosts, *([server_name] if server_name else [])]
    # Not shared, whatever the environment says: a tunnel would make the page public.
    launched: tuple[Any, str, str | None] = build_app(models, limits).launch(
        theme=theme,
        footer_links=[],
        ssr_mode=False,
        max_file_size="100mb",
        share=False,
        app_kwargs={"middleware": [Middleware(Guard, names)]},
        server_name=server_name,
        **where,
    )
    return launched


if __name__ == "__main__":
    serve(find_models())
