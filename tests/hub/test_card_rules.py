"""Cards that the Hub takes and cards that it refuses, in one table for the check, a push and the embedded Hub."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.hub import released
from hf_ext.hub.card_rules import CardRefused, check_card
from hf_ext.hub.publish import push, rehearse
from tests.kit.command_line import run
from tests.kit.hub import ask

from .published import save_bert

RESULT = {
    "task": {"type": "image-classification"},
    "dataset": {"type": "org/data", "name": "data"},
    "metrics": [{"type": "accuracy", "value": 0.5}],
}


def index(**changes: object) -> str:
    """A card with one result, changed."""
    return f"model-index:\n- name: mine\n  results:\n  - {json.dumps(RESULT | changes)}"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A Hub that is asked about cards."""
    with EmbeddedHub(tmp_path_factory.mktemp("asked") / "hub") as hub:
        yield hub.url


GOOD = [
    "license: apache-2.0\nlanguage: en\ntags: [a, b]",
    "license: [mit, apache-2.0]",
    "license: other\nlicense_name: mine\nlicense_link: LICENSE",
    "license: cc-by-sa-4.0\nlanguage: [de, fra, code, multilingual]",
    'language: "no"',
    "pipeline_tag: text-generation",
    "pipeline_tag: image-restoration\nlibrary_name: transformers",
    "base_model: gpt2",
    "base_model: org/name.v1_x-2",
    "base_model: [org/one, org/two]\nbase_model_relation: merge",
    "datasets: [imdb, org/data]",
    "license: mit\ndatasets: glue\nmetrics: acc",
    "license: null\nbase_model: null\ndatasets: []\ntags: null",
    index(),
    index(metrics=[{"type": "wer", "value": 0, "name": "WER", "args": {"a": 1}}]),
    "model-index: []",
    "my_own: {a: [1, null]}",
    "",
]


# The metadata, and line and field of each problem.
BAD = {
    "license: my own": [(2, "license")],
    "tags: [a]\nlicense: MIT": [(3, "license")],
    "license:\n- mit\n- mine": [(4, "license[1]")],
    "license: {name: mit}": [(2, "license")],
    "language: en-US": [(2, "language")],
    "language: [en, no]": [(2, "language[1]")],
    "language:\n- en\n- null": [(4, "language[1]")],
    "pipeline_tag: 3": [(2, "pipeline_tag")],
    "base_model: 3": [(2, "base_model")],
    "base_model: /data/alice/base": [(2, "base_model")],
    "base_model: Kokoro 82M": [(2, "base_model")],
    "base_model: a/b/c": [(2, "base_model")],
    "license: mit\nbase_model:\n- org/good\n- ../bad": [(5, "base_model[1]")],
    "datasets:\n- null\n- org/x\n- 3": [(3, "datasets[0]"), (5, "datasets[2]")],
    "tags: one": [(2, "tags")],
    "metrics: [psnr, 3]": [(2, "metrics[1]")],
    "library_name: [transformers]": [(2, "library_name")],
    "license: other\nlicense_name: 3\nlicense_link: x": [(3, "license_name")],
    "model-index: text": [(2, "model-index")],
    "model-index:\n- results: []": [(3, "model-index[0].name")],
    "model-index:\n- name: mine": [(3, "model-index[0].results")],
    "model-index:\n- name: ''\n  results: []": [(3, "model-index[0].name")],
    index(task=None): [(5, "model-index[0].results[0].task.type")],
    index(dataset={"name": "x"}): [(5, "model-index[0].results[0].dataset.type")],
    index(dataset={"type": "x"}): [(5, "model-index[0].results[0].dataset.name")],
    index(metrics=None): [(5, "model-index[0].results[0].metrics")],
    index(metrics=[{"type": "x"}]): [(5, "model-index[0].results[0].metrics[0].value")],
    index(metrics=[{"value": 1}]): [(5, "model-index[0].results[0].metrics[0].type")],
}


SAID = {
    "license: []": [(2, "license")],
    "license: other": [(2, "license"), (2, "license")],
    "license: other\nlicense_name: mine": [(2, "license")],
    "pipeline_tag: foo-bar": [(2, "pipeline_tag")],
    "datasets: [my photographs]": [(2, "datasets[0]")],
    "license: mit\nbase_model: a/b\nbase_model_relation: cousin": [(4, "base_model_relation")],
    "license: other\nlicense_name: x\nlicense_link: ask me": [(4, "license_link")],
    "new_version: a/b/c": [(2, "new_version")],
}


def test_metadata_that_have_no_end_are_said():
    assert [(each.line, each.refused) for each in check_card("---\nlicense: mit\n...\n# Mine\n")] == [(1, False)]
    assert check_card("---\n---\n# Mine\n") == check_card("# Mine\n") == []


CARDS = [(metadata, [], False) for metadata in GOOD]
CARDS += [(metadata, found, metadata in BAD) for metadata, found in (BAD | SAID).items()]


@pytest.mark.parametrize(("metadata", "found", "refused"), CARDS)
def test_the_check_and_the_hub_judge_a_card_alike(metadata, found, refused, url):
    card = f"---\n{metadata}\n---\n# Mine\n"
    problems = check_card(card)
    assert [(each.line, each.field, each.refused) for each in problems] == [(*each, refused) for each in found]
    # Other kinds of repositories have other rules.
    for kind, told in (("model", found), ("dataset", [])):
        answer = ask(url, "POST", "/api/validate-yaml", {"content": card, "repoType": kind})
        counts = [len(answer.json()[name]) for name in ("errors", "warnings")]
        assert answer.status == (400 if refused and told else 200)
        assert counts == ([len(told), 0] if refused else [0, len(told) + (not metadata)])


def test_a_push_says_what_the_hub_only_warns_of(tmp_path, bert):
    (bert / "README.md").write_text("---\nlicense: other\npipeline_tag: foo-bar\n---\n# Mine\n")
    assert len(rehearse(bert, tmp_path / "staged").notes) == 3


def test_a_push_of_such_a_card_is_refused_before_anything_is_sent(options, api, bert):
    (bert / "README.md").write_text("---\ntags: [a]\nlicense: my own\nbase_model: 3\n---\n# Mine\n")
    problems = []
    for license in ({}, {"license": "my own"}):
        with pytest.raises(CardRefused) as caught:
            push(bert, "org/model", **options, **license)
        problems.append([(problem.line, problem.field) for problem in caught.value.problems])
        (bert / "README.md").unlink(missing_ok=True)
    assert problems[0] == [(3, "license"), (4, "base_model")] and [field for _, field in problems[1]] == ["license"]
    assert not api.repo_exists("org/model")


def test_the_check_of_a_card_names_lines(bert):
    (bert / "README.md").write_text(
        "---\nlibrary_name: transformers\nlicense: my own\ndatasets: [null]\n---\n# Mine\n"
    )
    problems = json.loads(run("card", bert, "--check", "--json", code=1).output)["problems"]
    assert len(problems) == 2
    assert [f"line {line}:" in problem for line, problem in zip((3, 4), problems, strict=True)] == [True, True]


NO_METADATA = ["license: [mit", "license: mit\nlicense: mit", "- license", "license: &a mit\nbase_model: *a"]
NO_METADATA += ["a: !!python/object:os.system x", "a: " + "[" * 100_000, "a: " + "x" * 2**21]


@pytest.mark.parametrize("metadata", NO_METADATA, ids=lambda text: text[:20])
def test_metadata_that_no_reader_takes_is_refused_in_a_line(metadata, tmp_path, url):
    card = f"---\n{metadata}\n---\n# Mine\n"
    with pytest.raises(ValueError):
        check_card(card)
    answer = ask(url, "POST", "/api/validate-yaml", {"content": card, "repoType": "model"})
    assert answer.status == 400
    bert = save_bert(tmp_path / "bert")
    (bert / "README.md").write_text(card)
    assert isinstance(run("card", bert, "--check", code=2).exception, SystemExit)


RELEASED = sorted(path.parent.name for path in Path(__file__).parents[2].glob("model_cards/released/*/README.md"))


@pytest.mark.parametrize("name", RELEASED)
def test_the_cards_of_released_models_break_no_rule_and_lead_to_their_licence(name):
    card = Path(__file__).parents[2] / "model_cards" / "released" / name / "README.md"
    assert check_card(card.read_text(encoding="utf-8")) == []
    data = ModelCard.load(card).data
    assert card.with_name(data.license_link).is_file()
    # The text says the same as the metadata, and the licence of the package names it.
    spdx = data.license.upper() if data.license != "other" else f"LicenseRef-{data.license_name}"
    told = card.with_name(data.license_link).read_text(encoding="utf-8").partition("SPDX: ")[2].strip()
    project = tomllib.loads((card.parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told.lower() == spdx.lower() and told in project["license"].split(" AND ")


def test_a_package_without_models_knows_the_names_of_those_that_there_are():
    assert released._NAMES.split() == RELEASED
