"""Model cards: the packaged template of a method, filled from what lies in a folder, and `.eval_results` beside it.

A section for which the folder holds no data is left out; an undefined name in a template is an error, never a gap.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from ..errors import DataError, UsageError
from ..files import read_json_object, require_kinds, whole_file
from .card_rules import CardRefused, check_card, front_matter, read_card, read_front_matter
from .checkpoints import open_checkpoint
from .diffusers_folders import is_pipeline, read_config, read_headers
from .disclosure import cut_paths
from .folder_kinds import CardPart, describe
from .load_check import installed_room
from .published_files import MODULES, PICTURE

# In every card that this module writes; an author who edits the card removes it, and then the card is kept.
MARKER = "<!-- Written by hf-ext. Remove this line to keep your edits. -->"
# What is left to be filled in, in the template of huggingface_hub that peft and transformers save.
PLACEHOLDER = "[More Information Needed]"
# Lines that they add to it.
_ADDED = re.compile(
    r"# Model Card for Model ID|This is the model card of a .{0,200}|### Framework versions|- PEFT .{1,40}"
)
_HUB_ID = re.compile(r"[\w\-][\w.\-]*/[\w\-][\w.\-]*", re.ASCII)
# What `datasets` reads files of a task with.
_OF_PICTURES = """
image-classification image-to-image text-to-image unconditional-image-generation zero-shot-image-classification
"""
_BUILDERS = {
    "audio-classification": "audiofolder",
    **dict.fromkeys(_OF_PICTURES.split(), "imagefolder"),
    **dict.fromkeys(("text-classification", "text-generation", "fill-mask"), "text"),
}
# The tasks of our methods. A bare model runs some of transformers' too, but nobody means these.
_OWN_TASKS = """
image-restoration image-classification audio-classification text-generation text-classification fill-mask
"""
# What a kind of pipeline reads its input with, as the files beside the weights name it.
_READERS = {"audio": "feature_extractor_type", "image": "image_processor_type"}
# Entries of a card that say what a model is, so that those of an earlier one do not stay.
_OF_MODELS = "base_model base_model_relation datasets library_name metrics model-index pipeline_tag tags widget"
# Arguments that say where and how often to write, not how the model was trained.
_NOT_SHOWN = """
output_dir report_to logging_steps eval_steps save_steps save_minutes deadline_minutes save_total_limit
allow_other_data hub_model_id hub_private_repo early_stopping_patience tracker_project run_name profile_steps
per_device_eval_batch_size data task
"""

_logger = logging.getLogger(__name__)


class NoTemplate(DataError):
    """A model of which too little is known to write its card."""


def write_card(folder: str | Path, *, repo_id: str, license: str | None = None, there: str = "") -> Path:
    """
    Writes `README.md` from `config.json` or `adapter_config.json`, the headers of the weights, and, where they exist,
    `eval.json` and `training.json`; and `.eval_results/hf_ext.yaml` for results on data sets of the Hub. The snippet
    in the card loads `repo_id`. A card that someone wrote or edited is kept, and gets the licence if it has none: that
    of the folder, else `there`, the text of the one on the Hub. From one that is written anew, here or there, its
    licence and the entries that say nothing of the model (`extra_gated_prompt`) are taken.
    """
    folder = Path(folder)
    card = folder / "README.md"
    if license != "other" and (refused := check_card(f"---\nlicense: {json.dumps(license)}\n---\n")):
        raise CardRefused(refused)
    evaluation = _read_evaluation(folder / "eval.json")
    # a folder that is staged again must not keep results of which nothing else is left
    entries = folder / ".eval_results" / "hf_ext.yaml"
    entries.unlink(missing_ok=True)
    if benchmark := _benchmark_entries(evaluation["results"]):
        with whole_file(entries, "w") as file:
            yaml.safe_dump(benchmark, file, sort_keys=False)
    here, on_hub = read_card(card) if card.is_file() else "", f"README.md of {repo_id} on the Hub"
    if here and is_written(here):
        _require_license(card, here, license)
        return card
    if there and is_written(there):
        is_text = bool(there.replace(front_matter(there), "", 1).strip("\ufeff-\r\n\t "))
        if is_text:
            card.write_text(there, encoding="utf-8", newline="")
        _require_license(card, there, license, on_hub)
        if is_text:
            return card
    try:
        # what peft and transformers save says nothing that somebody chose
        earlier = {card.name: read_front_matter(here) if MARKER in here else {}}
    except ValueError as error:
        raise DataError(f"{card}: {error}; correct it, or delete the card and give its licence again") from error
    earlier[on_hub] = read_front_matter(there)
    try:
        text = _render(folder, repo_id, license, evaluation, earlier)
    # Configurations and reports are other people's: a part that the card tells of is missing, or of another kind.
    except (jinja2.TemplateError, AttributeError, LookupError, ArithmeticError) as error:
        told = f"lacks an entry that the card needs ({type(error).__name__}: {error})"
        raise DataError(f"{folder}: its configuration or report {told}; download or save it again") from error
    with whole_file(card, "w") as file:
        file.write(text)
    return card


def is_written(text: str) -> bool:
    """True for a card that someone wrote or edited."""
    return MARKER not in text and not _is_template(text)


def _is_template(text: str) -> bool:
    """Tells if nobody has written anything into a card that peft or transformers saved."""
    template = ModelCard.default_template_path.read_text(encoding="utf-8")
    blank = re.sub(r'\{\{[^{}]*?default\("([^"]*)",\s*true\)\s*\}\}', r"\1", template)
    lines = {line.strip() for line in text.replace(front_matter(text), "", 1).splitlines()}
    lines -= {line.strip() for line in blank.splitlines()}
    return PLACEHOLDER in text and all(map(_ADDED.fullmatch, lines)) and "license" not in read_front_matter(text)


def _require_license(card: Path, text: str, license: str | None, where: str = "") -> None:
    """Adds the licence to a card that somebody wrote, or refuses to contradict it."""
    stated = read_front_matter(text).get("license")
    if license is None or stated in (license, [license]):
        return
    line, head = f"license: {json.dumps(license)}\n", front_matter(text)
    # An empty entry is none, and would be a second one.
    rest = re.sub(r"(?m)^(['\"]?)license\1[ \t]*:.*\n?", "", head)
    if stated or "license" in read_front_matter(f"---\n{rest}\n---\n"):
        told = f"your card has the licence {stated!r}, got license={license!r}; correct one of them"
        raise UsageError(f"{where or card}: {told}")
    if head:
        text = text.replace(head, rest, 1)
        text = re.sub(r"\A(?:\ufeff)?\s*---[ \t]*\r?\n", lambda start: start[0] + line, text)
    else:
        text = f"---\n{line}---\n\n{text}"
    with whole_file(card, "w", newline="") as file:
        file.write(text)


def _choose_license(
    license: str | None, of_data: dict[str, Any], of_template: Any, earlier: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The entries of a licence: of the data, as asked for, or of an earlier card; none where the template's stays."""
    if of_data and license not in (None, of_data["license"]):
        told = f"the weights have the licence of their data, {of_data['license']!r}, got license={license!r}"
        raise UsageError(f"training.json: {told}; leave license out")
    parts = {where: [key for key in card if key[:7] == "license"] for where, card in earlier.items()}
    found = {where: {key: earlier[where][key] for key in keys} for where, keys in parts.items()}
    # that of a template was nobody's choice
    found = {where: each for where, each in found.items() if each.get("license") not in (None, "", [], of_template)}
    fits = (each for each in found.values() if license is None or each["license"] in (license, [license]))
    chosen = of_data or next(fits, {} if license is None else {"license": license})
    for where, each in found.items():
        if each["license"] not in (chosen["license"], [chosen["license"]]):
            _logger.warning("%s: its licence %r becomes %r", where, each["license"], chosen["license"])
    return chosen


def _kept_entries(earlier: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Entries of earlier cards on other things than the model and its licence, of the first of them above all."""
    left = {key: value for card in reversed(earlier.values()) for key, value in card.items() if value}
    return {key: value for key, value in left.items() if key not in _OF_MODELS.split() and key[:7] != "license"}


def _render(
    folder: Path, repo_id: str, license: str | None, evaluation: dict[str, Any], earlier: dict[str, dict[str, Any]]
) -> str:
    part = describe(folder)
    config, template_name = _read_config(folder, part)
    path = folder / "training.json"
    training: dict[str, Any] = cut_paths(read_json_object(path, optional=True), near=folder)
    require_kinds(training, _TRAINING, path)
    arguments = training.get("arguments") or {}
    require_kinds(arguments, {"data": dict}, path)
    if isinstance(base := config.get("base_model_name_or_path"), str):
        config["base_model_name_or_path"] = cut_paths(base, True, folder)
    fields, source = copy.deepcopy(_template(template_name))
    # of "mrconv-audio" the room is "mrconv"
    method = str(arguments.get("method")).partition("-")[0]
    if template_name == "adapter.md" and installed_room(method) is not None:
        # an adapter of ours does the task of its method, under the same licence
        fields = {**_template(f"{method}.md")[0], **fields}
    task = _task(folder, config, template_name, fields.pop("pipeline_tag", None), evaluation)
    config["classifies_images"] = task == "image-classification"
    if (folder / MODULES).is_file():
        fields["library_name"], task = "sentence-transformers", "sentence-similarity"
    fields |= part.metadata if part is not None else {}
    fields |= {"pipeline_tag": task} if task is not None else {}
    if config.get("pipeline_tag") == "unconditional-image-generation":
        # The Hub has no task of its own for pictures of a class.
        fields["tags"] = [*fields["tags"], "class-conditional"]
    shown = PICTURE if (folder / PICTURE).is_file() else None
    # A table of confusions, the picture of a classifier, is no answer to an input.
    if shown and (task is None or ("image" in task and "classification" not in task)):
        # "-" is the Hub's sign for what no text asked for.
        names = ", ".join(map(str, (config.get("id2label") or {}).values())) if is_pipeline(folder) else ""
        fields["widget"] = [{"text": names or "-", "output": {"url": PICTURE}}]
    # Weights have the licence of their data, where a run of ours says so.
    of_data = {**((training.get("released") or {}).get("card_license") or {})}
    licence = _choose_license(license, of_data, fields.get("license"), earlier)
    fields = _kept_entries(earlier) | fields | licence
    sources = (config.get("base_model_name_or_path"), arguments.get("init_from"))
    base_model = next((str(source).partition("@")[0] for source in sources if _is_hub_id(source)), None)
    if base_model is not None:
        fields |= {"base_model": base_model, "base_model_relation": "adapter" if "peft_type" in config else "finetune"}
    front = ModelCardData(**(fields | _describe_results(repo_id, arguments, evaluation["results"])))
    text = _compile(source).render(
        title=repo_id.rpartition("/")[2],
        # A model that travels with the package has no repository.
        released=None if "/" in repo_id else training.get("released"),
        task=task,
        shown=shown,
        repo_id=repo_id,
        config=config,
        base_model=base_model,
        results=[_result_row(result) for result in evaluation["results"]],
        evaluated_revision=evaluation.get("revision"),
        data=_flatten(arguments.get("data") or {}),
        degradation=_flatten(training.get("task") or arguments.get("task") or {}),
        training=_training_rows(training, arguments),
        model=_model_rows(folder, config),
        **(part.values(config, repo_id) if part is not None else {}),
    )
    return f"---\n{front.to_yaml().strip()}\n---\n\n{MARKER}\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def expected_task(folder: Path) -> str | None:
    """The `pipeline_tag` that a card of a folder should have; `None` where it does nothing through a pipeline."""
    try:
        config, name = _read_config(folder, describe(folder))
    except NoTemplate:
        return None
    evaluation = _read_evaluation(folder / "eval.json")
    return _task(folder, config, name, _template(name)[0].get("pipeline_tag"), evaluation)


def _task(
    folder: Path, config: dict[str, Any], template: str, preferred: str | None, evaluation: dict[str, Any]
) -> str | None:
    """The model's task: the first of some that transformers can load and feed, so that `pipeline(task, ...)` runs."""
    from transformers.pipelines import PIPELINE_REGISTRY

    # of an adapter transformers guesses no task, and the root of an artifact with masks does none
    if template == "adapter.md" or (folder / "emr.json").is_file():
        return None
    if "pipeline_tag" in config:
        # a pipeline of diffusers
        return str(config["pipeline_tag"])
    measured: list[str | None] = [result.get("task") for result in evaluation["results"][:1]]
    is_own = installed_room(str(config.get("model_type"))) is not None
    for task in filter(None, [preferred, *measured, *(_OWN_TASKS.split() if is_own else ())]):
        about = PIPELINE_REGISTRY.supported_tasks.get(task)
        if about is not None and _loads(about["pt"], config, is_own) and _reads(folder, str(about.get("type"))):
            return str(task)
    return None


def _loads(loaders: Iterable[Any], config: dict[str, Any], is_own: bool) -> bool:
    """True if an Auto class of a pipeline loads the saved class, or one of ours that is made of it."""
    from transformers import CONFIG_MAPPING

    model_type, names = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING or not isinstance(names, list):
        return False
    for loader in loaders:
        found = loader._model_mapping.get(CONFIG_MAPPING[model_type], ())
        for kind in found if isinstance(found, tuple) else (found,):
            # of our heads on other inputs each has the weights of the one that it extends
            if {base.__name__ for base in (kind.__mro__ if is_own else (kind,))} & set(names):
                return True
    return False


def _reads(folder: Path, kind: str) -> bool:
    """True if a folder has a tokenizer, feature extractor or processor for the input of its model."""
    if kind == "text":
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    path = folder / "preprocessor_config.json"
    if kind not in _READERS:
        return path.is_file() or (folder / "processor_config.json").is_file()
    return path.is_file() and _READERS[kind] in read_json_object(path)


@functools.cache
def _template(name: str) -> tuple[dict[str, Any], str]:
    """The front matter and the text of a template, which nobody changes."""
    _, metadata, text = _read_resource(name).split("---\n", 2)
    return yaml.safe_load(metadata), text


def _read_resource(name: str) -> str:
    return resources.files("hf_ext.model_cards").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _compile(source: str) -> jinja2.Template:
    """The text of a card as a template, which a process that writes several cards compiles once."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.loader = jinja2.FunctionLoader(_read_resource)
    environment.filters["cell"] = _cell
    environment.globals["table"] = lambda rows: "\n".join(
        ["| | |", "|---|---|", *(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items())]
    )
    return environment.from_string(source)


def _read_config(folder: Path, part: CardPart | None) -> tuple[dict[str, Any], str]:
    """The configuration and the name of the template that describes it."""
    if part is None and is_pipeline(folder):
        return read_config(folder)
    is_adapter = part is None and (folder / "adapter_config.json").is_file()
    config = read_json_object(folder / ("adapter_config.json" if is_adapter else "config.json"), optional=True)
    if part is not None or is_adapter:
        return config, "adapter.md" if part is None else part.template
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        told = (
            f"model_type is {model_type!r}; correct it"
            if config
            else "it names no model_type, or is not there; add it"
        )
        raise NoTemplate(f"{folder}/config.json: {told}, or write README.md yourself")
    if installed_room(model_type) is not None:
        return config, f"{model_type}.md"
    if not config.get("architectures"):
        told = "save the model with save_pretrained, or write README.md yourself"
        raise NoTemplate(f"{folder}/config.json: architectures names no class; {told}")
    return config, "transformers.md"


# What a training and an evaluation write under each name, and what a card is made from.
_TRAINING: dict[str, Any] = dict.fromkeys(("arguments", "task", "versions", "released"), dict)
_TRAINING["seconds"] = int | float
_RESULT: dict[str, Any] = {"metric": str, "dataset": str, "value": int | float}
_OF_RESULT: dict[str, Any] = {"name": str, "split": str, "task": str, "arguments": dict, "baselines": dict}


def check_results(results: object, path: Path) -> list[dict[str, Any]]:
    """Returns the results of an `eval.json`, or refuses those that are not as an evaluation writes them."""
    if not isinstance(results, list):
        raise DataError(f"{path}: `results` must be a list, got {results!r:.80}; evaluate again")
    for result in results:
        require_kinds(result, _RESULT, path, optional=False)
        require_kinds(result, _OF_RESULT, path)
        beside = result.get("baselines") or {}
        require_kinds(beside, dict.fromkeys(beside, int | float), path, optional=False)
    return results


def _read_evaluation(path: Path) -> dict[str, Any]:
    evaluation = read_json_object(path, optional=True) or {"results": []}
    for result in check_results(evaluation.get("results"), path):
        if not -sys.float_info.max <= result["value"] <= sys.float_info.max:
            raise DataError(f"{path}: {result['metric']} is {result['value']}, and must be finite; evaluate again")
    return dict(cut_paths(evaluation, near=path.parent))


def _describe_results(repo_id: str, arguments: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of a card that name the data sets of a model and its results."""
    parts = [source if isinstance(source, list) else [source] for source in (arguments.get("data") or {}).values()]
    paths = [source.get("path") for part in parts for source in part if isinstance(source, dict)]
    datasets = [str(path).partition("@")[0] for path in paths if _is_hub_id(path)]
    datasets += [result["dataset"] for result in results if _is_hub_id(result["dataset"])]
    fields: dict[str, Any] = {"datasets": list(dict.fromkeys(datasets))} if datasets else {}
    if results:
        fields["metrics"] = list(dict.fromkeys(result["metric"] for result in results))
        fields["model_name"] = repo_id.rpartition("/")[2]
        fields["eval_results"] = [_eval_result(result) for result in results]
    return fields


def _is_hub_id(value: object) -> bool:
    return isinstance(value, str) and bool(_HUB_ID.fullmatch(value.partition("@")[0])) and not os.path.exists(value)


def _eval_result(result: dict[str, Any]) -> EvalResult:
    dataset = result["dataset"]
    task = result.get("task") or "other"
    # Results are grouped by type, configuration and split. Data that are on no Hub have the type of a builder of
    # `datasets`; what they are called tells them apart.
    on_hub = _is_hub_id(dataset)
    return EvalResult(
        task_type=task,
        dataset_type=dataset if on_hub else _BUILDERS.get(task, "other"),
        dataset_config=None if on_hub else re.sub(r"\W+", "-", _show(dataset).lower()).strip("-"),
        dataset_name=_show(dataset),
        dataset_split=result.get("split"),
        metric_type=result["metric"],
        metric_name=result.get("name"),
        metric_value=result["value"],
        metric_args=result.get("arguments") or None,
    )


def _benchmark_entries(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only a data set of the Hub can show results, one for each of its tasks: the metrics are told apart as tasks."""
    entries = []
    for result in (each for each in results if _is_hub_id(each["dataset"])):
        notes = ", ".join(filter(None, (result.get("name"), _options(result)))) or None
        entries.append(EvalResultEntry(result["dataset"], result["metric"], result["value"], notes=notes))
    return eval_result_entries_to_yaml(entries)


def _result_row(result: dict[str, Any]) -> dict[str, str]:
    return {
        "name": result.get("name") or result["metric"],
        "value": _show(result["value"]),
        "baselines": ", ".join(f"{name} {_show(number)}" for name, number in (result.get("baselines") or {}).items()),
        "dataset": _show(result["dataset"]),
        "split": result.get("split") or "",
        "options": _options(result),
    }


def _options(result: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in _flatten(result.get("arguments") or {}).items())


def _training_rows(training: dict[str, Any], arguments: dict[str, Any]) -> dict[str, str]:
    rows = _flatten({key: value for key, value in arguments.items() if key not in _NOT_SHOWN.split()})
    rows |= _flatten({key: training.get(key) for key in ("steps", "samples", "hardware", "commit")})
    if training.get("seconds") is not None:
        minutes, seconds = divmod(round(training["seconds"]), 60)
        rows["time"] = f"{minutes // 60} h {minutes % 60} min {seconds} s"
    if training.get("versions"):
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    return rows


def _model_rows(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    if is_pipeline(folder):
        tensors = read_headers(folder)
    else:
        with open_checkpoint(folder) as checkpoint:
            tensors = [checkpoint.info(name) for name in checkpoint]
    rows = {"class": ", ".join(config["architectures"])} if config.get("architectures") else {}
    rows["parameters"] = f"{sum(math.prod(tensor.shape) for tensor in tensors):,}"
    rows["type"] = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    return rows | {"bytes": f"{sum(tensor.nbytes for tensor in tensors):,}"}


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested options as `section.key: text`; what was not set is left out."""
    flat: dict[str, str] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            flat[f"{prefix}{key}"] = _show(value)
    return flat


def _show(value: object) -> str:
    """A value as text; of a path on this machine only the last part, of an address the public part."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_show, value))
    return str(value).lower() if isinstance(value, bool) else str(cut_paths(value))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
