"""Many pictures in a folder, such as 50,000 for a score: each is a function of the seed and its number.

Pictures are drawn in batches of fixed numbers, which processes of `accelerate launch` share; a batch of which a
picture is missing is drawn again. So neither the processes nor a kill change a picture, and another batch size only
the last bits of sums. Classes or texts come in turn: picture n shows that of n modulo how many there are.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_ext.distributed import Ranks
from hf_ext.files import require_new, whole_file
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.progress import progress

from .diffusion_grids import default_batch_size, draw_pictures, write_picture
from .precompute import keep_settings

SETTINGS, METADATA = "sampling.json", "metadata.jsonl"


def sample_folder(
    pipeline: DisentangledDiTPipeline,
    conditions: Sequence[Any],
    count: int,
    out: Path,
    ranks: Ranks,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    **options: Any,
) -> Path:
    """
    Draws pictures 0 to `count` - 1 into a folder, and goes on with one that has some of them.

    Args:
        pipeline ([`DisentangledDiTPipeline`]): The model.
        conditions (`Sequence`): Classes or texts, in turn.
        count (`int`): Pictures; a larger one later adds to them.
        out (`Path`): The folder, which `datasets` reads with the class or text of each picture.
        ranks ([`Ranks`]): The processes that share the work.
        seed (`int`, defaults to 0): Another seed, other pictures.
        batch_size (`int`, *optional*): Pictures at once.
        options (`Any`): Of a call of the pipeline.

    Raises:
        OtherRun: If the folder has pictures of another model or other settings.
    """
    size = batch_size or default_batch_size(pipeline, options)
    with ranks.together():
        weights = weights_digest(pipeline.transformer)
    given = hashlib.sha256(json.dumps(list(conditions)).encode()).hexdigest()
    wanted = {"weights": weights, "seed": seed, "conditions": given, **_tell(options)}
    wanted["scheduler"] = {"class": type(pipeline.scheduler).__name__, **_tell(dict(pipeline.scheduler.config))}
    batches = [range(start, min(start + size, count)) for start in range(0, count, size)]

    def find_missing() -> list[range]:
        if not (out / SETTINGS).exists():
            require_new(out)
        keep_settings(out / SETTINGS, wanted, f"{out} contains pictures of another model or other settings")
        return [batch for batch in batches if not all(_path(out, number).is_file() for number in batch)]

    missing = ranks.ask_first(find_missing)
    numbers = [number for batch in ranks.share(missing) for number in batch]
    left = sum(map(len, missing))
    seeds = [int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1) for number in numbers]
    shown = [conditions[number % len(conditions)] for number in numbers]
    with progress(total=count, initial=count - left, unit=" pictures", shown=ranks.index == 0, smoothing=0.05) as bar:
        for number, picture in zip(numbers, draw_pictures(pipeline, shown, seeds, size, **options), strict=True):
            if not (path := _path(out, number)).is_file():
                write_picture(picture, path)
            # The other processes are as fast as this one.
            bar.update(min(ranks.count, count - bar.n))
    ranks.wait()
    ranks.ask_first(lambda: _write_metadata(pipeline, conditions, out))
    return out


def _path(out: Path, number: int) -> Path:
    return out / f"{number:06d}.png"


def _tell(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON holds them; pictures by a hash of their content."""
    plain = (str, int, float, bool, type(None))
    return {
        name: value
        if isinstance(value, plain)
        else [*value]
        if isinstance(value, tuple | list)
        else hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
        for name, value in options.items()
        if not name.startswith("_")
    }


def weights_digest(model: torch.nn.Module) -> str:
    """A hash of the weights: a folder of a training may hold others tomorrow."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _write_metadata(pipeline: DisentangledDiTPipeline, conditions: Sequence[Any], out: Path) -> None:
    """A line for each picture, as `datasets` reads a folder of pictures."""
    column = "text" if pipeline.transformer.config.num_classes is None else "label"
    with whole_file(out / METADATA, "w") as file:
        # An earlier call may have drawn more.
        paths = (_path(out, number) for number in itertools.count())
        for number, path in enumerate(itertools.takewhile(Path.is_file, paths)):
            row = {"file_name": path.name, column: conditions[number % len(conditions)]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
