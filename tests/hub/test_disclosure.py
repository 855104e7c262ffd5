"""What would be disclosed: tokens refuse a push without being shown, paths of this machine are cut."""

import json
import re
import time
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hf_ext.errors import DataError, NotPublished
from hf_ext.hub.cards import write_card
from hf_ext.hub.disclosure import SecretFound, clean, cut_folders, find_machine_paths, is_path, refuse_secrets
from hf_ext.hub.publish import push, rehearse, stage
from tests.kit.pictures import encode, make_exif
from tests.kit.refusals import refused

from .published import EVALUATION, TRAINING, contents, edit, save_bert, save_snapshot, tiny_adapter

# Made up, in pieces, so that no scanner takes this file for a leak. The kinds are those of test_secret_corpus.
TOKEN = "sk" + "-" + "aB3dE6gH9j" * 4


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "additional_chat_templates/tool.jinja"])
def test_a_token_refuses_the_push_and_is_not_shown(name, bert, tmp_path):
    (bert / name).parent.mkdir(exist_ok=True)
    (bert / name).write_text(f"# Mine\n\nexport KEY={TOKEN}\n")
    before = set(tmp_path.iterdir())
    with refused(SecretFound, name, "line 3") as caught:
        push(bert, "org/bert", endpoint="http://127.0.0.1:9", check=False)
    assert TOKEN[8:] not in str(caught.value)
    assert set(tmp_path.iterdir()) == before


def test_the_scan_is_linear(tmp_path):
    """Texts made of beginnings of tokens, a megabyte each: no pattern goes over them again and again."""
    pieces = ("sk-a-", "sk-aaaaaaaaaaaaaaa-", "-----BEGIN A ", "hf_a", "xoxb-1 ", "A ", "sk-", "pa-", "secret_")
    for index, piece in enumerate(pieces):
        (tmp_path / f"{index}.txt").write_text(piece * (2**20 // len(piece)))
    started = time.process_time()
    refuse_secrets(tmp_path)
    # a quadratic one would take hours
    assert time.process_time() - started < 60


PATHS = {
    path: re.split(r"[/\\:]", path.partition("?")[0].rstrip("/"))[-1]
    for path in (
        *("/data/alice/client-acme/", "~alice/photos", r"C:\Users\alice\photos", "D:/alice/photos"),
        *(r"\\server\share\photos", "file:///data/alice/photos", "../alice/client-acme/photos", "./alice/photos"),
        *("abfss://alice@account.dfs.core.windows.net/photos", "s3://alice-private/client photos/a b.zip"),
        *("https://nas.alice.org/My Files/photos.zip?token=alice", "hf://buckets/alice/clients/photos"),
        *("git+ssh://git@alice.com/photos", "nas01:/export/alice/photos", "alice@nas01:photos", "//nas/alice/photos"),
        *("${DATA}/alice/photos", "%USERPROFILE%\\alice\\photos", "/Volumes/alice smith/my photos"),
    )
}
# Where data come from, what is no name and no address is a path too, though it is not here.
FOLDERS = {
    **dict.fromkeys(("clients/alice/2024/photos", "clients\\alice\\photos", "alice/photos/"), "photos"),
    **{"My Photos/alice/a.zip": "a.zip", "alice/my photos": "my photos"},
}
ADDRESSES = {
    "https://alice:S3cr" + "3tPass@nas.org/photos.zip": "https://nas.org/photos.zip",
    "https://alice@nas.org:8443/photos.zip": "https://nas.org:8443/photos.zip",
    "https://nas.org/photos.zip?sv=1&alice=1#alice": "https://nas.org/photos.zip",
    "ftp://alice:alice@nas.org": "ftp://nas.org",
    **{same: same for same in ("hf://datasets/org/photos@v1", "https://nas.org/photos@v1.zip")},
}


def test_origins_are_cut_to_their_last_name_and_addresses_lose_user_password_and_query(snapshot, tmp_path):
    names = ("org/photos", "org/photos@v1", "gpt2", "photographs", "https://example.org/a", "1/2", "runs/acme")
    assert [path for path in (*PATHS, *FOLDERS, *names) if is_path(path)] == list(PATHS)
    origins = PATHS | FOLDERS | ADDRESSES
    sources = [{"path": each, "split": "train"} for each in origins]
    arguments = TRAINING["arguments"] | {"data": {"train": sources}, "init_from": "alice/base/"}
    (snapshot / "training.json").write_text(json.dumps(TRAINING | {"arguments": arguments}))
    results = [EVALUATION["results"][0] | {"dataset": each, "arguments": {"reference": each}} for each in origins]
    (snapshot / "eval.json").write_text(json.dumps({"results": results}))
    staged = stage(snapshot, tmp_path / "staged", repo_id="org/model")
    for name, data in contents(staged).items():
        assert name.endswith(".py") or b"alice" not in data, name
    published = json.loads((staged / "training.json").read_text())["arguments"]
    assert [source["path"] for source in published["data"]["train"]] == list(origins.values())
    assert published["init_from"] == "base"
    told = json.loads((staged / "eval.json").read_text())["results"]
    assert [(each["dataset"], each["arguments"]["reference"]) for each in told] == [(o, o) for o in origins.values()]
    # Neither does a card that is written where the run lies.
    assert "alice" not in write_card(snapshot, repo_id="org/model").read_text()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["train_data", "cache_dir", "_name_or_path"])
def test_a_configuration_has_no_path_under_any_name(key, path, tmp_path):
    for name in ("config.json", "adapter_config.json", "preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).write_text(json.dumps({key: path, "deep": [{key: path}], "eos_token": "/s", "ratio": "1/2"}))
    clean(tmp_path, tmp_path)
    wanted = PATHS[path] if key == "_name_or_path" or not path.startswith(".") else path
    for name, data in contents(tmp_path).items():
        expected = {key: wanted, "deep": [{key: wanted}], "eos_token": "/s", "ratio": "1/2"}
        assert json.loads(data) == expected, name


DEEP, LONG = "[" * 600 + "1" + "]" * 600, "1" + "0" * 400
TOO_MUCH = {
    "config.json": f'{{"model_type": "bert", "x": {DEEP}}}',
    "training.json": f'{{"arguments": {{"task": {{"x": {DEEP}}}}}}}',
    "eval.json": f'{{"results": [{{"metric": "a", "dataset": "b", "value": {LONG}}}]}}',
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_json_that_is_too_deep_or_too_large_is_refused(name, tmp_path, bert):
    (bert / name).write_text(TOO_MUCH[name])
    with pytest.raises(DataError):
        stage(bert, tmp_path / "out")


def png_notes(text: str, method: str = "add_text", **options) -> dict:
    notes = PngInfo()
    getattr(notes, method)("Comment", text, **options)
    return {"pnginfo": notes}


def exif_notes(text: str, orientation: int = 1) -> dict:
    """A description, the artist and the place."""
    return {
        "exif": make_exif({0x010E: text, 0x0112: orientation, 0x013B: text, 0x8825: {1: "N", 2: (52.0, 31.0, 0.0)}})
    }


NOTES = {
    "tEXt": png_notes(TOKEN),
    "zTXt": png_notes(TOKEN, zip=True),
    "iTXt": png_notes(TOKEN, "add_itxt", zip=True),
    "eXIf": exif_notes(TOKEN),
    "iCCP": {"icc_profile": b"\0" * 128 + TOKEN.encode()},
    "after the end": {},
}


@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("name", ["before_after.png", "report.png"])
def test_pictures_go_up_without_notes_and_with_all_pixels(tmp_path, kind, name, bert):
    picture = Image.effect_noise((9, 7), 80).convert("RGB")
    content = encode(picture, **NOTES[kind])
    assert kind.encode() in content or kind == "after the end"
    (bert / name).write_bytes(content if NOTES[kind] else content + TOKEN.encode())
    listing = rehearse(bert, tmp_path / "staged")
    assert [note.partition(":")[0] for note in listing.notes] == [name]
    content = (tmp_path / "staged" / name).read_bytes()
    kinds = {bytes(part) for part in re.findall(rb"IHDR|IDAT|IEND|tEXt|zTXt|iTXt|eXIf|iCCP", content)}
    assert kinds == {b"IHDR", b"IDAT", b"IEND"} and content[-8:-4] == b"IEND"
    with Image.open(tmp_path / "staged" / name) as published:
        assert published.tobytes() == picture.tobytes() and not published.getexif() and not published.info


def test_a_picture_that_would_change_without_its_notes_is_refused(tmp_path, bert):
    turned, plain = (encode(Image.new("RGB", (4, 2)), **exif_notes("", orientation)) for orientation in (6, 1))
    # Notes that no reader takes, and 400 million pixels.
    spoilt = plain.replace(b"MM\0*", b"no!?"), plain.replace(b"\0\0\0\4\0\0\0\2", b"\0\0\x4e\x20\0\0\x4e\x20")
    for content in (turned, *spoilt, encode(Image.new("RGB", (4, 2)), "JPEG"), plain[:8] + b"\0\0\0\xffIHDR"):
        assert content != plain
        (bert / "before_after.png").write_bytes(content)
        with pytest.raises(ValueError):
            stage(bert, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


# The folder that a run was started in, as seen from a snapshot of it, and whether `clients/acme` is there.
STARTED_IN = {".": True, "runs": True, "runs/first": True, "runs/first/snapshot": True, "elsewhere": False}


@pytest.mark.parametrize("place", STARTED_IN)
@pytest.mark.parametrize("kind", ["data", "init_from", "dataset", "_name_or_path", "adapter", "noted adapter"])
def test_a_folder_of_two_names_is_published_as_a_folder_wherever_a_push_starts(kind, place, tmp_path, monkeypatch):
    snapshot, held = tmp_path / "runs" / "first" / "snapshot", STARTED_IN[place] or kind == "noted adapter"
    tiny_adapter().save_pretrained(snapshot) if "adapter" in kind else save_bert(snapshot)
    if kind != "noted adapter":
        (tmp_path / place / "clients" / "acme").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    arguments = dict(TRAINING["arguments"])
    arguments |= {"data": {"train": {"path": "clients/acme"}}} if kind == "data" else {}
    arguments |= {"init_from": {"init_from": "clients/acme", "noted adapter": "acme"}.get(kind)}
    (snapshot / "training.json").write_text(json.dumps(TRAINING | {"arguments": arguments}))
    results = [EVALUATION["results"][0] | ({"dataset": "clients/acme"} if kind == "dataset" else {})]
    (snapshot / "eval.json").write_text(json.dumps({"results": results}))
    if "adapter" in kind:
        edit(snapshot / "adapter_config.json", base_model_name_or_path="clients/acme")
    elif kind == "_name_or_path":
        edit(snapshot / "config.json", _name_or_path="clients/acme")
    if "adapter" in kind and held:
        with pytest.raises(NotPublished):
            stage(snapshot, tmp_path / "staged", repo_id="org/model")
    else:
        staged = stage(snapshot, tmp_path / "staged", repo_id="org/model")
        assert any(b"clients/acme" in data for data in contents(staged).values()) is not held


def test_only_known_fields_of_a_training_are_published(tmp_path):
    snapshot = save_snapshot(tmp_path / "snapshot")
    odd = TRAINING | {"env": {"SECRET": "mine"}, "hostname": "mine"}
    (snapshot / "training.json").write_text(json.dumps(odd))
    staged = stage(snapshot, tmp_path / "staged", repo_id="org/model")
    text = (staged / "training.json").read_text()
    assert "mine" not in text and "output_dir" not in text
    published = json.loads(text)
    arguments = published["arguments"]
    assert published == TRAINING | {"arguments": arguments}
    assert (arguments["task"], arguments["learning_rate"]) == (TRAINING["arguments"]["task"], 2e-4)


def test_origins_in_configurations_are_cut_and_labels_are_not(tmp_path, bert):
    config = json.loads((bert / "config.json").read_text())
    labels = {"0": "/m/09x0r", "1": "~ and /"}
    config |= {"_name_or_path": str(bert), "id2label": labels, "text": {"_name_or_path": "/data/alice/text"}}
    # An address loses its login and query, a text that has one in it does not.
    config |= {"source": "https://alice@nas.org/x?alice=1", "prompt": "see https://nas.org/x?q=1 first"}
    (bert / "config.json").write_text(json.dumps(config))
    tokenizer = {"name_or_path": "/data/alice/tok", "special_tokens_map_file": None, "eos_token": "/s"}
    (bert / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    staged = stage(bert, tmp_path / "staged")
    published = json.loads((staged / "config.json").read_text())
    assert (published["_name_or_path"], published["text"]) == ("bert", {"_name_or_path": "text"})
    assert published["id2label"] == labels
    assert (published["source"], published["prompt"]) == ("https://nas.org/x", config["prompt"])
    assert json.loads((staged / "tokenizer_config.json").read_text()) == tokenizer | {"name_or_path": "tok"}
    # what names a Hub, and what says nothing of this machine, stays as it is to the byte
    (bert / "config.json").write_text(json.dumps(config | {"_name_or_path": "org/base", "text": {}, "source": ""}))
    again = stage(bert, tmp_path / "again")
    assert (again / "config.json").read_bytes() == (bert / "config.json").read_bytes()


@pytest.mark.parametrize("base", ["/data/alice/secret/base", "../base", "C:\\alice\\base", "a/b/c", "here"])
def test_an_adapter_over_a_folder_is_refused_with_advice(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    adapter = tmp_path / "adapter"
    tiny_adapter().save_pretrained(adapter)

    def stage_over(base) -> Path:
        edit(adapter / "adapter_config.json", base_model_name_or_path=base)
        return stage(adapter, tmp_path / "staged", overwrite=True)

    with pytest.raises(NotPublished) as caught:
        stage_over(base)
    assert "alice" not in str(caught.value)
    with refused(DataError, "adapter_config.json", "base_model_name_or_path"):
        stage_over([base])
    for public in ("org/base", "gpt2"):
        published = json.loads((stage_over(public) / "adapter_config.json").read_text())
        assert published["base_model_name_or_path"] == public


def test_a_stranger_is_told_no_folder():
    for message, told in {
        "/tmp/gradio/ab/photo.png: no picture": "photo.png: no picture",
        "No such file: '/srv/alice smith/a b.png'": "No such file: 'a b.png'",
        r"C:\Users\alice\x.png, \\nas\share\y.png": "x.png, y.png",
        "(~/models/x) path=/data/y file:///data/z at:/data/w": "(x) path=y z at:w",
        (same := "https://a.org/b/c s3://d/e org/name image/png 3 / 4"): same,
    }.items():
        assert cut_folders(message) == told


def test_other_texts_that_name_this_machine_are_pointed_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/data/alice")
    bert = save_bert(tmp_path / "bert")
    (bert / "README.md").write_text("# Mine\n\nTrained on /data/alice/client-acme.\n")
    assert rehearse(bert, tmp_path / "staged").notes == ("README.md, line 3: names a folder of this machine",)
    (bert / "README.md").write_text("# Mine\n\nTrained on /data/alicent and x/data/alice/y.\n")
    assert find_machine_paths(stage(bert, tmp_path / "again")) == ()
