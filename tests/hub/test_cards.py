"""Cards: filled from the files of the folder, valid metadata, nothing left to fill in, and a snippet that runs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData, get_session, parse_eval_result_entries
from PIL import Image, ImageChops

from hf_ext.errors import DataError, NotPublished, UsageError
from hf_ext.hub import publish
from hf_ext.hub.card_rules import front_matter, read_front_matter
from hf_ext.hub.cards import MARKER, write_card
from hf_ext.hub.publish import preview, push, rehearse, stage
from hf_ext.hub.released import list_released
from hf_ext.semanir import SemanIRImageProcessor
from tests.kit.command_line import run
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

from .published import EVALUATION, TRAINING, commit, contents, edit, on_hub, save_bert, save_snapshot, tiny_adapter


def assert_finished(text: str) -> None:
    """Nothing that a reader would have to fill in, and no trace of the template."""
    for trace in ("More Information Needed", "{{", "{%", "None", "null", "Undefined", "TODO", "nan"):
        assert trace not in text, trace
    # a heading stands on its own, and every section says something
    assert not re.search(r"[^\n]\n## ", text)
    assert not re.search(r"^## [^\n]*\n+(## |\Z)", text, re.MULTILINE)


def test_metadata_of_a_trained_model(snapshot):
    card = ModelCard.load(write_card(snapshot, repo_id="org/denoiser", license="mit"))
    wanted = {"license": "mit", "library_name": "transformers", "pipeline_tag": "image-restoration"}
    wanted |= {"base_model": "org/base", "base_model_relation": "finetune", "datasets": ["org/photos"]}
    wanted |= {"metrics": ["psnr", "ssim"], "tags": ["semanir", "image-restoration", "image-to-image"]}
    assert wanted.items() <= card.data.to_dict().items() and card.data.model_name == "denoiser"
    first, second = card.data.eval_results
    assert (first.task_type, first.metric_type, first.metric_value) == ("image-to-image", "psnr", 30.123456)
    assert (first.dataset_type, first.dataset_split, first.metric_args) == ("org/photos", "test", {"sigma": 25})
    assert (second.dataset_name, second.dataset_type) == ("three photographs", "imagefolder")
    assert (second.task_type, second.dataset_config) == ("image-to-image", "three-photographs")
    # What was measured on a data set of the Hub is an evaluation result there.
    path = snapshot / ".eval_results" / "hf_ext.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/photos", "psnr", 30.123456)
    assert entry.notes == "PSNR (RGB, border 0), sigma 25"
    # Every part of the data is named.
    arguments = TRAINING["arguments"] | {"data": {"train": [{"path": "org/a@v1"}, {"path": "org/b"}]}}
    (snapshot / "training.json").write_text(json.dumps(TRAINING | {"arguments": arguments}))
    again = ModelCard.load(write_card(snapshot, repo_id="org/denoiser")).data
    assert again.datasets == ["org/a", "org/b", "org/photos"] and path.exists()
    (snapshot / "eval.json").write_text(json.dumps({"results": EVALUATION["results"][1:]}))
    write_card(snapshot, repo_id="org/denoiser")
    assert not path.exists()


def test_every_released_card_shows_its_picture_where_it_is_published(tmp_path):
    widgets = {}
    for model in list_released():
        # The base of the merge lies beside it, where others cannot reach it: it is not published as it is.
        if not model.folder.joinpath("emr.json").is_file():
            out = Path(shutil.copytree(model.folder, tmp_path / model.name))
            card = ModelCard.load(write_card(out, repo_id=f"org/{model.name}"))
            assert "![Example outputs](before_after.png)" in card.text and (out / "before_after.png").is_file()
            assert "baseline |" in card.text or model.name == "spoken-digits"
            widgets[model.name] = card.data.to_dict().get("widget")
    # A sound would have to be given for an example of a classifier of sounds.
    assert widgets.pop("spoken-digits") is None and all(widgets.values())
    assert widgets["cifar10"][0]["text"].startswith("airplane, automobile, bird")


def test_text_of_a_trained_model(tmp_path, snapshot):
    text = write_card(snapshot, repo_id="org/denoiser").read_text()
    assert_finished(text)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        *("How to use it", "Intended use", "Data", "Training", "Results"),
        *("Model", "Limits", "What differs from the paper", "Citation"),
    ]
    count = sum(value.numel() for value in tiny_restorer().state_dict().values())
    assert {
        *("| sigma | 25 |", "| learning_rate | 0.0002 |", "| commit | 1234abcd |", "| hardware | 2 CPU cores |"),
        *("| time | 1 h 2 min 3 s |", f"| parameters | {count:,} |", "| train.path | photographs |"),
        "| PSNR (RGB, border 0) | 30.1235 | org/photos | test | sigma 25 |",
        "| SSIM \\| RGB | 0.9 | three photographs | test |  |",
    } <= set(text.splitlines())
    # the place on the trainer's disk is nobody's business
    assert not [word for word in ("/somewhere", "runs/denoise", "![", "widget") if word in text]
    assert "arxiv.org/abs/2405.20008" in text and "license: apache-2.0" in text
    # Baselines stand beside the scores; a picture of the folder travels, and is shown with the model.
    first, second = EVALUATION["results"]
    edit(snapshot / "eval.json", results=[first | {"baselines": {"input": 20.17, "fine-tune": 31.5}}, second])
    Image.new("RGB", (4, 4)).save(snapshot / "before_after.png")
    out = stage(snapshot, tmp_path / "out", repo_id="org/denoiser")
    assert (out / "before_after.png").read_bytes() == (snapshot / "before_after.png").read_bytes()
    card = ModelCard.load(out / "README.md")
    assert {
        "| metric | value | baseline | dataset | split | options |",
        "| PSNR (RGB, border 0) | 30.1235 | input 20.17, fine-tune 31.5 | org/photos | test | sigma 25 |",
        "| SSIM \\| RGB | 0.9 |  | three photographs | test |  |",
    } <= set(card.text.splitlines())
    assert card.text.index("(before_after.png)") < card.text.index("## How to use it")
    assert card.data.widget == [{"text": "-", "output": {"url": "before_after.png"}}]


@pytest.mark.parametrize("drop", ["commit", "hardware", "seconds", "versions", "steps", "arguments"])
def test_a_partial_report_leaves_no_gap(snapshot, drop):
    report = {key: value for key, value in TRAINING.items() if key != drop}
    for partial in (report, report | {drop: None}):
        (snapshot / "training.json").write_text(json.dumps(partial))
        assert_finished(write_card(snapshot, repo_id="org/denoiser").read_text())


U_SHAPED = {"architecture": "u-shaped", "depths": (1, 1), "num_heads": (2, 2), "refinement_depth": 1}
CONFIGURED = [
    ({"shift_policy": "layer"}, "each stage selects its tokens twice"),
    ({"shift_policy": "none"}, "Windows are never shifted"),
    ({"similarity": "cosine"}, "the paper uses the inner product"),
    ({"include_self": True}, "one of its own keys"),
    ({"scale": 2}, "enlarges colour images 2 times"),
    ({"train_top_k": (3, 6)}, "training used 3, 6."),
    (U_SHAPED, "resampling of the U-shaped architecture are our choice"),
]


@pytest.mark.parametrize(("options", "present"), CONFIGURED)
def test_the_card_describes_the_configuration(tmp_path, options, present):
    text = write_card(save_snapshot(tmp_path / "model", reports=False, **options), repo_id="org/x").read_text()
    assert_finished(text)
    assert present in text
    # Sections without data are left out.
    assert not re.search(r"^## (Data|Training|Results)$|model-index", text, re.MULTILINE)
    other = write_card(save_snapshot(tmp_path / "default", reports=False), repo_id="org/x").read_text()
    assert (present in other) == (options in ({"shift_policy": "layer"}, {"include_self": True}))


RESULT = EVALUATION["results"][0]
# The file, its content, and what is at fault.
MALFORMED = [
    ("eval.json", "[", "JSON"),
    ("eval.json", {"results": {}}, "results"),
    ("eval.json", {"results": [3]}, "metric"),
    ("eval.json", {"results": [RESULT | {"value": float("nan")}]}, "psnr"),
    ("eval.json", {"results": [RESULT | {"value": True}]}, "value"),
    ("eval.json", {"results": [RESULT | {"dataset": None}]}, "dataset"),
    ("eval.json", {"results": [RESULT | {"baselines": {"input": True}}]}, "input"),
    ("eval.json", {"results": [RESULT | {"baselines": [20.17]}]}, "baselines"),
    ("training.json", TRAINING | {"arguments": [1]}, "arguments"),
    ("training.json", TRAINING | {"arguments": {"data": 3}}, "data"),
    ("training.json", TRAINING | {"task": 3}, "task"),
    ("training.json", TRAINING | {"seconds": "long"}, "seconds"),
]


@pytest.mark.parametrize(("name", "content", "fault"), MALFORMED)
def test_a_malformed_report_is_named(snapshot, name, content, fault):
    (snapshot / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with refused(ValueError, name, fault):
        write_card(snapshot, repo_id="org/x")
    assert not (snapshot / "README.md").exists()


def test_a_folder_that_is_no_model(tmp_path):
    with refused(DataError, "model_type"):
        write_card(tmp_path, repo_id="org/x")
    edit(tmp_path / "config.json", model_type="bert")
    with refused(DataError, "architectures", "names"):
        write_card(tmp_path, repo_id="org/x")


def test_an_authors_card_is_kept_and_ours_is_renewed(tmp_path, snapshot):
    write_card(snapshot, repo_id="org/first")
    assert "org/second" in write_card(snapshot, repo_id="org/second").read_text()
    edited = (snapshot / "README.md").read_text().replace(MARKER, "I trained this.")
    (snapshot / "README.md").write_text(edited)
    assert write_card(snapshot, repo_id="org/third").read_text() == edited
    folder = stage(snapshot, tmp_path / "out", repo_id="org/fourth")
    assert (folder / "README.md").read_text() == edited
    assert (folder / ".eval_results" / "hf_ext.yaml").exists()


# The metadata of an author's card, and the licence that it has afterwards; None where that is refused.
LICENSED = {
    **dict.fromkeys(("", "---\nlicense: mit\n---\n", "---\r\nlibrary_name: transformers\r\n---\r\n"), "mit"),
    "---\nlicense:\n---\n": "mit",
    "\ufeff---\n# --- mine ---\nlibrary_name: transformers\n---\n": "mit",
    "---\nlicense: [mit]\n---\n": ["mit"],
    "---\nlicense: [mit, gpl]\n---\n": None,
}


@pytest.mark.parametrize("matter", LICENSED)
def test_a_licence_that_is_asked_for_is_in_the_authors_card_or_refused(snapshot, matter):
    card, content = snapshot / "README.md", f"{matter}# Mine\n".encode()
    card.write_bytes(content)
    if LICENSED[matter] is None:
        with refused(UsageError, "license", "'mit'"):
            write_card(snapshot, repo_id="org/x", license="mit")
        assert card.read_bytes() == content
        return
    text = write_card(snapshot, repo_id="org/x", license="mit").read_bytes().decode()
    assert read_front_matter(text)["license"] == LICENSED[matter] and text.endswith("# Mine\n")
    assert ("library_name" in matter) == ("library_name" in read_front_matter(text))


WRITTEN_IN = {
    "a sentence": ("## Uses\n", "## Uses\n\nFor photographs of birds.\n"),
    "a field": ("- **Developed by:** [More Information Needed]", "- **Developed by:** alice"),
    "a title": ("# Model Card for Model ID", "# My birds"),
    "a licence": ("---\n", "---\nlicense: cc-by-nc-4.0\n"),
    "a picture": ("## Glossary [optional]", "![birds](birds.png)"),
}


@pytest.mark.parametrize("change", WRITTEN_IN)
def test_a_template_is_replaced_until_somebody_writes_into_it(tmp_path, change):
    tiny_adapter().save_pretrained(tmp_path / "adapter")
    card = tmp_path / "adapter" / "README.md"
    # a model in memory has no name, which the Hub would refuse
    template = card.read_text().replace("base_model: ''\n", "")
    text = template.replace(*WRITTEN_IN[change], 1)
    card.write_text(text)
    listing = rehearse(tmp_path / "adapter", tmp_path / "kept")
    assert (tmp_path / "kept" / "README.md").read_text() == text != template
    assert any("More Information Needed" in note for note in listing.notes)
    for untouched in (template, ModelCard.from_template(ModelCardData(tags=["a"])).content):
        card.write_text(untouched)
        write_card(tmp_path / "adapter", repo_id="org/x")
        assert MARKER in card.read_text()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le"])
def test_a_card_in_another_encoding_is_refused_by_name(snapshot, encoding):
    (snapshot / "README.md").write_bytes("---\nlicense: mit\n---\n# Modèle\n".encode(encoding))
    with refused(DataError, "README.md", "UTF-8"):
        write_card(snapshot, repo_id="org/x")
    assert "UTF-8" in run("card", snapshot, "--check", code=2).output


LINES = ["# ---- data ----", "note: a ---", "note: ---", "#---", "note: |\n  ---", "- ---", "----"]


@pytest.mark.parametrize("line", LINES)
def test_only_a_line_of_its_own_ends_the_metadata(line):
    last = "base_model: 3"
    assert front_matter(f"---\nlicense: mit\n{line}\n{last}\n---\n# Mine\n").endswith(last)
    assert front_matter(f"---\r\n{line}\r\n{last}\r\n--- \r\n---\r\n") == f"{line}\r\n{last}"
    assert front_matter("---\n---\n# Mine\n---\n") == "" == front_matter("no metadata\n---\na: 1\n---\n")


def test_other_kinds_of_models(tmp_path):
    tiny_adapter().save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="org/denoiser")
    card = ModelCard.load(write_card(tmp_path / "adapter", repo_id="org/adapter"))
    assert_finished(card.content)
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/denoiser")
    assert card.data.base_model_relation == "adapter" and "LORA adapter for [org/denoiser]" in card.text
    assert "from hf_ext import SemanIRForImageRestoration" in card.text
    assert 'SemanIRForImageRestoration.from_pretrained("org/denoiser")' in card.text
    # Somebody else's adapter has a licence that only they know; that of our own run is its method's.
    assert "license" not in card.data.to_dict() and "pipeline_tag" not in card.data.to_dict()
    (tmp_path / "adapter" / "training.json").write_text(json.dumps(TRAINING))
    ours = ModelCard.load(write_card(tmp_path / "adapter", repo_id="org/adapter")).data
    # transformers guesses no task of an adapter
    assert (ours.library_name, ours.license, ours.pipeline_tag) == ("peft", "apache-2.0", None)
    bert = ModelCard.load(write_card(save_bert(tmp_path / "bert"), repo_id="org/bert"))
    assert_finished(bert.content)
    assert "license" not in bert.data.to_dict() and "A `bert` model." in bert.text


@pytest.mark.slow
def test_the_snippet_of_the_card_runs_where_hf_ext_is_not_installed(hub, options, tmp_path, run_client):
    model = tiny_restorer()
    with torch.no_grad():
        # as initialised, the model hardly changes a picture
        model.reconstruction[0].bias.fill_(0.1)
    model.save_pretrained(tmp_path / "tiny")
    SemanIRImageProcessor().save_pretrained(tmp_path / "tiny")
    push(tmp_path / "tiny", "org/tiny", **options)
    card = get_session().get(f"{hub.url}/org/tiny/resolve/main/README.md").text
    snippet, by_pipeline = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    home = tmp_path / "home"
    home.mkdir()
    degraded = Image.effect_noise((10, 6), 60).convert("RGB")
    degraded.save(home / "degraded.png")
    # Nor is numba, whose compilation of the kernels would take ten seconds.
    absent = "import os, sys\nsys.modules['hf_ext'] = sys.modules['numba'] = None\n"
    run_client(f"{absent}{snippet}\nos.rename('restored.png', 'first.png')\n{by_pipeline}")
    with torch.no_grad():
        # In double precision, for which no kernels are compiled either.
        outputs = model.double()(SemanIRImageProcessor()(degraded, return_tensors="pt")["pixel_values"].double())
    expected = SemanIRImageProcessor().post_process_image_restoration(outputs)[0]
    for name in ("first.png", "restored.png"):
        with Image.open(home / name) as restored:
            # two copies of a network: their last bits may differ, and with them a rounding
            difference = ImageChops.difference(restored, expected)
            assert max(high for _, high in difference.getextrema()) <= 1 and restored.tobytes() != degraded.tobytes()


@pytest.mark.parametrize(
    "entry", ["license:", "license: null", "license: ''", '"license": ~', "license: []", "license:   # mine"]
)
@pytest.mark.parametrize("rest", ["", "tags: [a]\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_empty_licence_is_filled_in(tmp_path, entry, rest, end):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_bytes(
        f"---\n{rest}{entry}\n{rest and 'language: en'}\n---\n# Mine\n".replace("\n", end).encode()
    )
    text = write_card(tmp_path, repo_id="org/mine", license="mit").read_bytes().decode()
    found = read_front_matter(text)
    assert found["license"] == "mit" and ("tags" in found) == ("language" in found) == bool(rest)
    assert text.replace("\r", "").endswith("# Mine\n")


HEAD = "license: mit\nextra_gated_prompt: Please\ndatasets: org/old"
# A card on the Hub; whether it stays as it is, and which of its entries the one that replaces it has.
THERE = {
    "written": (f"---\n{HEAD}\n---\n# Mine\n", True, ()),
    "without metadata": ("\ufeff# Mine\r\n", True, ()),
    "made with the repository": (f"---\n{HEAD}\n---\n", False, ("license", "extra_gated_prompt")),
    "of hf-ext, with settings": (f"---\n{HEAD}\n---\n\n{MARKER}\n\n# Old\n", False, ("license", "extra_gated_prompt")),
}


@pytest.mark.filterwarnings("ignore:Warnings while validating")
@pytest.mark.parametrize("kind", THERE)
@pytest.mark.parametrize("own", [None, "# By the owner of the folder\n"])
def test_a_card_and_a_licence_on_the_hub_are_not_replaced_in_silence(options, api, bert, tmp_path, kind, own, capsys):
    card, is_kept, entries = THERE[kind]
    api.create_repo("org/model")
    commit(api, **{"README.md": card.encode(), "LICENSE": b"theirs", "NOTICE": b"theirs"})
    (bert / "LICENSE").write_text("ours")
    if own:
        (bert / "README.md").write_text(own)
    asked = {"revision": None, "create_pr": False, "commit_message": "x", "license": None}
    notes = preview(bert, "org/model", **asked | options).notes
    push(bert, "org/model", **options)
    there = on_hub(api, tmp_path)
    told, description = capsys.readouterr().err, api.list_repo_commits("org/model")[0].message
    said = [f"{name}: the one on the Hub, which is another, is replaced" for name in ("LICENSE", "README.md")]
    said = ["README.md: the one that somebody wrote on the Hub is kept", said[0]] if is_kept and not own else said
    assert all(each in text for each in said for text in ("\n".join(notes), told, description))
    assert there["NOTICE"] == b"theirs" and there["LICENSE"] == b"ours"
    if own or is_kept:
        assert there["README.md"] == (own or card).encode()
        return
    found, before = (read_front_matter(text) for text in (there["README.md"].decode(), card))
    assert "datasets" not in found and {name: found[name] for name in entries} == {
        name: before[name] for name in entries
    }
    # once more, and nothing is left to do
    capsys.readouterr()
    push(bert, "org/model", **options)
    assert capsys.readouterr().err == "Kept: .gitattributes, NOTICE\n" and len(api.list_repo_commits("org/model")) == 3


@pytest.mark.filterwarnings("ignore:Warnings while validating")
@pytest.mark.parametrize("kind", THERE)
def test_a_licence_that_is_asked_for_agrees_with_that_of_the_card_on_the_hub(options, api, bert, tmp_path, kind):
    api.create_repo("org/model")
    commit(api, **{"README.md": THERE[kind][0].encode()})
    if kind in ("written", "made with the repository"):
        with refused(UsageError, "README.md of org/model on the Hub", "'mit'", "apache-2.0"):
            push(bert, "org/model", license="apache-2.0", **options)
    else:
        push(bert, "org/model", license="apache-2.0", **options)
        card = on_hub(api, tmp_path)["README.md"].decode()
        assert read_front_matter(card)["license"] == "apache-2.0" and ("# Mine" in card) == THERE[kind][1]


OTHER = {"license": "other", "license_name": "mine", "license_link": "https://mine.org"}
CHOSEN = {"bert": OTHER, "adapter": {"license": ["mit", "apache-2.0"]}, "semanir": {"license": "mit"}}


def save_kind(kind, folder):
    """A model whose card has no licence of its own, or that of a template."""
    if kind == "bert":
        return save_bert(folder)
    if kind == "adapter":
        tiny_adapter().save_pretrained(folder)
        edit(folder / "adapter_config.json", base_model_name_or_path="org/denoiser")
        return folder
    return save_snapshot(folder)


def give_license(folder, entries):
    """Writes the card of hf-ext, with a licence."""
    card = write_card(folder, repo_id="org/model", license="mit")
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in entries.items())
    card.write_text(card.read_text().replace("license: mit\n", lines + "language: de\n"))


def license_of(folder):
    found = read_front_matter((folder / "README.md").read_text())
    return {name: value for name, value in found.items() if name.startswith("license")}


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_card_of_ours_keeps_its_licence_when_it_is_written_again(options, api, tmp_path, kind, caplog):
    folder, entries = save_kind(kind, tmp_path / "mine"), CHOSEN[kind]
    give_license(folder, entries)
    write_card(folder, repo_id="org/model")
    first = stage(folder, tmp_path / "first")
    second = stage(first, tmp_path / "second", license="other" if entries is OTHER else None)
    push(folder, "org/model", **options)
    pulled = Path(api.snapshot_download("org/model", local_dir=tmp_path / "pulled"))
    push(pulled, "org/fork", **options)
    forked = Path(api.snapshot_download("org/fork", local_dir=tmp_path / "forked"))
    # without a choice of its own a folder takes that of the Hub
    (folder / "README.md").unlink()
    push(folder, "org/fork", **options)
    again = Path(api.snapshot_download("org/fork", local_dir=tmp_path / "again"))
    assert [license_of(each) for each in (first, second, pulled, forked, again)] == [entries] * 5
    assert "language: de" in (forked / "README.md").read_text() and "its licence" not in caplog.text
    push(folder, "org/fork", license="bsd", **options)
    again = Path(api.snapshot_download("org/fork", local_dir=tmp_path / "last"))
    assert license_of(again) == {"license": "bsd"}
    assert f"org/fork on the Hub: its licence {entries['license']!r} becomes 'bsd'" in caplog.text


def test_the_licence_of_the_data_is_not_replaced(tmp_path):
    folder = save_snapshot(tmp_path / "mine")
    edit(folder / "training.json", released={"card_license": OTHER})
    for license in (None, "other"):
        assert license_of(stage(folder, tmp_path / str(license), repo_id="org/x", license=license)) == OTHER
    with refused(UsageError, "'other'", "'mit'"):
        stage(folder, tmp_path / "refused", license="mit")


def test_a_card_of_ours_with_metadata_that_cannot_be_read_is_named(bert):
    (bert / "README.md").write_text(f"---\nlicense: [\n---\n{MARKER}\n")
    with refused(DataError, "README.md", "delete the card"):
        write_card(bert, repo_id="org/model")


@pytest.mark.parametrize("way", ["by its name", "by its folder", "by a link"])
def test_the_card_of_a_released_model_is_not_written(released_models, tmp_path, way):
    folder = save_snapshot(released_models / "denoise-tiny")
    before = contents(folder)
    (tmp_path / "link").symlink_to(folder)
    named = {"by its name": "denoise-tiny", "by its folder": folder, "by a link": tmp_path / "link"}[way]
    assert "copy the folder" in run("card", named, "--license", "mit", code=2).output
    assert "there is no card" in run("card", named, "--check", code=1).output and contents(folder) == before


@pytest.mark.filterwarnings("ignore:Warnings while validating")
@pytest.mark.parametrize("card", ["# h\xe9".encode("latin-1"), b"---\na: [\n---\n"])
def test_a_card_on_the_hub_that_cannot_be_read_stops_the_push(options, api, bert, card, monkeypatch):
    api.create_repo("org/model")
    monkeypatch.setattr(publish, "read_text", lambda *_: card.decode("utf-8"))
    commit(api, **{"README.md": b"# Mine"})
    with refused(NotPublished, "org/model: README.md on the Hub cannot be used", "correct it there"):
        push(bert, "org/model", **options)
