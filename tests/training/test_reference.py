"""Every field of a training's YAML file is told, with the default that it really has."""

import ast
import dataclasses
import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from hf_ext.docstrings import read_entries
from hf_ext.training.arguments import DataArguments, DataSource, SourcePart, TrainingArguments
from hf_ext.training.methods import TASKS, find_task, list_sections
from hf_ext_cli.main import main

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "kind",
    [*(TrainingArguments, DataArguments, DataSource, SourcePart), *(find_task(method) for method in TASKS)],
    ids=lambda kind: kind.__name__,
)
def test_every_field_is_told_with_its_type_and_default(kind):
    told = {name: entry for entry in read_entries(kind) for name in entry.names}
    for item in dataclasses.fields(kind):
        entry = told[item.name]
        assert len(entry.meaning) > 10
        default = item.default
        if isinstance(default, (bool, int, float, str)):
            written = re.search(r"defaults to `(.+?)`|defaults to ([\w.e-]+)", entry.kind)
            assert written, (item.name, entry.kind)
            assert ast.literal_eval(written[1] or written[2]) == default, item.name


def test_the_page_has_every_field_of_every_method():
    page = runpy.run_path(str(REPOSITORY / "docs" / "options_reference.py"))["write_reference"]()
    for method in (None, *TASKS):
        for heading, entries in list_sections(method).values():
            assert f"## {heading}" in page
            assert all(f"- **{', '.join(entry.names)}**" in page for entry in entries)


def test_help_lists_the_fields_of_a_file_s_method():
    path = str(REPOSITORY / "examples" / "semanir" / "denoise_color.yaml")
    for words in (["train", "--help", path], ["train", path, "--max_steps", "3", "--help"]):
        said = CliRunner().invoke(main, words)
        assert said.exit_code == 0
        for name in ("max_bad_examples: float, defaults to 0.001", "patch_size: int", "embed_dim: int", "sigma"):
            assert name in said.stdout
    said = CliRunner().invoke(main, ["train", "--help"]).stdout
    assert "learning_rate: float, defaults to 2e-4" in said and "patch_size" not in said
    assert CliRunner().invoke(main, ["train"]).exit_code == 2
    assert "task.degradation" in list_sections("semanir")
