"""Extraction of a LoRA that peft loads, from a fine-tune and its base or from a task of a merge.

The difference D of each matrix is cut to a rank, D ≈ B·A, by its singular values. peft scales by lora_alpha / r, which
is 1 in every module here: a loader that reads only one rank and one alpha, as vLLM does, computes the same. All
tensors except matrices of linear layers are stored whole, as `modules_to_save` and as biases of B, or left out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.pytorch_utils import Conv1D

from ..emr.building import model_class
from ..emr.weights import TaskWeights
from ..errors import DataError, UsageError
from ..files import copy_into, read_json_object, require_free, whole_folder, write_json
from ..hub.disclosure import cut_paths
from .configuration import whole_number
from .loading import compare_settings, find_loaded_names, find_part
from .name_matching import match_fine_tune
from .sources import open_weights, size_text
from .tensors import find_layers, is_computed, name_some

_PREFIX = "base_model.model."
# Above this a fixed rank is found without all singular values.
_LARGE = 1024
_RANKS = tuple(2**power for power in range(18))
_LABELS = ("id2label", "problem_type")
_OTHER_FORM = (
    "in another form, such as stacked experts: load base and fine-tune with one version of transformers, and save "
    "both with save_original_format=False"
)
# Names that are printed; report.json has all.
_SHOWN = 5


@dataclass(frozen=True)
class Pair:
    title: str
    public_name: str  # the same without folders of this machine
    base: str  # where the base is: a folder, or `org/name`
    revision: str | None  # its commit, of a Hub
    base_config: Mapping[str, Any]  # configuration of the base, if known
    files: Mapping[str, Path]  # configuration, tokenizer, processor of the fine-tune
    names: tuple[str, ...]  # tensors of the fine-tune
    base_shapes: Mapping[str, tuple[int, ...]]  # shapes of the base's tensors, by the fine-tune's names
    read: Callable[[str], Tensor]
    read_base: Callable[[str], Tensor]


@contextmanager
def open_task(artifact: str, task: str, base: str | None = None, endpoint: str | None = None) -> Iterator[Pair]:
    """A task of a merge beside the base of the merge."""
    weights = TaskWeights(artifact, base=base, endpoint=endpoint)
    if weights.manifest.library != "transformers":
        raise DataError(f"{artifact} is a merge of {weights.manifest.library}; a LoRA needs a model of transformers")
    names = tuple(weights.entries(task))
    record, origin, held = weights.manifest.tasks[task], weights.manifest.base, weights.base_tensors()
    revision = origin.revision if base is None and origin.folder is None else None
    place = base or (origin.source if revision else str(weights.base_folder.resolve()))
    in_base = {name: record.base_name(name) for name in names if record.base_name(name) in held}
    yield Pair(
        f"task {task!r} of {artifact}",
        f"task {task!r} of {cut_paths(artifact)}",
        place,
        revision,
        read_json_object(weights.folder / "config.json", optional=True),
        weights.small_files(task),
        names,
        {name: tuple(held[other].shape) for name, other in in_base.items()},
        lambda name: weights.restore(task, name),
        lambda name: held[in_base[name]],
    )


@contextmanager
def open_fine_tune(base: str, fine_tune: str, endpoint: str | None = None) -> Iterator[Pair]:
    """A fine-tune beside its base, both folders or `org/name[@revision]`."""
    with (
        open_weights("base", base, endpoint=endpoint) as first,
        open_weights("the fine-tune", fine_tune, endpoint=endpoint) as own,
    ):
        for source in (first, own):
            if source.library != "transformers":
                raise ValueError(f"{source.spec} is of {source.library}; a LoRA is made of two models of transformers")
        found = match_fine_tune(first, own)
        own.rename(found.in_file)
        in_base = {name: found.in_base(name) for name in own.tensors if found.in_base(name) in first.tensors}
        yield Pair(
            fine_tune,
            cut_paths(fine_tune),
            first.repo_id or str(Path(base).expanduser().resolve()),
            first.commit,
            first.config,
            own.companions.all,
            tuple(own.tensors),
            {name: first.tensors[other].shape for name, other in in_base.items()},
            own.read,
            lambda name: first.read(in_base[name]),
        )


def extract_lora(
    pair: Pair, out: str | Path, *, rank: int | None = None, error: float | None = None, lora_only: bool = False
) -> dict[str, Any]:
    """
    Writes an adapter that peft loads on the base; the folder appears whole or not at all.

    Every matrix gets `rank`, where it is not smaller itself, or the smallest rank that keeps the relative `error` of
    its difference, ‖D - B·A‖ / ‖D‖. `lora_only` leaves out all but matrices of linear layers. One tensor of the models
    is in memory at a time, and the adapter. The report, which is also in the folder, says what each part costs.
    """
    out = Path(out).expanduser()
    if rank is not None and error is None:
        rank = whole_number("rank", rank)
    elif rank is not None or isinstance(error, bool) or not isinstance(error, Real) or not 0 <= error <= 1:
        raise UsageError(f"give either a rank of at least 1 or an error in [0, 1], got rank {rank}, error {error!r}")
    require_free(out)
    with whole_folder(out) as folder:
        report = _Extraction(pair, folder, lora_only, rank, error).run()
    return {"path": str(out)} | report


def cut_matrix(difference: Tensor, rank: int | None, error: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """
    The factors A and B of the nearest matrix of a rank, and the squared singular values that are known.

    A fixed rank of a large matrix is found by random projections with eight power iterations, many times faster:
    measured at 1536 × 1536, the error is at most 0.2 % larger even where all singular values are alike.
    """
    smallest = min(difference.shape)
    if rank is not None and smallest > _LARGE and 8 * rank <= smallest:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, values, v = torch.svd_lowrank(difference, q=rank + 16, niter=8)
        u, values, v = u[:, :rank], values[:rank], v[:, :rank]
    else:
        u, values, vh = torch.linalg.svd(difference, full_matrices=False)
        v = vh.T
    squares = values.double().square()
    if error is not None:
        # lost[k]: of the squares, what rank k + 1 loses
        lost = squares.flip(0).cumsum(0).flip(0)[1:]
        rank = 1 + int((lost > error**2 * squares.sum()).sum())
    root = values[:rank].sqrt()
    return (v[:, :rank] * root).T.contiguous(), (u[:, :rank] * root).contiguous(), squares


def _is_learned(name: str, tensor: Tensor) -> bool:
    """True unless it is of whole numbers or follows from the configuration."""
    return tensor.is_floating_point() and not is_computed(name, tensor)


def _list_ranks(matrices: list[tuple[Tensor, float, int, int]]) -> list[dict[str, Any]]:
    """Rank, error and bytes of other ranks; a matrix is squared singular values, their sum, rows, columns."""
    whole = sum(total for _, total, _, _ in matrices)
    largest = max((min(rows, columns) for _, _, rows, columns in matrices), default=1)
    partly = [(squares, total) for squares, total, *shape in matrices if len(squares) < min(shape)]
    known = min((len(squares) for squares, _ in partly), default=_RANKS[-1])
    # of what is known only in part, the rest is lost at every rank
    rest = sum(max(total - float(squares.sum()), 0.0) for squares, total in partly)
    found = []
    for rank in (rank for rank in _RANKS if whole and rank < 2 * largest and rank <= known):
        lost = rest + sum(float(squares[rank:].sum()) for squares, _, _, _ in matrices)
        numbers = sum(min(rank, rows, columns) * (rows + columns) for _, _, rows, columns in matrices)
        found.append({"rank": min(rank, largest), "error": math.sqrt(lost / whole), "bytes": 4 * numbers})
    return found


class _Extraction:
    def __init__(self, pair: Pair, folder: Path, lora_only: bool, rank: int | None, error: float | None) -> None:
        self._pair, self._folder, self._lora_only, self._rank, self._error = pair, folder, lora_only, rank, error
        self._config, self._model = _build_outline(pair)
        # transformers renames tensors on loading, a ViT's for instance; a tied one has the first of its names
        loaded = find_loaded_names(dict.fromkeys(pair.names), self._config)
        first = {name: own for own, name in reversed(loaded.items())}
        # the names in the fine-tune's file, by those in the model
        self._origin = {first.get(name, name): name for name in pair.names}
        self._modules = dict(self._model.named_modules())
        self._held: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        known = {id(self._held[name]) for name in self._held.keys() & self._origin}
        free = (name for name, own in self._held.items() if id(own) not in known and _is_learned(name, own))
        lacking = {layer for name in free for layer in find_layers(name)}
        lost = (name for name in self._origin.keys() - self._held if self._origin[name] not in pair.base_shapes)
        near = (name for name in lost if lacking & find_layers(name))
        if other := sorted(name for name in near if _is_learned(name, pair.read(self._origin[name]))):
            raise DataError(f"{pair.title}: {name_some(other)} are not in the base, which has them {_OTHER_FORM}.")
        # peft saves whole every module whose name ends with that of one that must be: pre_classifier with classifier.
        named = [name for name in self._origin if name in self._held]
        unfit = {name.rpartition(".")[0] for name in named if not self._fits(name, self._held[name])}
        self._ends = () if lora_only else tuple(unfit - {""})
        # A tied tensor is in every module that holds it.
        self._places: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self._held.items():
            self._places[id(tensor)].append(name)
        self._tensors: dict[str, Tensor] = {}
        self._known: list[tuple[Tensor, float, int, int]] = []
        self._matrices: dict[str, dict[str, Any]] = {}
        self._biases: dict[str, Tensor] = {}
        self._whole: list[str] = []
        self._left_out: list[tuple[str, float | None, str]] = []
        # squares of the differences: of matrices, of all, and what is lost of both
        self._bytes = 0
        self._of_matrices = self._of_all = self._lost_of_matrices = self._lost_of_all = 0.0

    def run(self) -> dict[str, Any]:
        """Goes through the tensors, writes the adapter, and tells what became of everything."""
        for name in self._origin:
            self._take(name)
        for module in self._biases.keys() - self._matrices.keys():
            # peft takes a bias beside factors only: here they add nothing
            self._take_matrix(module, torch.zeros(self._held[f"{module}.weight"].shape), 0.0)
        if not self._matrices:
            raise ValueError(
                f"{self._pair.title}: no linear layer differs from the base, so no LoRA can be extracted; of other "
                f"tensors differ {[*self._whole, *(name for name, *_ in self._left_out)][:_SHOWN]}"
            )
        saved = self._save_modules()
        for module, found in self._matrices.items() if self._biases else ():
            # peft gives B a bias in every module or in none.
            self._keep({f"{module}.lora_B.bias": self._biases.get(module, torch.zeros(found["shape"][0]))})
        files, warnings = dict(self._pair.files), _warn_of_settings(self._pair, self._config)
        # Beside a config.json, transformers looks for whole weights and not for an adapter, so it is taken only where
        # that of the base would not do.
        if not warnings and all(self._config.get(key) == self._pair.base_config.get(key) for key in _LABELS):
            del files["config.json"]
        bare = [module for module in self._matrices if self._biases and f"{module}.bias" not in self._held]
        if bare:
            warnings.append(
                f"peft loads the adapter, but merge_and_unload() fails: it cannot add biases, as {bare[0]} and "
                f"{len(bare) - 1} more have none in the base. --lora-only leaves biases out"
            )
        copy_into(files, self._folder)
        self._write_config(saved)
        save_file(self._tensors, self._folder / "adapter_model.safetensors", metadata={"format": "pt"})
        report = self._report(saved, warnings)
        write_json(self._folder / "report.json", report)
        return report

    def _take(self, name: str) -> None:
        own = self._pair.read(self._origin[name])
        self._bytes += own.nbytes
        fits = self._fits(name, own)
        difference = own.float() - self._pair.read_base(self._origin[name]).float() if fits else torch.zeros(0)
        square = _sum_of_squares(difference)
        if fits and square == 0:
            return
        if not math.isfinite(square):
            raise ValueError(f"{self._pair.title}: {name} differs from the base by NaN or infinity; save it again")
        self._of_all += square
        module, _, last = name.rpartition(".")
        is_linear = fits and self._is_matrix(module)
        if is_linear and last == "weight":
            self._take_matrix(module, difference, square)
        elif is_linear and last == "bias" and not self._lora_only:
            self._biases[module] = difference
        elif reason := self._refuse_whole(name):
            self._lost_of_all += square
            self._left_out.append((name, square if fits else None, reason))
        else:
            self._whole.append(name)

    def _fits(self, name: str, tensor: Tensor) -> bool:
        """True if the base has a tensor in this shape."""
        return self._pair.base_shapes.get(self._origin.get(name, "")) == tuple(tensor.shape)

    def _is_matrix(self, module: str) -> bool:
        """True if a module is a linear layer whose weight the base has and does not tie to another."""
        weight = f"{module}.weight"
        return (
            is_linear(self._modules.get(module))
            and not module.endswith(self._ends)
            and len(self._places[id(self._held[weight])]) == 1
            and self._fits(weight, self._held[weight])
        )

    def _take_matrix(self, module: str, difference: Tensor, square: float) -> None:
        # GPT-2's weight is [in, out].
        difference = difference.T if type(self._modules[module]) is Conv1D else difference
        a, b, squares = cut_matrix(difference, self._rank, self._error) if square else cut_matrix(difference, 1, None)
        rows, columns = difference.shape
        self._known += [(squares, square, rows, columns)] if square else []
        lost = _sum_of_squares(difference - b @ a)
        self._of_matrices += square
        self._lost_of_matrices += lost
        self._lost_of_all += lost
        self._matrices[module] = {"shape": [rows, columns], "rank": len(a), "error": _share(lost, square)}
        self._keep({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})

    def _refuse_whole(self, name: str) -> str:
        """The reason why a tensor cannot be stored whole, if there is one."""
        if name not in self._held:
            return f"{type(self._model).__name__} has no tensor of this name, or has it {_OTHER_FORM}"
        if self._lora_only:
            return "not the weight of a linear layer that the base has"
        for place in self._places[id(self._held[name])]:
            module = place.rpartition(".")[0]
            if any(map(is_linear, [*self._model.get_submodule(module).modules()][1:])):
                return f"peft saves whole modules, and {module or 'the model'} has linear layers in it"
        return ""

    def _keep(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors |= {_PREFIX + name: tensor.contiguous().clone() for name, tensor in tensors.items()}

    def _save_modules(self) -> list[str]:
        """Keeps all tensors of the modules that hold one which goes along whole; a tied one in each of its modules."""
        places = (place for name in self._whole for place in self._places[id(self._held[name])])
        found = sorted({place.rpartition(".")[0] for place in places})
        modules = [module for module in found if not any(module.startswith(f"{other}.") for other in found)]
        stored = {id(self._held[name]): own for name, own in self._origin.items() if name in self._held}
        for module in modules:
            names = {name: stored.get(id(held)) for name, held in self._held.items() if name.startswith(f"{module}.")}
            self._keep({name: self._pair.read(own) for name, own in names.items() if own is not None})
        return modules

    def _write_config(self, saved: list[str]) -> None:
        ranks = {module: found["rank"] for module, found in self._matrices.items()}
        kind, largest = type(self._model), max(ranks.values())
        # peft takes the first pattern that a name ends with, so long ones come first.
        pattern = {module: ranks[module] for module in sorted(ranks, key=lambda name: (-len(name), name))}
        pattern = {} if set(ranks.values()) == {largest} else pattern
        config = LoraConfig(
            r=largest,
            lora_alpha=largest,
            rank_pattern=pattern,
            alpha_pattern=dict(pattern),
            inference_mode=True,
            base_model_name_or_path=self._pair.base,
            revision=self._pair.revision,
            fan_in_fan_out=any(type(self._modules[module]) is Conv1D for module in ranks),
            lora_bias=bool(self._biases),
            modules_to_save=saved or None,
            auto_mapping={"base_model_class": kind.__name__, "parent_library": kind.__module__},
            target_modules=sorted(ranks),
        )
        # A set in peft, whose order changes from process to process.
        write_json(self._folder / "adapter_config.json", config.to_dict() | {"target_modules": sorted(ranks)})
        self._require_loadable(config)

    def _require_loadable(self, config: LoraConfig) -> None:
        """Refuses an adapter that peft would not load as it is, such as Mamba's."""
        try:
            with catch_warnings(action="ignore"):
                model = inject_adapter_in_model(config, self._model, low_cpu_mem_usage=True)
                places = get_peft_model_state_dict(model, save_embedding_layers=False)
            ours = {name.removeprefix(_PREFIX): tuple(tensor.shape) for name, tensor in self._tensors.items()}
            if other := sorted(ours.items() ^ {name: tuple(tensor.shape) for name, tensor in places.items()}.items()):
                raise ValueError(f"it has other tensors than {other[0][0]} {list(other[0][1])}")
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self._pair.title}: peft would not load its LoRA: {error}. Use the fine-tune itself, or let peft "
                "train an adapter."
            ) from error

    def _report(self, saved: list[str], warnings: list[str]) -> dict[str, Any]:
        return {
            "source": self._pair.public_name,
            "base": cut_paths(self._pair.base),
            "revision": self._pair.revision,
            "rank": max(found["rank"] for found in self._matrices.values()),
            "bytes": (self._folder / "adapter_model.safetensors").stat().st_size,
            "bytes_of_fine_tune": self._bytes,
            "error_of_matrices": _share(self._lost_of_matrices, self._of_matrices),
            "error": _share(self._lost_of_all, self._of_all),
            "warnings": warnings,
            "by_rank": _list_ranks(self._known),
            "matrices": self._matrices,
            "biases": sorted(self._biases),
            "modules_to_save": saved,
            # `None`: the base has nothing to compare with
            "left_out": [
                {"name": name, "error": _share(lost, self._of_all), "why": why} for name, lost, why in self._left_out
            ],
        }


def is_linear(module: nn.Module | None) -> bool:
    """True for a layer that peft takes for linear and that is; a class of its own, such as Falcon's, is tried out."""
    if type(module) in (nn.Linear, Conv1D) or not isinstance(module, nn.Linear):
        return type(module) in (nn.Linear, Conv1D)
    # that of attention in torch, whose forward is not run
    if type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return False
    trial, x = copy(module), torch.rand(1, 3)
    trial._parameters = {"weight": nn.Parameter(torch.rand(2, 3)), "bias": nn.Parameter(torch.rand(2))}
    try:
        with torch.no_grad():
            return torch.allclose(trial(x), nn.functional.linear(x, trial.weight, trial.bias))
    except Exception:
        # of another library, with its own ways to fail
        return False


def _build_outline(pair: Pair) -> tuple[dict[str, Any], nn.Module]:
    """The configuration of the fine-tune, and its model without weights."""
    if "config.json" not in pair.files:
        raise ValueError(f"{pair.title}: config.json, which names the class of the model, is missing; add it")
    told = read_json_object(pair.files["config.json"])
    if "auto_map" in told and told.get("model_type") not in CONFIG_MAPPING:
        raise DataError(
            f"{pair.title}: its class is code that lies beside its weights ({told['auto_map']!r:.80}), and is "
            "not run here; import the package that registers the class, or let peft train an adapter"
        )
    config = AutoConfig.from_pretrained(pair.files["config.json"])
    with torch.device("meta"):
        return told, model_class(config, pair.files["config.json"].parent, False)(config)


def _warn_of_settings(pair: Pair, own: Mapping[str, Any]) -> list[str]:
    """Tells of settings in which a fine-tune is another model than its base, so that its weights are not all of it."""
    base = find_part(pair.base_config, own)
    different = {key for key, _, _ in compare_settings(base, own)}
    different |= {key for key in ("vocab_size", "tie_word_embeddings") if own.get(key, base.get(key)) != base.get(key)}
    if not base or not different:
        return []
    return [
        f"{pair.public_name} has other values of {', '.join(sorted(different))} than the base, which peft loads the "
        "adapter on as that is: load the base with the config.json that lies beside the adapter"
    ]


def _sum_of_squares(tensor: Tensor) -> float:
    """Of a tensor, in double precision: part by part, since an embedding in that precision is the largest of all."""
    return sum(float(part.double().square().sum()) for part in tensor.flatten().split(2**20))


def _share(lost: float | None, whole: float) -> float | None:
    return None if lost is None else math.sqrt(lost / whole) if whole else 0.0


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people: error and size by rank, what was chosen, what goes along whole, and what is left out."""
    ranks, bytes_of_all = [found["rank"] for found in report["matrices"].values()], report["bytes_of_fine_tune"]
    chosen = f"{min(ranks)} to {max(ranks)}" if min(ranks) < max(ranks) else str(max(ranks))
    rows = [(row["rank"], f"{row['error']:.4f}", size_text(row["bytes"])) for row in report["by_rank"]]
    rows = [("rank", "error", "size of the factors"), *rows]
    lines = [f"{rank:>10}  {error:>8}  {size}" for rank, error, size in rows]
    lines += [f"warning: {text}" for text in report["warnings"]]
    lines.append(
        f"written: {len(ranks)} matrices of rank {chosen}, error {report['error_of_matrices']:.4f} of their "
        f"differences; with all others of the base {report['error']:.4f}; {size_text(report['bytes'])}"
    )
    if report["bytes"] >= bytes_of_all:
        whole = size_text(bytes_of_all)
        lines.append(f"note: the fine-tune itself is not larger ({whole}); choose a lower rank, or --lora-only")
    if report["biases"]:
        lines.append(f"biases: {len(report['biases'])}, exact")
    if saved := report["modules_to_save"]:
        more = f" and {len(saved) - _SHOWN} more" if len(saved) > _SHOWN else ""
        lines.append(f"whole: {', '.join(saved[:_SHOWN])}{more}")
    # New ones first, then those that cost most.
    left_out = sorted(report["left_out"], key=lambda item: -math.inf if item["error"] is None else -item["error"])
    for item in left_out[:_SHOWN]:
        cost = "new with the task" if item["error"] is None else f"error {item['error']:.4f}"
        lines.append(f"left out: {item['name']} ({cost}): {item['why']}")
    if len(left_out) > _SHOWN:
        lines.append(f"left out: {len(left_out) - _SHOWN} more, which report.json names")
    return lines
