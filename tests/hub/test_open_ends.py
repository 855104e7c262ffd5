"""Secrets of houses and wallets in the forms in which people write them, and what only looks like one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import CommitOperationAdd
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from hf_ext import MRConvConfig, MRConvForSequenceClassification
from hf_ext.errors import DataError, NotPublished, UsageError
from hf_ext.hub import publish
from hf_ext.hub.card_rules import read_front_matter
from hf_ext.hub.cards import MARKER, write_card
from hf_ext.hub.checkpoints import open_checkpoint
from hf_ext.hub.disclosure import find_kind
from hf_ext.hub.load_check import check_loads
from hf_ext.hub.published_files import MODULES
from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.hub.published import contents, edit, on_hub, save_bert, save_snapshot, tiny_adapter
from tests.hub.secret_corpus import BASE64, DIGITS, HEX, LARGE, NAME, SMALL, WORD, letters
from tests.kit.command_line import run
from tests.kit.refusals import refused

SEED = "abandon ability able about above absent absorb abstract absurd abuse access accident"
ID = f"{letters(HEX, 8)}-{'-'.join([letters(HEX, 4)] * 3)}-{letters(HEX, 12)}"
CODE = "-".join([letters(LARGE + DIGITS, 6)] * 2 + [letters(LARGE + DIGITS, 5)] * 4)
ETHER = "0x" + letters(HEX, 64)
WIF = "L1" + letters("".join(sign for sign in WORD if sign not in "0OIl"), 50)
BYTES = ",".join(str(7 * number % 256) for number in range(64))
SECRETS = [
    *('<Pass encoding="base64">c2VjcmV0MTIzNA==</Pass>', '<Pass encoding="base64">aHVudGVyYWJj</Pass>'),
    *("<Pass>Tr0ub4dor3</Pass>", f"bw list items --session {letters(BASE64, 86)}==", "bw unlock Tr0ub4dor3"),
    *(f"BW_SESSION={letters(BASE64, 86)}==", f"0.{ID}.{letters(WORD, 30)}:{letters(BASE64, 22)}=="),
    *(f"{kind}/{letters(DIGITS, 16)}:{letters(HEX, 32)}" for kind in ("1", f"2/{letters(DIGITS, 16)}")),
    *(f"{name}{ETHER}" for name in ('Account.from_key("', 'new ethers.Wallet("', "wallet_key: ", 'accounts: ["')),
    *(f"wif = {WIF}", f'bitcoin-cli importprivkey "{WIF}"', f"secretKey: [{BYTES}]"),
    *(f'{name}"{SEED}"' for name in ("seed = ", "Account.from_mnemonic(", "wallet: ", "Recovery words: ")),
    *(f"A3-{CODE}", f"v1.0-{letters(HEX, 24)}-{letters(HEX, 146)}", f"PMAT-{letters(LARGE + DIGITS, 26)}"),
    *(f"{kind}{letters(WORD, 40)}{letters(HEX, 8)}" for kind in ("cfk_", "cfut_", "cfat_", "lin_wh_")),
    f"cloudflared service install eyJhIjoi{letters(WORD, 120)}",
    *(f"shp{kind}_{letters(HEX, 32)}" for kind in ("at", "ss", "ua", "tka", "stk")),
    *(f"fig{kind}_{letters(NAME, 40)}" for kind in ("d", "u", "o", "or", "oh")),
    *(f"nf{kind}_{letters(WORD, 36)}" for kind in "pcoub"),
    *(f"vc{kind}_{letters(WORD, 56)}" for kind in "pkiar"),
    *(f"sbp_{kind}{letters(HEX, 40)}" for kind in ("", "oauth_", "v0_")),
    *(f"dp.{kind}.{letters(WORD, 43)}" for kind in ("pt", "sa", "said", "scrt")),
    *(f"fo1_{letters(NAME, 43)}", f"pscale_api_{letters(NAME, 43)}", f"ddapp_{letters(WORD, 34)}"),
    *(f"CLOJARS_{letters(SMALL + DIGITS, 60)}", f"EZTK{letters(WORD, 54)}", f"dG9rO{letters(WORD, 54)}="),
    *(f"eyJrIjoi{letters(WORD, 70)}=", f"sgp_{letters(WORD, 64)}", f"oauth:{letters(SMALL + DIGITS, 30)}"),
    f"pat.{letters(NAME, 22)}.{letters(HEX, 24)}.{letters(WORD, 20)}",
    *(f"mainnet.infura.io/v3/{letters(HEX, 32)}", f"https://eth.g.alchemy.com/v2/{letters(NAME, 32)}"),
    *(f'secret_key_base = "{letters(HEX, 128)}"', f'integration_key = "{letters(HEX, 32)}"'),
    f"PresharedKey = {letters(BASE64, 43)}=",
]
HARMLESS = [
    *("<Pass>12 of 14</Pass>", "<Pass>test_one</Pass>", '<Pass encoding="base64"></Pass>', "bw unlock --help"),
    *("1/2 of 3/4", f"data/1/{letters(HEX, 32)}", f"epoch 1/{letters(DIGITS, 3)}: loss", "2/1200/1200:30"),
    *(f"transaction {ETHER}", f"address: {ETHER}", f'"hash": "{ETHER}"', f"account {ETHER}", f"ids: [{BYTES}]"),
    *("seed = 42", "the seed of a random number", "wallet: a folder of keys", "wallet = Wallet()", "wif: 3"),
    *("A3-B90QD8", "A3-SIZE-PAPER", "v1.0-rc1", "v1.0-9f86d08", "session 0.5", f"0.{ID}", "--session mine"),
    *("cfat_loss", "vca_model", "nfc_reader", "sbp_oauth_flow", "fo1_score", "figo_plot", "pat.shape.dim", "dp.sa.x"),
    *("oauth: see the page", "oauth:authorization", "infura.io/docs", "alchemy.com/v2/guide", "EZTK is a kit"),
    *("integration_key = name", "preshared_key: optional", "secret_key_base: see docs", "secretKey: [1, 2, 3]"),
    *("eyJrIjoi", "dG9rOmFiYw==", f"sgp_{letters(SMALL, 20)}", "accounts: [0x1, 0x2]", "cloudflared tunnel run mine"),
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_found_as_people_write_it(text):
    assert find_kind(f"# Mine\n\n{text}\n") is not None
    assert find_kind(f'{{"note": "{text}"}}') is not None or '"' in text


def test_what_only_looks_like_one_is_not(tmp_path):
    assert [text for text in HARMLESS if find_kind(f"# Mine\n\n{text}\n") is not None] == []


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


def commit(api, **files):
    operations = [CommitOperationAdd(name, io.BytesIO(content)) for name, content in files.items()]
    api.create_commit("org/model", operations, commit_message="By hand")


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
    notes = publish.preview(bert, "org/model", **asked | options).notes
    publish.push(bert, "org/model", **options)
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
    publish.push(bert, "org/model", **options)
    assert capsys.readouterr().err == "Kept: .gitattributes, NOTICE\n" and len(api.list_repo_commits("org/model")) == 3


@pytest.mark.filterwarnings("ignore:Warnings while validating")
@pytest.mark.parametrize("kind", THERE)
def test_a_licence_that_is_asked_for_agrees_with_that_of_the_card_on_the_hub(options, api, bert, tmp_path, kind):
    api.create_repo("org/model")
    commit(api, **{"README.md": THERE[kind][0].encode()})
    if kind in ("written", "made with the repository"):
        with refused(UsageError, "README.md of org/model on the Hub", "'mit'", "apache-2.0"):
            publish.push(bert, "org/model", license="apache-2.0", **options)
    else:
        publish.push(bert, "org/model", license="apache-2.0", **options)
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
    first = publish.stage(folder, tmp_path / "first")
    second = publish.stage(first, tmp_path / "second", license="other" if entries is OTHER else None)
    publish.push(folder, "org/model", **options)
    pulled = Path(api.snapshot_download("org/model", local_dir=tmp_path / "pulled"))
    publish.push(pulled, "org/fork", **options)
    forked = Path(api.snapshot_download("org/fork", local_dir=tmp_path / "forked"))
    # without a choice of its own a folder takes that of the Hub
    (folder / "README.md").unlink()
    publish.push(folder, "org/fork", **options)
    again = Path(api.snapshot_download("org/fork", local_dir=tmp_path / "again"))
    assert [license_of(each) for each in (first, second, pulled, forked, again)] == [entries] * 5
    assert "language: de" in (forked / "README.md").read_text() and "its licence" not in caplog.text
    publish.push(folder, "org/fork", license="bsd", **options)
    again = Path(api.snapshot_download("org/fork", local_dir=tmp_path / "last"))
    assert license_of(again) == {"license": "bsd"}
    assert f"org/fork on the Hub: its licence {entries['license']!r} becomes 'bsd'" in caplog.text


def test_the_licence_of_the_data_is_not_replaced(tmp_path):
    folder = save_snapshot(tmp_path / "mine")
    edit(folder / "training.json", released={"card_license": OTHER})
    for license in (None, "other"):
        assert license_of(publish.stage(folder, tmp_path / str(license), repo_id="org/x", license=license)) == OTHER
    with refused(UsageError, "'other'", "'mit'"):
        publish.stage(folder, tmp_path / "refused", license="mit")


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
        publish.push(bert, "org/model", **options)


# Files of a repository, of an earlier model or of its owner, by the file that says what it was.
STALE = {
    "config.json": """
    pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json pytorch_model.fp16.bin tf_model.h5
    tf_model.h5.index.json flax_model.msgpack rust_model.ot adapter_model.bin diffusion_pytorch_model.fp16.bin
    pytorch_lora_weights.safetensors model.onnx onnx/model_quantized.onnx onnx/decoder_model_merged.onnx
    consolidated.00.pth openvino_model.xml openvino/openvino_model.xml openvino/openvino_model_qint8_quantized.bin
    onnx/vision_model.onnx onnx/text_model_fp16.onnx
    """,
    "model_index.json": """
    transformer/config.json transformer/disentangled_dit.py vae/diffusion_pytorch_model.safetensors pipeline.py
    vae/diffusion_pytorch_model.bin scheduler/scheduler_config.json text_encoder/model.safetensors tokenizer/vocab.json
    tokenizer/additional_chat_templates/tool.jinja
    """,
    "emr.json": """
    tasks/a/mask.safetensors tasks/a/extra.safetensors tasks/a/config.json tasks/a/modeling_mrconv.py
    tasks/a/additional_chat_templates/tool.jinja base/model.safetensors base/tokenizer.json sums.safetensors
    """,
    "modules.json": "1_Pooling/config.json 2_Dense/model.safetensors 2_Dense/pytorch_model.bin",
}
MINE = {
    "config.json": "model-old.bin my_model.bin lora.safetensors notes/pytorch_model.bin my_model.onnx vae/config.json",
    "model_index.json": """
    transformer/mynotes.txt transformer/README.md vae/readme.txt vae/my_training_data.csv vae/pictures/cat.png
    tokenizer/LICENSE pipeline.py.txt unet/notes.md
    """,
    "emr.json": "tasks/notes.md tasks/a/thesis.pdf base/thesis.pdf base/LICENSE my.safetensors",
    "modules.json": "1_Pooling/notes.txt notes/config.json 2_Dense/own.csv",
}


@pytest.mark.parametrize("told", STALE)
def test_files_go_by_the_names_of_loaders_and_all_else_is_the_owners(told):
    stale, mine = STALE[told].split(), MINE[told].split()
    assert publish.find_stale([told, *stale, *mine, "LICENSE", "data/x.csv"]) == [told, *stale]


def test_exports_of_the_same_weights_stay(options, api, bert, tmp_path):
    exports = {"onnx/model_quantized.onnx", "tf_model.h5", "openvino/openvino_model.bin"}
    publish.push(bert, "org/model", **options)
    commit(api, **{name: name.encode() for name in exports})
    (bert / "README.md").write_text("---\nlicense: mit\n---\n\n# A better card\n")
    rest = {"revision": None, "create_pr": False, "commit_message": "New", "license": None}
    assert publish.preview(bert, "org/model", **options | rest).deleted == ()
    publish.push(bert, "org/model", **options)
    assert exports < set(api.list_repo_files("org/model"))
    edit(bert / "config.json", layer_norm_eps=1e-4)
    assert {*publish.preview(bert, "org/model", **options | rest).deleted} == exports
    publish.push(bert, "org/model", **options)
    assert not exports & set(api.list_repo_files("org/model"))


def test_a_folder_of_adapters_says_which_is_which(tmp_path):
    adapter = tiny_adapter()
    adapter.add_adapter("other", LoraConfig(r=2, target_modules=["query_key_value"]))
    adapter.save_pretrained(tmp_path / "both")
    listing = publish.rehearse(tmp_path / "both", tmp_path / "staged")
    assert "weights that lie in a folder of their own" in listing.stays_behind["other/"]
    adapter.save_pretrained(tmp_path / "named", selected_adapters=["other"])
    with refused(ValueError, "named", "one of its folders: other"):
        publish.stage(tmp_path / "named", tmp_path / "refused")


@pytest.mark.parametrize("source", ["w/ü", "modèle/bert", "модель"])
def test_a_missing_folder_with_letters_of_no_hub_is_no_repository(source):
    with refused(ValueError, source, "no such file or folder"):
        open_checkpoint(source)


def test_a_folder_with_the_name_of_a_released_model_is_told(released_models, tmp_path, monkeypatch):
    save_snapshot(released_models / "denoise-tiny")
    summary = {"task": "x", "scores": "x", "data": "x", "license": "x", "parameters": 1, "steps": 1, "core_hours": 1}
    edit(released_models / "denoise-tiny" / "training.json", released=summary)
    (tmp_path / "denoise-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in (["info", "denoise-tiny"], ["restore", "denoise-tiny", "a.png", "--out", "-"]):
        result = run(*command, code=2)
        assert f"not the released model {released_models / 'denoise-tiny'}; write ./denoise-tiny" in result.stderr
        assert not result.stdout
    assert "released" not in run("info", "./denoise-tiny", code=2).output


SENTENCES = "sentence_transformers.models."
OF_MODULES = {"1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}", "sentence_bert_config.json": b"{}"}
OF_MODULES |= {"1_Pooling/notes.txt": b"mine", "3_Other/config.json": b"{}"}


def add_modules(folder, *kinds):
    """Makes a model of sentence-transformers of one of transformers."""
    for name, content in OF_MODULES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    save_file({"linear.weight": torch.ones(2, 8)}, folder / "2_Dense" / "model.safetensors")
    named = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("4_Normalize", "Normalize")]
    modules = [{"path": path, "type": SENTENCES + kind} for path, kind in named]
    (folder / MODULES).write_text(json.dumps(modules + [{"path": "", "type": kind} for kind in kinds]))


def test_modules_of_sentence_transformers_go_up_with_their_model(options, api, bert, tmp_path):
    add_modules(bert)
    folder = publish.stage(bert, tmp_path / "staged", repo_id="org/model")
    wanted = [*list(OF_MODULES)[:3], "2_Dense/model.safetensors", MODULES]
    assert sorted(contents(folder)) == sorted([*wanted, "README.md", "config.json", "model.safetensors"])
    assert all((folder / name).read_bytes() == (bert / name).read_bytes() for name in wanted)
    found = read_front_matter((folder / "README.md").read_text())
    assert (found["library_name"], found["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    check_loads(folder)
    publish.push(bert, "org/model", **options)
    # of the next model there the modules are stale
    publish.push(save_bert(tmp_path / "other"), "org/model", **options)
    assert not {MODULES, *wanted} & set(api.list_repo_files("org/model"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: add_modules(folder, "my_code.Pooling"), ["modules.json", "'my_code.Pooling'", "push_to_hub"]),
        (lambda folder: add_modules(folder, SENTENCES + "Router"), ["modules.json", "Router'"]),
        (lambda folder: (folder / MODULES).write_text("7"), ["modules.json", "got type 7"]),
        (
            lambda folder: (folder / "2_Dense/pytorch_model.bin").write_bytes(b""),
            ["2_Dense/pytorch_model.bin", "pickle"],
        ),
        (lambda folder: (folder / "2_Dense/own.py").write_bytes(b""), ["2_Dense/own.py is code"]),
        (lambda folder: (folder / "1_Pooling/merges.txt").symlink_to("/etc/hostname"), ["merges.txt", "link"]),
        (lambda folder: (folder / "2_Dense/model.safetensors").write_bytes(b"x"), ["model.safetensors"]),
    ],
)
def test_modules_that_would_go_up_in_part_are_refused(bert, tmp_path, change, told):
    add_modules(bert)
    change(bert)
    with refused(ValueError, *told):
        publish.stage(bert, tmp_path / "staged")


def cast(weights, chosen, dtype):
    return {name: value.to(dtype) if chosen(name) else value for name, value in weights.items()}


def make_pipeline_folder(folder):
    pipeline = make_pipeline()
    pipeline.save_pretrained(folder)
    return folder / "transformer" / "diffusion_pytorch_model.safetensors"


# How the weights of the whole model are on disk, and those of its norms or biases.
TYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
TYPES += [(torch.float64, torch.bfloat16), (torch.float32, torch.float8_e4m3fn)]


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["mrconv", "semanir", "pipeline"])
def test_weights_go_up_in_the_types_that_they_have_on_disk(tmp_path, kind, types):
    folder = tmp_path / "mine"
    if kind == "pipeline":
        path = make_pipeline_folder(folder)
    else:
        config = MRConvConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1)
        model = MRConvForSequenceClassification(config) if kind == "mrconv" else None
        save_snapshot(folder, reports=False) if model is None else model.save_pretrained(folder)
        path = folder / "model.safetensors"
        edit(folder / "config.json", dtype="float16")
    weights = {name: value.clone() for name, value in load_file(path).items()}
    floats = {name for name, value in weights.items() if value.is_floating_point()}
    small = {name for name in floats if "norm" in name or name.endswith("bias")}
    weights = cast(cast(weights, floats.__contains__, types[0]), small.__contains__, types[1])
    assert small and small < floats
    save_file(weights, path, metadata={"format": "pt"})
    staged = publish.stage(folder, tmp_path / "staged")
    found = load_file(staged / path.relative_to(folder))
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in weights.items()}
    assert all(
        found[name].view(torch.uint8).equal(value.view(torch.uint8)) for name, value in weights.items() if value.ndim
    )
