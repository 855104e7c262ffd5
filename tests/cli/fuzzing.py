"""What a fuzz test feeds to `hf-ext`: small valid files of each kind, and what a stranger may have made of them."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from hf_ext.hub.cards import write_card
from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.emr.use_testing import merge_berts
from tests.hub.published import save_snapshot, tiny_adapter
from tests.mrconv.mrconv_testing import make_model

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
# Whole YAML documents.
DOCUMENTS = [
    *("[" * 5000, "{a: " * 2000, "&a [*a]", ALIASES, ALIASES + "datasets: *i\n"),
    *("- a\n- b", "", "\0", "a: b: c", "a\n\tb", "a: 1\n---\nb: 2", "%YAML 9", "a: 1\na: 2", "'"),
    *("!!python/object/apply:os.system ['true']", "!!int x", "!!timestamp x", "a: !!binary x", "? [a]\n: b"),
    *("2024-01-01: first", "0x" + "f" * 5000 + ": 1", "datasets: {2024-01-01: 1}"),
]
# In place of a value of JSON or YAML.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63, 2**200, 0.5, -1e308, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "ü\u2028", "\0", "\ud800", "no", "1e5", "0x1p99999", "nan", "{{ x }}", "$(true)"),
    *([], [None], [1, "a"], [[[[]]]], [2**63], {}, {"a": None}, {"": {}}, {"shape": [-1]}),
    *("../../etc/passwd", "/dev/zero", "~nobody", "a/b@c", "org/name", "[link](x)"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a value of JSON."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def change_value(value: Any, chance: random.Random) -> Any:
    """One to three of its parts replaced, removed, renamed, repeated or moved."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 2, 3))):
        where = places(value)
        if not where or chance.random() < 0.03:
            return copy.deepcopy(chance.choice(ODD))
        path = chance.choice(where)
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        key, how = path[-1], chance.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[chance.choice(["", "x", "__metadata__", "name", "../x", str(key).upper()])] = holder.pop(key)
        elif how == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return value


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, inserted or repeated."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30))):
        place = chance.randrange(len(changed) + 1)
        how = chance.randrange(4)
        if how == 0 and changed:
            changed[min(place, len(changed) - 1)] ^= 1 << chance.randrange(8)
        elif how == 1:
            del changed[place : place + chance.choice((1, 4, 1000))]
        elif how == 2:
            changed[place:place] = chance.randbytes(chance.choice((1, 4, 100)))
        elif changed:
            changed[place:place] = changed[: chance.choice((1, 16, 1000))]
    return bytes(changed)


def change_json(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.15:
        return change_bytes(data, chance)
    if chance.random() < 0.03:
        return chance.choice((b"[" * 20_000, b'{"a":' * 20_000, b"", b"\xff\xfe", b"null", b"{}", b"[]", b"1" * 5000))
    return json.dumps(change_value(json.loads(data), chance)).encode()


def change_yaml(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.15:
        return change_bytes(data, chance)
    if chance.random() < 0.1:
        return chance.choice(DOCUMENTS).encode("utf-8", "surrogatepass")
    changed = change_value(yaml.safe_load(data), chance)
    return yaml.safe_dump(changed, sort_keys=False).encode("utf-8", "surrogatepass")


def change_card(data: bytes, chance: random.Random) -> bytes:
    _, front, text = data.split(b"---\n", 2)
    return b"---\n" + change_yaml(front, chance) + b"\n---\n" + text


def change_weights(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    if chance.random() < 0.2:
        return change_bytes(data, chance)
    length = struct.unpack("<Q", data[:8])[0]
    header = change_json(data[8 : 8 + length], chance)
    claimed = len(header) if chance.random() < 0.9 else chance.choice((0, 1, 2**40, 2**63, length))
    return struct.pack("<Q", claimed) + header + data[8 + length :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": change_json,
    ".yaml": change_yaml,
    ".md": change_card,
    ".safetensors": change_weights,
}


def write_samples(place: Path) -> Path:
    """
    A folder of each kind, each small and valid: `snapshot`, `adapter`, `pipeline`, `mrconv`, `artifact`, with what
    commands take beside them in `files`.
    """
    save_snapshot(place / "snapshot")
    torch.manual_seed(0)
    tiny_adapter().save_pretrained(place / "adapter")
    make_pipeline().save_pretrained(place / "pipeline")
    make_model().save_pretrained(place / "mrconv")
    merge_berts(place / "berts")
    (place / "berts" / "merged").rename(place / "artifact")
    for name in ("snapshot", "adapter", "pipeline"):
        (place / name / "README.md").unlink(missing_ok=True)
        write_card(place / name, repo_id=f"org/{name}", license="mit")
    files = place / "files"
    files.mkdir()
    sources = {"base": "berts/base", "tasks": {name: f"berts/{name}" for name in ("two", "five")}}
    (files / "merge.yaml").write_text(
        yaml.safe_dump({**sources, "rescale": "global", "exclude": ["head"], "drop": 0.1})
    )
    source = {"path": "./nowhere", "split": "train", "streaming": False}
    run = {"method": "semanir", "output_dir": "run", "data": {"train": source, "eval": source, "num_workers": 0}}
    task = {"degradation": {"kind": "gaussian_noise", "sigma": 25}, "patch_size": 8}
    run |= {"task": task, "model": {"preset": "u-shaped"}, "max_steps": 2, "learning_rate": 1e-3}
    (files / "run.yaml").write_text(yaml.safe_dump({**run, "mixed_precision": "no", "peft": None}))
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    for name in ("a.png", "b.jpg", "c.webp", "d.tif", "e.gif", "f.bmp"):
        Image.fromarray(pixels).save(files / name)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 256).save(files / "g.png")
    return place


SAMPLE_PICTURES = "sample --class-labels 1 --count 1 --steps 2 --device cpu"
# How often, what is changed, and the command; {x} is the folder of the changed copy, {all} that of all samples.
COMMANDS: list[tuple[int, str, str]] = [
    (30, "snapshot", "info {x}"),
    (12, "snapshot", "info {x} --json"),
    (10, "snapshot", "info {x}/model.safetensors"),
    (14, "adapter", "info {x}"),
    (14, "pipeline", "info {x}"),
    (20, "artifact", "info {x}"),
    (8, "artifact", "info {x} --json"),
    (6, "snapshot", "card {x}"),
    (6, "snapshot", "card {x} --check"),
    (3, "adapter", "card {x}"),
    (4, "pipeline", "card {x}"),
    (2, "artifact", "card {x}"),
    (1, "snapshot", "push {x} org/name --dry-run --no-check --endpoint http://127.0.0.1:9"),
    (1, "adapter", "push {x} org/name --dry-run --no-check --endpoint http://127.0.0.1:9"),
    (1, "artifact", "push {x} org/name --dry-run --no-check --endpoint http://127.0.0.1:9"),
    (7, "artifact", "emr export {x} two {x}-out"),
    (5, "artifact", "emr compare {x}"),
    (3, "artifact", "emr extract-lora {x} two {x}-out --rank 2"),
    (3, "artifact", "emr remove {x} two"),
    (20, "files/merge.yaml", "merge {x} --dry-run"),
    (8, "files/merge.yaml", "merge {x} --dump-yaml"),
    (30, "files/run.yaml", "train {x}"),
    (4, "files/run.yaml", "evaluate {all}/snapshot --config {x}"),
    (2, "snapshot", "restore {x} {all}/files/a.png --out {x}-out"),
    (12, "pipeline", f"{SAMPLE_PICTURES} {{x}} --out {{x}}-out.png"),
    (1, "mrconv", "info {x}"),
    *(
        (1, f"files/{name}", "restore {all}/snapshot {x} --out {x}-out")
        for name in ("a.png", "b.jpg", "d.tif", "g.png")
    ),
]


def change_sample(samples: Path, kind: str, out: Path, chance: random.Random) -> Path:
    """A copy of a sample in which one file, or two, are not as they were."""
    source = samples / kind
    if source.is_file():
        out = out.with_suffix("".join(source.suffixes))
        out.write_bytes(CHANGES.get(source.suffix, change_bytes)(source.read_bytes(), chance))
        return out
    shutil.copytree(source, out)
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.suffix in CHANGES)
    for path in chance.sample(files, k=chance.choice((1, 1, 2))):
        if chance.random() < 0.03:
            path.unlink()
        else:
            path.write_bytes(CHANGES[path.suffix](path.read_bytes(), chance))
    return out
