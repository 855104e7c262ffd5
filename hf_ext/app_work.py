"""The work of the app: what a browser sends goes in, what the page shows comes out."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from diffusers import DiffusionPipeline
from gradio.context import LocalContext
from PIL import Image
from transformers import AutoConfig

from hf_ext import EMRModel, restore_image
from hf_ext.answers.limits import ClientLeft, Clock, Limits, open_sound, read_sound
from hf_ext.answers.merged_task import AnsweringTask
from hf_ext.audio_stream import Listener, Stream
from hf_ext.distributed import require_device
from hf_ext.emr.artifact import read_tasks
from hf_ext.errors import UsageError
from hf_ext.hub.checkpoints import split_revision
from hf_ext.hub.disclosure import cut_folders
from hf_ext.hub.released import list_released
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.restoration.encoding import to_8_bits
from hf_ext.restoration.restorer import load_model
from hf_ext.semanir.image_processing_semanir import pixels_to_image
from hf_ext.tasks.diffusion_grids import default_batch_size, draw_grid, sample_rows
from hf_ext.tasks.pictures import in_colours
from hf_ext.training.models import pipeline_index

TABS = ("restore", "draw", "listen", "merge")
# What a request may take unless the command says otherwise.
LIMITS = Limits()
# Pictures of a class; they differ by their noise.
COLUMNS = 4
# Pixels of a picture on the page at least.
SIDE = 104
# Seconds of a file that are heard before the page is told.
PIECE = 0.1
# Tokens that a task of texts answers with.
TOKENS = 40
# Letters of an error on the page, and seconds for which it stays.
MOST, SHOWN = 600, 60
# Side of the picture on which the work for a pixel is counted.
PROBE = 64
# Of a drawing, as the page calls what a user can clear.
_INPUTS = ("class or text", "size", "top", "left", "flip", "number of steps", "guidance", "seed")
# The input of a merge by what its task reads.
_READ_AS = {"Image": "picture", "Audio": "sound", "Sequence": "text"}

Words = list[tuple[float, str]]
Pair = tuple[Image.Image, Image.Image]
# What a task of a merge says of an input: the picture before and after, or a text.
Answer = Pair | str


class NoTab(UsageError):
    """A model that no tab of the app is for."""


def find_models(sources: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """The models of each tab by name: the released ones, then `sources`, folders or Hub ids."""
    found: dict[str, dict[str, str]] = {tab: {} for tab in TABS}
    released = {str(model.folder): model.name for model in list_released()}
    for source in [*released, *(source for source in sources if source not in released)]:
        try:
            tab = find_tab(source)
        except NoTab:
            if source in sources:
                raise
            continue
        models, name, folder = found[tab], released.get(source, source), Path(source).resolve()
        if name == source and folder.is_dir():
            # The last part only, so the path stays private.
            name = f"{folder.parent.name}/{folder.name}" if folder.name == "snapshot" else folder.name
        possible = (name, *(f"{name} ({number})" for number in range(2, len(models) + 2)))
        models[next(each for each in possible if each not in models)] = source
    return found


def find_tab(source: str) -> str:
    """The tab that a model is for; raises [`NoTab`] for mosaics, texts and other inputs without a tab."""
    if read_tasks(source):
        return "merge"
    if pipeline_index(source) is not None:
        return "draw"
    name, revision = split_revision(source)
    config = AutoConfig.from_pretrained(name, revision=revision)
    if config.model_type == "semanir" and not config.demosaicks:
        return "restore"
    if config.architectures == ["MRConvForAudioClassification"]:
        return "listen"
    kind = ", ".join(config.architectures or [config.model_type])
    kind += " of mosaics" if config.model_type == "semanir" else ""
    raise NoTab(f"{source} is a {kind}, for which the app has no tab: `hf-ext app --help` says what it takes.")


load_restorer = functools.lru_cache(maxsize=8)(load_model)


@functools.lru_cache(maxsize=2)
def load_drawer(source: str) -> DisentangledDiTPipeline:
    name, revision = split_revision(source)
    pipeline = DiffusionPipeline.from_pretrained(name, revision=revision)
    if not isinstance(pipeline, DisentangledDiTPipeline):
        raise ValueError(f"{source} contains a {type(pipeline).__name__}; give a DisentangledDiTPipeline.")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(require_device(None))


@functools.lru_cache(maxsize=2)
def load_merge(source: str) -> tuple[EMRModel, dict[str, AnsweringTask]]:
    """A merge, and what its tasks can be asked."""
    merged = EMRModel.from_pretrained(source, device=require_device(None))
    return merged, {name: AnsweringTask(merged, name) for name in merged.tasks}


def follow(bar: Callable[..., Any]) -> Callable[[float], None]:
    """Shows a share of the work, which never falls, on a bar of gradio, and after a second the time left."""
    begun, reached = time.monotonic(), 0.0

    def show(share: float) -> None:
        nonlocal reached
        reached, passed = max(reached, share), time.monotonic() - begun
        settled = reached > 0 and passed > 1
        bar(reached, desc=f"about {passed * (1 - reached) / reached:.0f} s left" if settled else "just begun")

    return show


def restore(
    source: str, picture: str | None, strength: float, limits: Limits = LIMITS, bar: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The pixels of a picture before and after its restoration; a bar follows the work of the request."""
    model = load_restorer(source)
    picture, strength = require_given(picture, "picture"), require_given(strength, "strength")
    before = limits.read(picture).pixels
    # One that enlarges has no picture of the same size to mix with. The whole is what the model does by itself.
    chosen = strength if model.config.scale == 1 and strength < 1 else None
    if bar is not None:
        clock: Clock = Clock.running.clock
        begun, expected = clock.work, count_work(source, before.shape[2]) * before.shape[0] * before.shape[1]
        show = follow(bar)
        clock.watch = lambda: show(min((clock.work - begun) / max(1, expected), 0.99))
    return before, limits.restore(model, before, strength=chosen)


@functools.lru_cache(maxsize=32)
def count_work(source: str, channels: int) -> float:
    """Numbers that torch computes for a pixel of a picture."""
    clock = Clock(LIMITS.seconds)
    with clock:
        restore_image(load_restorer(source), np.zeros((PROBE, PROBE, channels), np.uint8))
    return clock.work / PROBE**2


def show_colours(pixels: np.ndarray) -> Image.Image:
    """Pixels as a screen shows them: RGB of 8 bits, what is transparent is white."""
    return in_colours(pixels_to_image(to_8_bits(pixels)), "RGB")


def pair(before: np.ndarray, after: np.ndarray) -> Pair:
    result = show_colours(after)
    return show_colours(before).resize(result.size, Image.Resampling.BICUBIC), result


def require_given(given: Any, what: str) -> Any:
    if given in (None, ""):
        raise ValueError(f"There is no {what} yet; add one first.")
    return given


def list_classes(source: str) -> list[str]:
    """Names, or numbers, of the classes of a DiT, of those with one name both; none of one that takes texts."""
    pipeline = load_drawer(source)
    told = pipeline.config.id2label or {}
    names = [str(told.get(str(number), number)) for number in range(pipeline.transformer.config.num_classes or 0)]
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]


def list_controls(source: str) -> set[str]:
    return set(load_drawer(source).transformer.config.control_alpha)


def draw(source: str, *inputs: Any, bar: Any = None) -> Image.Image:
    """
    Pictures of a class or text with the controls that are usual, and below them, from the same noise, with those of
    the inputs that the model takes. Size, top and left are shares of the picture's own size.
    """
    label, size, top, left, flip, steps, guidance, seed = inputs
    for what, given in zip(_INPUTS, inputs, strict=True):
        require_given(given, what)
    pipeline = load_drawer(source)
    height, width = pipeline.image_size(None, None)
    sides, place = (max(1, round(size * height)), max(1, round(size * width))), (top * height, left * width)
    controls = {"original_size": sides, "crop": tuple(map(round, place)), "flip": flip}
    controls = {name: value for name, value in controls.items() if name in list_controls(source)}
    classes = list_classes(source)
    wanted: Any = classes.index(label) if label in classes else label
    options: dict[str, Any] = {"num_inference_steps": int(steps), "guidance_scale": guidance}
    kinds: tuple[dict[str, Any], ...] = ({}, controls)
    if bar is not None:
        done, show = 0, follow(bar)
        total = len(kinds) * int(steps) * -(-COLUMNS // default_batch_size(pipeline, options))

        def tell(*_: Any) -> dict[str, Any]:
            nonlocal done
            done += 1
            show(done / total)
            return {}

        options["callback_on_step_end"] = tell
    rows = [sample_rows(pipeline, [wanted], COLUMNS, int(seed), **options, **more)[0] for more in kinds]
    return draw_grid(rows, ["default", "yours"], SIDE)


def hear_file(source: str, path: str | None, limits: Limits = LIMITS) -> Iterator[Words]:
    """The words of a sound file so far, again and again while it is heard."""
    path, listener = require_given(path, "sound"), Listener(source)
    with open_sound(path, listener.rate, limits) as file:
        stream, words, size = Stream(listener, file.samplerate), Words(), max(1, int(PIECE * file.samplerate))
        while file.tell() < file.frames and len(sound := file.read(size, dtype="float32")):
            words = words + stream.hear(sound, last=file.tell() >= file.frames)
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


def show_words(words: Words, said: str = "No word is recognised yet.") -> str:
    """Words in a large line, and the second at which each ended, as Markdown, before a sentence."""
    if not words:
        return said
    rows = "".join(f"| {second:.2f} | {word} |\n" for second, word in words)
    return f"## {' '.join(word for _, word in words)}\n\n| second | heard |\n|---:|:---|\n{rows}\n{said}"


def list_inputs(source: str) -> set[str]:
    """The inputs that a merge takes: of picture, sound and text those that some task reads."""
    return {_READ_AS[task.reads] for task in load_merge(source)[1].values()}


def answer(
    source: str, name: str, picture: str | None, sound: str | None, text: str | None, *, limits: Limits = LIMITS
) -> Answer:
    """The answer of one task of a merge to the input that it takes."""
    merged, tasks = load_merge(source)
    task = tasks[name]
    inputs: dict[str, Any] = {"picture": picture, "sound": sound, "text": text}
    given = require_given(inputs[_READ_AS[task.reads]], _READ_AS[task.reads])
    if task.kind == "restoration":
        before = limits.read(given).pixels
        with merged.task(name) as model:
            return pair(before, limits.restore(model, before))
    if task.kind == "generation":
        prompt = task.encode(given, TOKENS)["input_ids"]
        return task.decode(task.generate(prompt, [], TOKENS)[0])
    if task.reads == "Image":
        given = limits.read_8_bits(given)
    elif task.reads == "Audio":
        given = read_sound(given, task.reader.sampling_rate, limits)
    label, probabilities = task.classify(given)
    return f"{label}, {max(probabilities):.3f}"


def answer_all(source: str, *given: str | None, limits: Limits = LIMITS, bar: Any = None) -> dict[str, Answer]:
    """The answer of each task of a merge to the same picture, sound or text."""
    names, found = list(load_merge(source)[1]), {}
    show = follow(bar) if bar else lambda share: None
    for number, name in enumerate(names):
        show(number / len(names))
        found[name] = answer(source, name, *given, limits=limits)
    return found


def told(function: Callable[..., Any], *given: Any, clock: Clock | None = None, **options: Any) -> Any:
    """The result of a function within a time; errors of its input are shown in their own words, without folders."""
    try:
        with clock or contextlib.nullcontext():
            if clock is not None:
                clock.check()
            return function(*given, **options)
    except gr.Error:
        raise
    except (ValueError, TypeError, OSError, ImportError, MemoryError, FloatingPointError, RuntimeError) as error:
        raise gr.Error(say_error(error), duration=SHOWN, title="Not done", print_exception=False) from error
    except ClientLeft as error:
        raise gr.Error(say_error(error), print_exception=False) from error
    except Exception as error:
        raise gr.Error(f"The app failed ({type(error).__name__}); see its log.", title="Not done") from error


def say_error(error: Exception) -> str:
    """A sentence for the page, which names no folder and has an end."""
    sentence = cut_folders(str(error)) or f"{type(error).__name__}: out of memory, or a part of the app failed."
    return sentence if len(sentence) <= MOST else f"{sentence[:MOST]} [cut]"


def find_left() -> Callable[[], bool]:
    """Tells of the request of this thread if its client has left: gradio knows of its connection."""
    blocks, name = LocalContext.blocks.get(None), LocalContext.event_id.get(None)
    events = blocks._queue.event_ids_to_events if blocks is not None else {}
    if name is None or name not in events:
        return lambda: False
    event = events[name]
    return lambda: not event.alive or event.closed or name not in events
