"""Restores many picture files; a failure does not stop the others."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hf_ext.distributed import Ranks
from hf_ext.files import whole_file
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration

from .camera import Frames, Picture
from .damage import choose_strength, estimate_damage
from .encoding import DEFAULT, Encoding, encode_frames, require_place
from .files import read_frames, require_unturned
from .jobs import FORMATS, Job
from .records import Records
from .tiles import check_options, lacks_memory, restore_image


class Report(NamedTuple):
    """Outcome of the jobs: files written, what was wrong by name of the input, and megapixels of all frames."""

    restored: list[Path]
    failed: dict[str, str]
    megapixels: float


def restore_files(
    model: SemanIRForImageRestoration | None,
    jobs: list[Job],
    *,
    encoding: Encoding = DEFAULT,
    records: Records | None = None,
    max_megapixels: float = 200.0,
    progress: Callable[[float], None] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Report:
    """
    Restores pictures one after the other, of animations and documents every frame and page; the options are those of
    [`~tiles.restore_image`]. The caller has made sure that results can be written.

    Processes of `accelerate launch`, which all have the same `jobs`, share them; one that gets none needs no model.
    Each has the report of all. `progress` is called with the pictures done by this process, `say` with what was
    wrong with a picture, or what its format cannot hold: of several processes in the end, by the first.
    """
    # By the number of a job: the megapixels of its frames, or None where it failed, and what is to be said of it.
    ranks, outcomes = Ranks(), dict[int, tuple[float | None, list[str]]]()
    # Once, not for each picture.
    strength = None if model is None else check_options(model, **options)
    for number, job in ranks.share(list(enumerate(jobs))):
        assert model is not None
        done, texts = None, list[str]()
        try:
            if records is not None and records.is_done(job):
                outcomes[number] = 0.0, []
                continue
            if model.config.demosaicks:
                require_unturned(job.source)
            frames, restored = read_frames(job.source, max_megapixels), list[Picture]()
            require_place(frames, FORMATS[job.ending.lower()], 1 if model.config.demosaicks else model.config.scale)
            for index, picture in enumerate(frames.pictures):
                chosen = options
                if strength == "auto":
                    damage = estimate_damage(picture.pixels)
                    chosen = {**options, "strength": choose_strength(damage)}
                    more = "" if chosen["strength"] == 1 else "; if it is blurred, give 1"
                    texts.append(f"{damage}: strength {chosen['strength']:g}{more}")
                share = 1 / len(frames.pictures)
                shown = progress and _count_from(len(outcomes) + index * share, share, progress)
                pixels = restore_image(model, picture.pixels, progress=shown, **chosen)
                restored.append(picture._replace(pixels=pixels))
            # Of many frames it is said once.
            texts = list(dict.fromkeys(texts))
            _write(job, frames._replace(pictures=restored), encoding, records, texts.append)
            done = sum(picture.pixels[..., 0].size for picture in frames.pictures) / 1e6
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not lacks_memory(error):
                raise
            texts = [_describe(job, error)]
        outcomes[number] = done, [f"{job.name}: {text}" for text in texts]
        if say is not None and ranks.count == 1:
            for text in outcomes[number][1]:
                say(text)
    joined = sorted(item for part in ranks.gather(outcomes) for item in part.items())
    report = Report([], {}, sum(done or 0.0 for _, (done, _) in joined))
    for number, (done, texts) in joined:
        if done is None:
            report.failed[jobs[number].name] = texts[0]
        elif done and (place := jobs[number].out) is not None:
            report.restored.append(place)
        if say is not None and ranks.index == 0 and ranks.count > 1:
            for text in texts:
                say(text)
    return report


def _count_from(before: float, share: float, progress: Callable[[float], None]) -> Callable[[int, int], None]:
    return lambda pixels, total: progress(before + share * pixels / total)


def _write(job: Job, frames: Frames, encoding: Encoding, records: Records | None, say: Callable[[str], None]) -> None:
    data = encode_frames(frames, FORMATS[job.ending.lower()], encoding, say)
    if job.out is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    if job.out.exists() and not job.replace and not (records is not None and records.is_done(job)):
        raise FileExistsError(f"{job.out} exists; it is replaced only if overwriting is allowed.")
    if records is not None:
        records.add(job, data)
    with whole_file(job.out) as file:
        file.write(data)


def _describe(job: Job, error: Exception) -> str:
    if lacks_memory(error):
        return "not enough memory; try --tile auto"
    name = "the picture" if isinstance(job.source, bytes) else str(job.source)
    return (str(error) or type(error).__name__).removeprefix(name).strip()
