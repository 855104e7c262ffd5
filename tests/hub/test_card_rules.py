"""Cards that the Hub takes and cards that it refuses, in one table for the check, a push and the embedded Hub."""

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
    *("license: apache-2.0\nlanguage: en\ntags: [a, b]", "license: [mit, apache-2.0]", 'language: "no"', ""),
    *("license: other\nlicense_name: mine\nlicense_link: LICENSE", "pipeline_tag: text-generation"),
    "license: cc-by-sa-4.0\nlanguage: [de, fra, code, multilingual]",
    *(
        "pipeline_tag: image-restoration\nlibrary_name: transformers",
        "base_model: gpt2",
        "base_model: org/name.v1_x-2",
    ),
    *("base_model: [org/one, org/two]\nbase_model_relation: merge", "datasets: [imdb, org/data]"),
    "license: mit\ndatasets: glue\nmetrics: acc",
    *("license: null\nbase_model: null\ndatasets: []\ntags: null", "model-index: []", "my_own: {a: [1, null]}"),
    *(index(), index(metrics=[{"type": "wer", "value": 0, "name": "WER", "args": {"a": 1}}])),
]
# The metadata, and line and field of each problem.
BAD = {
    **{"license: my own": "2 license", "tags: [a]\nlicense: MIT": "3 license"},
    **{"license:\n- mit\n- mine": "4 license[1]", "license: {name: mit}": "2 license"},
    **{"language: en-US": "2 language", "language: [en, no]": "2 language[1]"},
    **{"language:\n- en\n- null": "4 language[1]", "pipeline_tag: 3": "2 pipeline_tag"},
    **{f"base_model: {name}": "2 base_model" for name in ("3", "/data/alice/base", "Kokoro 82M", "a/b/c")},
    "license: mit\nbase_model:\n- org/good\n- ../bad": "5 base_model[1]",
    "datasets:\n- null\n- org/x\n- 3": "3 datasets[0] 5 datasets[2]",
    **{"tags: one": "2 tags", "metrics: [psnr, 3]": "2 metrics[1]", "library_name: [transformers]": "2 library_name"},
    "license: other\nlicense_name: 3\nlicense_link: x": "3 license_name",
    **{"model-index: text": "2 model-index", "model-index:\n- results: []": "3 model-index[0].name"},
    "model-index:\n- name: mine": "3 model-index[0].results",
    "model-index:\n- name: ''\n  results: []": "3 model-index[0].name",
    index(task=None): "5 model-index[0].results[0].task.type",
    index(dataset={"name": "x"}): "5 model-index[0].results[0].dataset.type",
    index(dataset={"type": "x"}): "5 model-index[0].results[0].dataset.name",
    index(metrics=None): "5 model-index[0].results[0].metrics",
    index(metrics=[{"type": "x"}]): "5 model-index[0].results[0].metrics[0].value",
    index(metrics=[{"value": 1}]): "5 model-index[0].results[0].metrics[0].type",
}
SAID = {
    **{"license: []": "2 license", "license: other": "2 license 2 license"},
    **{"license: other\nlicense_name: mine": "2 license", "pipeline_tag: foo-bar": "2 pipeline_tag"},
    **{"datasets: [my photographs]": "2 datasets[0]", "new_version: a/b/c": "2 new_version"},
    "license: mit\nbase_model: a/b\nbase_model_relation: cousin": "4 base_model_relation",
    "license: other\nlicense_name: x\nlicense_link: ask me": "4 license_link",
}


def test_metadata_that_have_no_end_are_said():
    assert [(each.line, each.refused) for each in check_card("---\nlicense: mit\n...\n# Mine\n")] == [(1, False)]
    assert check_card("---\n---\n# Mine\n") == check_card("# Mine\n") == []


@pytest.mark.parametrize("metadata", [*GOOD, *BAD, *SAID])
def test_the_check_and_the_hub_judge_a_card_alike(metadata, url):
    card, refused = f"---\n{metadata}\n---\n# Mine\n", metadata in BAD
    problems = check_card(card)
    assert " ".join(f"{each.line} {each.field}" for each in problems) == (BAD | SAID).get(metadata, "")
    assert all(each.refused == refused for each in problems)
    # Other kinds of repositories have other rules.
    for kind, told in (("model", len(problems)), ("dataset", 0)):
        answer = ask(url, "POST", "/api/validate-yaml", {"content": card, "repoType": kind})
        counts = [len(answer.json()[name]) for name in ("errors", "warnings")]
        assert answer.status == (400 if refused and told else 200)
        assert counts == ([told, 0] if refused else [0, told + (not metadata)])


def test_a_push_says_what_the_hub_only_warns_of_and_the_check_names_lines(tmp_path, bert):
    (bert / "README.md").write_text("---\nlicense: other\npipeline_tag: foo-bar\n---\n# Mine\n")
    assert len(rehearse(bert, tmp_path / "staged").notes) == 3
    card = "---\nlibrary_name: transformers\nlicense: my own\ndatasets: [null]\n---\n# Mine\n"
    (bert / "README.md").write_text(card)
    first, second = json.loads(run("card", bert, "--check", "--json", code=1).output)["problems"]
    assert "line 3:" in first and "line 4:" in second


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


NO_METADATA = ["license: [mit", "license: mit\nlicense: mit", "- license", "license: &a mit\nbase_model: *a"]
NO_METADATA += ["a: !!python/object:os.system x", "a: " + "[" * 100_000, "a: " + "x" * 2**21]


@pytest.mark.parametrize("metadata", NO_METADATA, ids=lambda text: text[:20])
def test_metadata_that_no_reader_takes_is_refused_in_a_line(metadata, bert, url):
    card = f"---\n{metadata}\n---\n# Mine\n"
    with pytest.raises(ValueError):
        check_card(card)
    assert ask(url, "POST", "/api/validate-yaml", {"content": card, "repoType": "model"}).status == 400
    (bert / "README.md").write_text(card)
    assert isinstance(run("card", bert, "--check", code=2).exception, SystemExit)


ROOT = Path(__file__).parents[2]
RELEASED = sorted(path.parent.name for path in ROOT.glob("model_cards/released/*/README.md"))


@pytest.mark.parametrize("name", RELEASED)
def test_the_cards_of_released_models_break_no_rule_and_lead_to_their_licence(name):
    card = ROOT / "model_cards" / "released" / name / "README.md"
    assert check_card(card.read_text(encoding="utf-8")) == []
    data = ModelCard.load(card).data
    assert card.with_name(data.license_link).is_file()
    # The text says the same as the metadata, and the licence of the package names it.
    spdx = data.license.upper() if data.license != "other" else f"LicenseRef-{data.license_name}"
    told = card.with_name(data.license_link).read_text(encoding="utf-8").partition("SPDX: ")[2].strip()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told.lower() == spdx.lower() and told in project["license"].split(" AND ")


def test_a_package_without_models_knows_the_names_of_those_that_there_are():
    assert released._NAMES.split() == RELEASED
