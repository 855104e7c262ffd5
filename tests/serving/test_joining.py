"""Which requests hf-ext emr serve answers in one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hf_ext.emr import EMRModel
from hf_ext.serving.tasks import ServedTask, classify
from tests.emr.emr_testing import tiny_bert, tiny_gpt2
from tests.emr.use_testing import merge


def test_what_is_continued_together(tmp_path: Path):
    """Prompts of any length, but where the settings count their tokens; and tasks that read the same tokens."""
    base = tiny_gpt2(tmp_path / "base")
    tasks = {name: tiny_gpt2(tmp_path / name, seed, base=base) for seed, name in enumerate("ab", 1)}
    merged = merge(base, tasks, tmp_path / "merged")
    emr = EMRModel.from_pretrained(merged)
    options: dict[str, Any] = {"max_tokens": 2, "stop": []}

    def forms(task: ServedTask, other: ServedTask) -> tuple[Any, Any]:
        return task.generation_job([4, 5], **options).form, other.generation_job([4, 5, 6], **options).form

    one, two = forms(ServedTask(emr, "a"), ServedTask(emr, "b"))
    assert one == two
    other = ServedTask(emr, "b")
    other.vocabulary = (31, other.limit)
    one, two = forms(ServedTask(emr, "a"), other)
    assert one != two
    other = ServedTask(emr, "b")
    other.padding = 7
    one, two = forms(ServedTask(emr, "a"), other)
    assert one != two
    (merged / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.5}))
    counting = ServedTask(EMRModel.from_pretrained(merged), "a")
    one, two = forms(counting, counting)
    assert one != two


def test_what_is_classified_together(tmp_path: Path):
    """Texts of any length where padding changes no answer, else of one length: an answer depends on its text alone."""
    base = tiny_bert(tmp_path / "base")
    merged = merge(base, {"a": tiny_bert(tmp_path / "a", 1, base=base, noise=0.3)}, tmp_path / "merged")
    emr = EMRModel.from_pretrained(merged)

    def has_one_form(task: ServedTask) -> bool:
        jobs = [task.classification_job(text) for text in ("a b c", "e f g h i j k")]
        alone = [classify(emr, [job])[0]["probs"] for job in jobs]
        if together := jobs[0].form == jobs[1].form:
            found = [answer["probs"] for answer in classify(emr, jobs)]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-5, rtol=0)
        same = [task.classification_job(text) for text in ("a b c", "d e f")]
        assert same[0].form == same[1].form and len(classify(emr, same)) == 2
        return together

    assert has_one_form(ServedTask(emr, "a"))
    on_the_left = ServedTask(emr, "a")
    on_the_left.reader.padding_side = "left"
    assert not has_one_form(on_the_left)
    without_mask = ServedTask(emr, "a")
    without_mask.reader.model_input_names = ["input_ids"]
    assert not has_one_form(without_mask)
    of_another_token = ServedTask(emr, "a")
    of_another_token.config.pad_token_id = 7
    assert not has_one_form(of_another_token)
    of_none = ServedTask(emr, "a")
    of_none.reader.pad_token = None
    assert not has_one_form(of_none)
