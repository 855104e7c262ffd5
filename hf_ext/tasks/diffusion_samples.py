"""Many pictures in a folder or tar files, such as 50,000 for a score: each is a function of the seed and its number.

Pictures are drawn in batches of fixed numbers, which processes of `accelerate launch` share; a batch of which a
picture is missing is drawn again. So neither the processes nor a kill change a picture, and another batch size only
the last bits of sums. Classes or texts come in turn: picture n shows that of n modulo how many there are.
"""

import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_ext.data.files import count_examples, refuse_cut_tars
from hf_ext.distributed import Ranks
from hf_ext.files import hash_json, remove_leftovers_of, require_new, write_rows
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.progress import progress

from ..errors import DataError
from .diffusion_data import weights_hash, write_tar
from .diffusion_grids import default_batch_size, draw_pictures, write_picture
from .precompute import keep_settings

SETTINGS, METADATA = "sampling.json", "metadata.jsonl"
# Of every PNG: a chunk without content, its name and its sum.
_END = b"\0\0\0\0IEND\xaeB`\x82"


def sample_folder(
    pipeline: DisentangledDiTPipeline,
    conditions: Sequence[Any],
    count: int,
    out: Path,
    ranks: Ranks,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    shard_size: int | None = None,
    **options: Any,
) -> Path:
    """
    Draws pictures 0 to `count` - 1 of classes or texts into a folder, and goes on with one that has some of them.

    `datasets` reads the folder with the class or text of each picture. With `shard_size`, so many pictures are a tar
    file as webdataset has them, each beside its class (`.cls`) or text (`.txt`), which appears when it is whole.
    """
    size = batch_size or default_batch_size(pipeline, options)
    with ranks.together():
        wanted = {"seed": seed, "conditions": hash_json(list(conditions)), **_tell(options), **_parts(pipeline)}
    wanted["scheduler"] = {"class": type(pipeline.scheduler).__name__, **_tell(dict(pipeline.scheduler.config))}
    # A hidden name beside tar files: `datasets` would take it for data.
    settings = out / (SETTINGS if shard_size is None else f".{SETTINGS}")
    if shard_size is not None:
        wanted["shard_size"] = shard_size
    width = shard_size or size
    groups = [range(start, min(start + width, count)) for start in range(0, count, width)]

    def find_missing() -> list[range]:
        if not settings.exists():
            require_new(out)
        elif not [*out.glob("*.png"), *out.glob("*.tar")]:
            # Of a call that was refused, or killed before its first picture.
            settings.unlink()
        keep_settings(settings, wanted, f"{out} contains pictures of another model or other settings")
        remove_leftovers_of({_path(out, number, shard_size) for number in range(count)})
        if found := [group for group in groups if not _is_drawn(out, group, shard_size)]:
            # Who read the folder now would miss the new ones.
            (out / METADATA).unlink(missing_ok=True)
        return found

    missing = ranks.ask_first(find_missing)
    own, left = ranks.share(missing), sum(map(len, missing))
    with progress(total=count, initial=count - left, unit=" pictures", shown=ranks.index == 0, smoothing=0.05) as bar:

        def draw(numbers: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
            states = (np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] for number in numbers)
            shown = [conditions[number % len(conditions)] for number in numbers]
            pictures = draw_pictures(pipeline, shown, [int(state >> 1) for state in states], size, **options)
            for number, picture in zip(numbers, pictures, strict=True):
                yield number, picture
                # The other processes are as fast as this one.
                bar.update(min(ranks.count, count - bar.n))

        if shard_size is None:
            for number, picture in draw([number for group in own for number in group]):
                if not _is_whole(path := _path(out, number)):
                    write_picture(picture, path)
        else:
            for group in own:
                write_tar(_path(out, group.start, shard_size), _pack(draw(group), conditions))
    ranks.wait()
    if shard_size is None:
        ranks.ask_first(lambda: _write_metadata(pipeline, conditions, out))
    return out


def _path(out: Path, number: int, shard_size: int | None = None) -> Path:
    """The file of a picture, or the tar file that it is in."""
    return out / (f"{number:06d}.png" if shard_size is None else f"{number // shard_size:06d}.tar")


def _is_whole(path: Path) -> bool:
    """True for a picture; false for none, or the first part of a copy that ended."""
    if not path.is_file() or path.stat().st_size < len(_END):
        return False
    with path.open("rb") as file:
        file.seek(-len(_END), os.SEEK_END)
        return file.read() == _END


def _is_drawn(out: Path, group: range, shard_size: int | None) -> bool:
    """True if all pictures of a batch or a tar file are there. A file of an earlier call may have been its last."""
    if shard_size is None:
        return all(_is_whole(_path(out, number)) for number in group)
    try:
        refuse_cut_tars([path := _path(out, group.start, shard_size)])
        return count_examples(path) >= len(group)
    except (DataError, FileNotFoundError):
        # Cut on its way from elsewhere: drawn again.
        return False


def _pack(
    pictures: Iterable[tuple[int, Image.Image]], conditions: Sequence[Any]
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Pictures by their numbers as examples of a tar file, each beside its class or text."""
    for number, picture in pictures:
        condition, content = conditions[number % len(conditions)], io.BytesIO()
        picture.save(content, format="png")
        ending = "txt" if isinstance(condition, str) else "cls"
        yield f"{number:06d}", {"png": content.getvalue(), ending: str(condition).encode()}


def _tell(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON holds them; pictures by a hash of their content."""
    kept = {name: value for name, value in options.items() if not name.startswith("_")}
    return dict(json.loads(json.dumps(kept, default=lambda x: hashlib.sha256(np.asarray(x).tobytes()).hexdigest())))


def _parts(pipeline: DisentangledDiTPipeline) -> dict[str, Any]:
    """Hashes of all networks with their configurations, of the tokenizer, and the settings of texts."""
    found = {name: pipeline.config[name] for name in ("text_padding", "text_padding_noise", "max_text_length")}
    # Hashes are those of cast weights.
    found |= {} if pipeline.dtype == torch.float32 else {"dtype": str(pipeline.dtype)}
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            config: Any = part.config
            config = config if isinstance(config, dict) else config.to_diff_dict()
            # Hidden names, and the version, tell where it was saved and by what.
            known = {key: value for key, value in config.items() if key[0] != "_" and key != "transformers_version"}
            found[name] = hash_json([weights_hash(part), known])
        elif name == "tokenizer" and part is not None:
            # Its files would tell where it came from, too.
            found[name] = hash_json([type(part).__name__, part.get_vocab(), part.special_tokens_map])
    return found


def _write_metadata(pipeline: DisentangledDiTPipeline, conditions: Sequence[Any], out: Path) -> None:
    column = "text" if pipeline.transformer.config.num_classes is None else "label"
    # An earlier call may have drawn more.
    paths = itertools.takewhile(_is_whole, (_path(out, number) for number in itertools.count()))
    pairs = zip(paths, itertools.cycle(conditions), strict=False)
    write_rows(out / METADATA, ({"file_name": path.name, column: condition} for path, condition in pairs))
