"""Models are scored as what they were trained for, and scores are numbers."""

import json

import datasets
import numpy as np
import peft
import pytest
import torch
import yaml

from hf_ext.errors import DataError
from hf_ext.tasks.sequences import MRConvTask
from hf_ext.tasks.series import PositionsTask, SeriesClassificationTask, SeriesRegressionTask
from hf_ext.tasks.texts import LanguageModelTask, MaskedLanguageModelTask, RetrievalTask, TextTask
from hf_ext.training import evaluate_checkpoint
from hf_ext.training.arguments import DataSource
from hf_ext.training.evaluation import evaluate, write_results
from hf_ext.training.models import STARTED_ANEW, load_trained
from tests.kit.refusals import refused

SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}
NAMED: dict = {"columns": ["x", "y"], "target_columns": ["a", "b"], "num_labels": 2, "label_names": ["no", "yes"]}


def made(kind: type[MRConvTask], **given: object) -> MRConvTask:
    known = {name: value for name, value in {**NAMED, **given}.items() if name in kind.__dataclass_fields__}
    return kind(max_length=16, **known)


# What was trained, what scores it, the adapter on it, and what a refusal names.
SCORED = [
    *((kind, kind, {}, None, None) for kind in (TextTask, LanguageModelTask, MaskedLanguageModelTask, RetrievalTask)),
    *((kind, kind, {}, None, None) for kind in (PositionsTask, SeriesClassificationTask, SeriesRegressionTask)),
    (TextTask, TextTask, {"num_labels": 3, "label_names": []}, None, "classifier.weight"),
    (LanguageModelTask, TextTask, {}, None, "classifier.weight"),
    (TextTask, LanguageModelTask, {}, None, "another kind (MRConvForSequenceClassification, not MRConvForCausalLM)"),
    (TextTask, RetrievalTask, {}, None, "comparison.weight"),
    (PositionsTask, SeriesClassificationTask, {}, None, "another kind"),
    (SeriesRegressionTask, SeriesClassificationTask, {}, None, "another kind"),
    (SeriesClassificationTask, SeriesRegressionTask, {}, None, "another kind"),
    (SeriesRegressionTask, SeriesRegressionTask, {"target_columns": ["a"]}, None, "classifier.weight"),
    (SeriesRegressionTask, SeriesRegressionTask, {"target_columns": ["b", "a"]}, None, "target_columns"),
    (SeriesRegressionTask, SeriesRegressionTask, {"target_columns": ["c", "d"]}, None, None),
    (SeriesRegressionTask, SeriesRegressionTask, {"columns": ["y", "x"]}, None, "task.columns"),
    *((PositionsTask, PositionsTask, {"columns": [name, "z"]}, None, None) for name in "xy"),
    (TextTask, TextTask, {}, {}, None),
    (LanguageModelTask, LanguageModelTask, {}, {}, None),
    (LanguageModelTask, TextTask, {}, {"modules_to_save": ["classifier"]}, None),
    (LanguageModelTask, TextTask, {}, {}, "classifier.weight"),
    (SeriesRegressionTask, SeriesRegressionTask, {"columns": ["y", "x"]}, {}, "task.columns"),
]


@pytest.mark.parametrize(("trained", "scores", "given", "adapter", "told"), SCORED)
def test_a_model_is_scored_as_what_it_was_trained_for(tmp_path, trained, scores, given, adapter, told):
    base, place, task = made(trained), tmp_path / "base", made(scores, **given)
    model = base.build_model({**SIZES, "bidirectional": trained is MaskedLanguageModelTask}, None)
    base.save_model(model, model.state_dict(), place)
    if adapter is not None:
        model = made(scores).build_model({}, str(place))
        model.name_or_path, place = str(place), tmp_path / "adapter"
        config = peft.LoraConfig(target_modules="all-linear", **adapter)
        peft.get_peft_model(model, config).save_pretrained(place)
    if told is None:
        assert adapter or not getattr(load_trained(task, str(place)), STARTED_ANEW)
        load_trained(task, str(place))
    else:
        with refused(DataError, told):
            load_trained(task, str(place))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(
            (SeriesClassificationTask, {"architectures": [name]})
            for name in ("MRConvForImageClassification", "MineForRain")
        ),
        (SeriesRegressionTask, {"problem_type": None}),
    ],
)
def test_models_that_share_a_head_or_do_not_name_it_are_scored(tmp_path, kind, changes):
    task, file = made(kind), tmp_path / "config.json"
    model = task.build_model(SIZES, None)
    model.config.target_mean = model.config.target_std = [1.0, 1.0]
    task.save_model(model, model.state_dict(), tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    load_trained(task, str(tmp_path))


SERIES = {"x": [1.0, 2.0], "y": [3.0, 4.0], "a": 1.0, "b": 2.0}
BROKEN = [
    *((kind, {"text": "abcd", "label": 0}) for kind in (TextTask, LanguageModelTask, MaskedLanguageModelTask)),
    (RetrievalTask, {"text1": "ab", "text2": "c", "label": 0}),
    (PositionsTask, {**SERIES, "label": [0, 0]}),
    (SeriesClassificationTask, {**SERIES, "label": 0}),
    (SeriesRegressionTask, SERIES),
]


@pytest.mark.parametrize(("kind", "example"), BROKEN)
def test_answers_that_are_not_numbers_have_no_score(kind, example, caplog):
    task = made(kind)
    model = task.build_model({**SIZES, "bidirectional": kind is MaskedLanguageModelTask}, None)
    found = evaluate(task, model, datasets.Dataset.from_list([example] * 2))
    assert "NaN" not in caplog.text and all(map(np.isfinite, found.values()))
    torch.nn.init.constant_([*model.parameters()][-1], float("nan"))
    found = evaluate(task, model, datasets.Dataset.from_list([example] * 2))
    told = {name for name, value in found.items() if np.isnan(value)}
    assert told >= {*task.metric_names} - {"mae_of_mean"} and "2 of 2" in caplog.text


def test_scores_name_their_precision_and_are_numbers(tmp_path, caplog):
    task, out = made(TextTask), tmp_path / "eval.json"
    model = task.build_model(SIZES, None)
    task.save_model(model, model.state_dict(), tmp_path / "model")
    datasets.Dataset.from_list([{"text": "abcd", "label": 0}, {"text": "z", "label": 1}]).to_json(tmp_path / "d.jsonl")
    about = {"method": "mrconv-text", "mixed_precision": "fp16", "data": {"eval": {"path": str(tmp_path / "d.jsonl")}}}
    about["task"] = {"max_length": 16, "num_labels": 2, "label_names": NAMED["label_names"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(about))
    score = lambda *flags: evaluate_checkpoint(str(tmp_path / "model"), tmp_path / "run.yaml", [*flags])  # noqa: E731
    (_, plain), (_, half) = score()["results"], score("--mixed_precision", "bf16")["results"]
    assert plain["value"] != half["value"] == pytest.approx(plain["value"], rel=0.02)
    assert ("mixed_precision" in plain["arguments"], half["arguments"]["mixed_precision"]) == (False, "bf16")
    torch.nn.init.constant_(model.classifier.bias, float("nan"))
    task.save_model(model, model.state_dict(), tmp_path / "model")
    with refused(DataError, "accuracy", "NaN"):
        score()
    write_results(out, task, {"accuracy": float("inf"), "loss": 1.0}, {"": DataSource("d")})
    assert [each["metric"] for each in json.loads(out.read_text())["results"]] == ["loss"]
    assert "accuracy (inf)" in caplog.text
