"""Which requests hf-ext emr serve answers in one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_ext.emr import EMRModel
from hf_ext.serving.tasks import ServedTask
from tests.emr.emr_testing import tiny_gpt2
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
