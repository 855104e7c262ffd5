"""LoRAs of one base into one LoRA, of any ranks, scales and target modules, without the base's weights.

The sum Σ w_t s_t B_t A_t has the factors [w_1 s_1 B_1, w_2 s_2 B_2, …] and [A_1; A_2; …], one above the other: it is
exact at the sum of the ranks. A smaller rank is the nearest one by singular values, which QR of both factors gives
without the matrix itself: with B = Q R, Aᵀ = P S the singular values of B A are those of R Sᵀ, whose sides are ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_ext.files import whole_folder, write_json
from hf_ext.hub.disclosure import cut_paths, last_name

from .adapters import BIAS, find_scaling, is_adapter_part, lora_modules, refuse_variants
from .extracting import cut_matrix, describe_lora
from .fitting import tokens_by_id
from .sources import Source, open_weights

_WHOLE = "hf-ext merge --adapters delta merges the full weights."


def merge_loras(
    adapters: Sequence[str],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    error: float | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """
    Writes the weighted sum of LoRA adapters as one that peft loads on their base.

    Args:
        adapters (`Sequence[str]`): Folders or `org/name[@revision]`.
        out (`str` or `Path`): A folder that does not exist or is empty.
        weights (`Sequence[float]`, *optional*): A factor for each; by default 1 / N, which is their average.
        rank (`int`, *optional*): The most that a matrix may have. By default the sum of the ranks, which is exact.
        error (`float`, *optional*): Or the largest relative error of a matrix's sum; each gets the smallest rank.
        endpoint (`str`, *optional*): Address of the Hub.

    Returns:
        `dict[str, Any]`: Ranks, errors and bytes; it lies in the folder as `report.json` too.

    Raises:
        ValueError: They do not fit together, or hold what is no LoRA.
    """
    out = Path(out).expanduser()
    weights = [1 / len(adapters)] * len(adapters) if weights is None else list(weights)
    if len(adapters) < 2 or len(weights) != len(adapters):
        raise ValueError(f"two adapters or more and a weight for each are merged; got {len(adapters)}, {len(weights)}")
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"weights must be finite numbers; got {weights}")
    if (rank is not None and rank < 1) or (error is not None and not 0 <= error <= 1):
        raise ValueError(f"a rank is at least 1 and an error from 0 to 1; got {rank}, {error}")
    if rank is not None and error is not None:
        raise ValueError("give a rank or an error, or neither for the exact sum; not both")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: there is something here already; choose another folder, or delete it first")
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_weights(f"adapter {number}", spec, endpoint=endpoint))
            for number, spec in enumerate(adapters, 1)
        ]
        parts = _find_parts(opened, weights)
        tensors, matrices = _merge_parts(parts, rank, error)
        tensors |= _merge_whole(opened, weights)
        config = _describe_adapter(opened, {module: found["rank"] for module, found in matrices.items()}, tensors)
    report = _make_report(adapters, weights, opened, matrices)
    with whole_folder(out) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / "adapter_config.json", config)
        report["bytes"] = (folder / "adapter_model.safetensors").stat().st_size
        write_json(folder / "report.json", report)
    return {"path": str(out)} | report


# The adapters that change a module: each with the names of A and B, and with w s.
_Parts = dict[str, list[tuple[Source, str, str, float]]]


def _find_parts(opened: Sequence[Source], weights: Sequence[float]) -> _Parts:
    found: _Parts = {}
    modules = []
    for source, weight in zip(opened, weights, strict=True):
        if source.library != "peft":
            raise ValueError(f"{source.title} is no adapter of peft: it has no adapter_config.json")
        refuse_variants(source)
        own = lora_modules(source)
        modules.append(set(own))
        for module, (first, second) in own.items():
            scaling = find_scaling(source.config, module, source.tensors[first].shape[0])
            found.setdefault(module, []).append((source, first, second, weight * scaling))
    for source, held in zip(opened, modules, strict=True):
        for module in found.keys() - held:
            inner = module.partition(".")[2]
            while inner and inner not in held:
                inner = inner.partition(".")[2]
            if inner:
                raise ValueError(
                    f"{source.title} changes {inner!r}, another adapter {module!r}: they were made for models of "
                    f"different classes over one base. {_WHOLE}"
                )
    for module, parts in found.items():
        shapes = [(part[0].tensors[part[1]].shape[1:], part[0].tensors[part[2]].shape[:1]) for part in parts]
        if len(set(shapes)) > 1:
            raise ValueError(f"{module!r} has other sides in {parts[-1][0].title} than in {parts[0][0].title}")
    return found


def _merge_parts(
    parts: _Parts, rank: int | None, error: float | None
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The factors of every module's sum, and what each has lost."""
    tensors, matrices = {}, {}
    biased = any(_bias_name(first) in source.tensors for held in parts.values() for source, first, _, _ in held)
    for module, held in parts.items():
        first, second = held[0][1:3]
        upper = [source.read(name).float() for source, name, _, _ in held]
        lower = [source.read(name).float() * factor for source, _, name, factor in held]
        a, b = torch.cat(upper), torch.cat(lower, dim=1)
        kept_a, kept_b, lost, square = _cut_product(a.flatten(1), b.flatten(1), rank, error)
        tensors[first] = kept_a.reshape(-1, *a.shape[1:]).contiguous()
        tensors[second] = kept_b.reshape(len(b), -1, *b.shape[2:]).contiguous()
        matrices[module] = {"rank": len(kept_a), "lost": lost, "square": square}
        if biased and first.endswith(".lora_A.weight"):
            # peft gives B a bias in every module or in none.
            total = torch.zeros(len(b))
            for source, name, _, factor in held:
                if _bias_name(name) in source.tensors:
                    total += source.read(_bias_name(name)).float() * factor
            tensors[_bias_name(first)] = total
    return tensors, matrices


def _bias_name(first: str) -> str:
    return first.removesuffix(".lora_A.weight") + BIAS


def _cut_product(
    a: torch.Tensor, b: torch.Tensor, rank: int | None, error: float | None
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Factors of B·A of a rank or an error, the sum of squares that they lose, and that of all."""
    if rank is None and error is None:
        return a, b, 0.0, float((b.T.double() @ b.double() * (a.double() @ a.T.double())).sum())
    left, inner = torch.linalg.qr(b.double())
    right, outer = torch.linalg.qr(a.T.double())
    core = inner @ outer.T
    small_a, small_b, squares = cut_matrix(core, None if rank is None else min(rank, *core.shape), error)
    lost = float(squares[len(small_a) :].sum())
    return (small_a @ right.T).float(), (left @ small_b).float(), lost, float(squares.sum())


def _merge_whole(opened: Sequence[Source], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Tensors that the adapters hold whole. Without the base only an average of all of them is known."""
    names = {name for source in opened for name in source.tensors if not is_adapter_part(name)}
    known = [tokens for source in opened if (tokens := tokens_by_id(source))]
    if any(tokens != known[0] for tokens in known):
        # What has a row for each token, an embedding or what gives logits.
        fewest = min(map(len, known))
        held = ((name, source.tensors[name].shape) for source in opened for name in names & source.tensors.keys())
        rows = (name for name, shape in held if shape and shape[0] >= fewest)
        if (named := min(rows, default=None)) is not None:
            raise ValueError(
                f"the adapters have different tokens and hold whole tensors, such as {named!r}: which of their rows "
                f"belong together is not known. {_WHOLE}"
            )
    merged = {}
    for name in sorted(names):
        shapes = {source.tensors[name].shape if name in source.tensors else None for source in opened}
        if len(shapes) > 1 or abs(sum(weights) - 1) > 1e-6:
            raise ValueError(
                f"{name!r} is whole in an adapter (modules_to_save, or bias): such tensors are averaged where all "
                f"adapters have them in one shape and the weights add up to 1. {_WHOLE}"
            )
        parts = [source.read(name).float() * weight for source, weight in zip(opened, weights, strict=True)]
        merged[name] = torch.stack(parts).sum(0).to(opened[0].tensors[name].dtype)
    return merged


def _describe_adapter(
    opened: Sequence[Source], ranks: Mapping[str, int], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """The configuration: the scale of every module is 1."""
    configs = [source.config for source in opened]
    common = {key: configs[0].get(key) for key in ("task_type", "auto_mapping", "modules_to_save", "bias")}
    for key in ("modules_to_save", "bias"):
        if any((config.get(key) or None) != (common[key] or None) for config in configs):
            raise ValueError(f"{opened[0].title} has {key} {common[key]!r}, another adapter has not. {_WHOLE}")
    task_types = {config.get("task_type") for config in configs}
    return describe_lora(
        ranks,
        base_model_name_or_path=configs[0].get("base_model_name_or_path"),
        revision=configs[0].get("revision"),
        task_type=common["task_type"] if len(task_types) == 1 else None,
        auto_mapping=common["auto_mapping"],
        modules_to_save=common["modules_to_save"],
        bias=common["bias"] or "none",
        fan_in_fan_out=any(config.get("fan_in_fan_out") for config in configs),
        lora_bias=any(name.endswith(BIAS) for name in tensors),
    )


def _make_report(
    adapters: Sequence[str], weights: Sequence[float], opened: Sequence[Source], matrices: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    bases = {source.config.get("base_model_name_or_path") for source in opened}
    names = ", ".join(sorted(str(cut_paths(base)) for base in bases))
    warnings = [f"the adapters name different bases: {names}"] if len(bases) > 1 else []
    lost, square = (sum(found[key] for found in matrices.values()) for key in ("lost", "square"))
    return {
        # Who gets the report learns no folder of this machine.
        "adapters": [
            spec if source.repo_id else last_name(spec) for spec, source in zip(adapters, opened, strict=True)
        ],
        "weights": list(weights),
        "base": cut_paths(opened[0].config.get("base_model_name_or_path")),
        "rank": max(found["rank"] for found in matrices.values()),
        "error": _share(lost, square),
        "matrices": {
            module: {"rank": found["rank"], "error": _share(found["lost"], found["square"])}
            for module, found in matrices.items()
        },
        "warnings": warnings,
    }


def _share(lost: float, square: float) -> float:
    return math.sqrt(lost / square) if square else 0.0
