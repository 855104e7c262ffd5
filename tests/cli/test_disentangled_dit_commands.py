"""hf-ext dit on real folders."""

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.utils import DummyObject, requires_backends
from PIL import Image

from hf_ext.answers.classifying import read_picture
from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.errors import DataError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTImg2ImgPipeline
from hf_ext.restoration.files import read_image
from hf_ext.tasks import diffusion_samples
from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows
from hf_ext.training.models import add_adapter
from tests.disentangled_dit.dit_testing import shake
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, make_vae, write_encoder
from tests.kit.command_line import run
from tests.kit.models import assert_same_picture
from tests.kit.refusals import refused
from tests.tasks.diffusion_testing import CLASSES, write_pictures


@pytest.fixture
def model(tmp_path) -> Path:
    """A pipeline of classes that was not trained."""
    make_pipeline().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_latents_are_written_as_asked(tmp_path):
    data = write_pictures(tmp_path / "pictures", 5)
    make_vae().save_pretrained(tmp_path / "vae")
    words = [data, tmp_path / "out", "--vae", tmp_path / "vae", "--size", 8, "--flip", 1, "--shard-size", 3]
    result = run("dit", "precompute", *words, "--device", "cpu")
    assert result.stdout == f"{tmp_path / 'out'}\n"
    rows = datasets.load_dataset(str(tmp_path / "out"), split="train")
    assert len(rows) == 5 and rows.features["label"].names == CLASSES and set(rows["flip"]) == {1}
    again = run("dit", "precompute", *words, code=2)
    assert "exists: give another folder" in again.stderr
    # Of texts and posteriors.
    words[2:] = [*words[2:], "--text-encoder", write_encoder(tmp_path / "encoder"), "--max-text-length", 8]
    run("dit", "precompute", data, tmp_path / "texts", *words[2:], "--posterior", "--text-column", "text")
    rows = datasets.load_dataset(str(tmp_path / "texts"), split="train")
    assert {"latent_spread", "text_states", "states_shape", "null_states"} < {*rows.column_names}
    wrong = {"crops.flip is a probability": ("--flip", 2), "device none cannot": ("--device", "none")}
    for told, option in (wrong | {"no column 'long'": ("--text-column", "long")}).items():
        assert told in run("dit", "precompute", data, tmp_path / "b", *words[2:], *option, code=2).stderr
    assert not (tmp_path / "b").exists() and not (tmp_path / "b.partial").exists()


def test_classes_are_drawn_into_one_grid(tmp_path, model):
    words = ["sample", model, "--steps", 2, "--count", 3, "--device", "cpu"]

    def draw(classes, *more):
        run(*words, "--class-labels", classes, "--out", tmp_path / "again.png", *more)
        return read_image(tmp_path / "again.png").pixels.astype(int)

    result = run(*words, "--class-labels", "goldfish,4", "--out", tmp_path / "new" / "grid.png")
    assert result.stdout == f"{tmp_path / 'new' / 'grid.png'}\n" and "2/2" in result.stderr
    first = read_image(tmp_path / "new" / "grid.png").pixels.astype(int)
    # Two rows of three pictures of 6 x 10 pixels, each pixel enlarged 7 times.
    assert len(first) == 2 * (42 + 2)
    # A name with a comma is one name.
    assert len(draw('"tench, Tinca tinca",hen')) == len(first)
    np.testing.assert_allclose(draw("1,brambling"), first, atol=1)
    assert (draw("1,4", "--seed", 1) != first).any()
    # 6 pictures in two calls; a grey level, where sums differ in their last bits
    np.testing.assert_allclose(draw("1,4", "--batch-size", 4), first, atol=1)
    assert 0 < np.abs(draw("1,4", "--dtype", "bfloat16") - first).mean() < 10
    assert len(draw("1", "--size", "8,4", "--original-size", "64,32")) == 64 + 2


def test_pictures_of_a_folder_are_functions_of_seed_and_number(tmp_path, model, monkeypatch):
    words = ["sample", model, "--steps", 2, "--device", "cpu", "--batch-size", 2]
    out, other = tmp_path / "out", tmp_path / "other"
    assert run(*words, "--count", 3, "--out", out).stdout == f"{out}\n"
    first = {path.name: path.read_bytes() for path in out.glob("*.png")}
    assert sorted(first) == ["000000.png", "000001.png", "000002.png"] and len(set(first.values())) == 3
    # A larger number goes on; what is there is not drawn again, of a batch of which a part is missing neither.
    (out / "000001.png").unlink()
    kept = (out / "000000.png").stat().st_mtime_ns
    with monkeypatch.context() as killed:
        # As it is before the last picture: no list of fewer pictures may be there.
        killed.setattr(diffusion_samples, "_write_metadata", lambda *given: None)
        run(*words, "--count", 8, "--out", out)
        assert not (out / "metadata.jsonl").exists()
    run(*words, "--count", 3, "--out", out)
    assert (out / "000000.png").stat().st_mtime_ns == kept
    rows = datasets.load_dataset("imagefolder", data_dir=str(out), split="train")
    assert rows["label"] == [0, 1, 2, 3, 4, 0, 1, 2]
    run(*words, "--count", 8, "--out", other, "--batch-size", 5, "--seed", 0)
    for number, row in enumerate(rows):
        assert_same_picture(read_image(other / f"{number:06d}.png").pixels, np.asarray(row["image"]))
    for changed, name in (
        (["--seed", 1], "seed: 0 → 1"),
        (["--class-labels", "1"], "conditions"),
        (["--dtype", "bfloat16"], "dtype"),
    ):
        result = run(*words, "--count", 8, "--out", out, *changed, code=2)
        assert "other settings" in result.stderr and name in result.stderr
    # An option that was left out changes pictures as one that was given does.
    options = ["--flip"], ["--original-size", "8,8"], ["--crop", "1,2"], ["--size", "16,24"], ["--negative", "1"]
    for number, option in enumerate(options):
        run(*words, "--count", 1, "--out", tmp_path / f"o{number}", *option)
        assert option[0][2:6] in run(*words, "--count", 2, "--out", tmp_path / f"o{number}", code=2).stderr.replace(
            "height", "size"
        )
        run(*words, "--count", 2, "--out", tmp_path / f"o{number}", *option)
    # What is left of a copy that ended is drawn again; a kill of yesterday left a part.
    for part in (b"", first["000002.png"][:-5]):
        (out / "000002.png").write_bytes(part)
        (out / ".000002.png.tmp-00000000").write_bytes(part)
        os.utime(out / ".000002.png.tmp-00000000", (0, 0))
        run(*words, "--count", 8, "--out", out)
        assert (out / "000002.png").read_bytes() == first["000002.png"] and not [*out.glob(".*.tmp-*")]
    # A call that was refused leaves no settings that others must have.
    run(*words, "--count", 1, "--out", tmp_path / "refused", "--guidance-scale", "nan", code=2)
    run(*words, "--count", 1, "--out", tmp_path / "refused")
    make_pipeline(num_layers=2).save_pretrained(model)
    assert "transformer: " in run(*words, "--count", 9, "--out", out, code=2).stderr
    (tmp_path / "taken").mkdir()
    assert "exists" in run(*words, "--count", 1, "--out", tmp_path / "taken", code=2).stderr
    assert len([*out.glob("*.png")]) == 8 and not [*(tmp_path / "taken").iterdir()]


def test_tar_files_hold_the_pictures_of_a_folder_and_go_on(tmp_path, caplog, model):
    words = ["sample", model, "--steps", 2, "--device", "cpu", "--batch-size", 2]
    out, whole, folder = tmp_path / "tars", tmp_path / "whole", tmp_path / "folder"
    run(*words, "--count", 10, "--out", whole, "--shard-size", 4)
    run(*words, "--count", 10, "--out", folder)
    assert sorted(path.name for path in whole.glob("*.tar")) == ["000000.tar", "000001.tar", "000002.tar"]
    # Begun with fewer, one lost: what is whole stays, the last grows, the lost one is made again.
    run(*words, "--count", 6, "--out", out, "--shard-size", 4)
    kept = (out / "000000.tar").stat().st_mtime_ns
    run(*words, "--count", 10, "--out", out, "--shard-size", 4)
    assert (out / "000000.tar").stat().st_mtime_ns == kept
    (out / "000000.tar").unlink()
    (out / "000001.tar").write_bytes((out / "000001.tar").read_bytes()[:900])
    # Of the last one only the end of the tar file is missing.
    rest = (out / "000002.tar").read_bytes().rstrip(b"\0")
    (out / "000002.tar").write_bytes(rest + bytes(-len(rest) % 512))
    # A kill of yesterday left a part.
    (out / ".000000.tar.tmp-00000000").write_bytes(b"part")
    os.utime(out / ".000000.tar.tmp-00000000", (0, 0))
    run(*words, "--count", 10, "--out", out, "--shard-size", 4)
    assert not [*out.glob("*.tmp-*")] and not [*out.glob(".*.tmp-*")]
    for path in whole.glob("*.tar"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    for place in (str(out), str(out / "*.tar")):
        rows = open_source(DataSource(place))
        assert rows["cls"] == [number % 5 for number in range(10)]
        for number, row in enumerate(rows):
            assert_same_picture(np.asarray(row["png"]), read_image(folder / f"{number:06d}.png").pixels)
    # The pictures are those of the only column of such.
    make_vae().save_pretrained(tmp_path / "vae")
    run("dit", "precompute", out, tmp_path / "latents", "--vae", tmp_path / "vae", "--size", 8)
    latents = datasets.load_dataset(str(tmp_path / "latents"), split="train")
    assert "'png'" in caplog.text and sorted(latents["cls"]) == sorted(rows["cls"])
    run(*words, "--count", 10, "--out", out, "--shard-size", 5, code=2)
    run(*words, "--count", 10, "--out", folder, "--shard-size", 5, code=2)
    run(*words, "--count", 2, "--out", tmp_path / "grid.png", "--shard-size", 5, code=2)


# diffusers' solvers make NumPy's arrays of tensors.
SOLVER = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@SOLVER
def test_conditions_negative_scheduler_and_picture_reach_the_pipeline(tmp_path, model):
    pipeline = DisentangledDiTImg2ImgPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    Image.new("RGB", (20, 12), "red").save(tmp_path / "red.png")
    words = ["sample", model, "--steps", 4, "--count", 1, "--class-labels", "goldfish", "--device", "cpu"]
    controls = ["--crop", "2,1", "--target-size", "12,20", "--flip", "--control-guidance-scale", 1.5]
    others = ["--negative", "hen", "--scheduler", "DPMSolverMultistepScheduler"]
    run(*words, *controls, *others, "--image", tmp_path / "red.png", "--strength", 0.5, "--out", tmp_path / "grid.png")
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    with Image.open(tmp_path / "red.png") as red:
        options = {"image": red.convert("RGB"), "strength": 0.5, "num_inference_steps": 4, "guidance_scale": 4.0}
        options |= {"crop": (2, 1), "target_size": (12, 20), "flip": True, "control_guidance_scale": 1.5}
        rows = sample_rows(pipeline, [1], 1, 0, negative_class_labels=2, **options)
    expected = draw_grid(rows, ["goldfish"])
    np.testing.assert_allclose(read_image(tmp_path / "grid.png").pixels.astype(int), np.asarray(expected, int), atol=1)
    without = sample_rows(pipeline, [1], 1, 0, **options)
    assert np.abs(np.asarray(draw_grid(without, ["goldfish"]), int) - np.asarray(expected, int)).max() > 1
    for wrong, message in (
        (["--scheduler", "DDIM"], "diffusers has no scheduler 'DDIM'; for instance DDIMScheduler"),
        (["--scheduler", "IPNDMScheduler"], "IPNDMScheduler"),
        (["--negative", "hens"], "No single class is 'hens'"),
        (["--image", model / "model_index.json"], "is not a readable picture"),
        (["--image", tmp_path / "red.png", "--strength", 0], "strength is 0.0"),
    ):
        assert message in run(*words, *wrong, "--out", tmp_path / "no.png", code=2).stderr
    assert not (tmp_path / "no.png").exists()


@SOLVER
def test_a_flow_model_takes_solvers_that_were_made_for_diffusion_and_one_that_lacks_an_option_is_refused(tmp_path):
    make_pipeline(FlowMatchEulerDiscreteScheduler(shift=2.0)).save_pretrained(tmp_path / "model")
    words = ["--steps", 2, "--count", 1, "--class-labels", "1", "--device", "cpu", "--out", tmp_path / "grid.png"]
    run("sample", tmp_path / "model", *words, "--scheduler", "UniPCMultistepScheduler")
    assert (tmp_path / "grid.png").exists()
    make_pipeline(DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")).save_pretrained(tmp_path / "sde")
    told = run("sample", tmp_path / "sde", "--out", tmp_path / "a.png", "--scheduler", "SASolverScheduler", code=2)
    assert "sde-dpmsolver++ is not implemented" in told.stderr


def test_a_picture_too_large_for_memory_is_said_in_words(tmp_path, model):
    # Three hundred terabytes are more than a process can even name.
    words = ["--size", "5000000,5000000", "--class-labels", "1", "--count", 1]
    result = run("sample", model, "--out", tmp_path / "grid.png", "--device", "cpu", *words, code=1)
    assert "a single picture does not fit in memory" in result.stderr and "try --dtype bfloat16" in result.stderr
    assert not (tmp_path / "grid.png").exists()


def test_texts_are_drawn(tmp_path):
    make_text_pipeline().save_pretrained(tmp_path / "model")
    words = ["sample", tmp_path / "model", "--steps", 1, "--count", 1, "--out", tmp_path / "grid.png"]
    run(*words, "--prompt", "a red hen", "--prompt", "green fish")
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.format == "PNG"
    (tmp_path / "prompts.txt").write_text("a red hen\n\ngreen fish\n")
    words[-1:] = [tmp_path / "drawn", "--count", 3, "--prompts", tmp_path / "prompts.txt"]
    run(*words)
    rows = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "drawn"), split="train")
    assert rows["text"] == ["a red hen", "green fish", "a red hen"]


def test_wrong_words_are_named(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("--class-labels goldfisch", "No single class is 'goldfisch'"),
        ("--prompt hen", "this model takes --class-labels only"),
        ("--size 8x8", "is not a pair of whole numbers such as 32,32"),
        ("--out grids", "needs --count"),
        ("--out grids.tar --count 2", "must be a .png file"),
        ("--strength 0.5", "--strength is the share of --image that is replaced: give both"),
        ("--negative goldfish --guidance-scale 1", "--negative needs guidance"),
        ("--control-guidance-scale inf", "control_guidance_scale is inf; a finite number"),
        ("--scheduler VQDiffusionScheduler", "num_vec_classes"),
        ("--scheduler DDIMInverseScheduler", "goes from pictures to noise"),
        ("--device cuda:99", "device cuda:99 cannot be used"),
        ("--class-labels 5", "no class 5; allowed are 0 to 4"),
        ("--negative 5", "no class 5; allowed are 0 to 4"),
    ):
        # The last `--out` counts.
        assert message in run("sample", "model", "--out", "grid.png", *words.split(), code=2).stderr
        assert not list(tmp_path.glob("grid*"))


def test_no_result_takes_the_place_of_what_is_read(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 9)).save("in.png")
    Path("link.png").symlink_to("in.png")
    for name in ("texts.png", "real.npz"):
        Path(name).write_text("a hen")
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    for words in (
        "sample model --image in.png --out in.png",
        "sample model --image in.png --out model/../in.png",
        "sample model --image link.png --out in.png",
        "sample model --prompts texts.png --out texts.png",
        "dit score model real.npz --network nobody/network --keep real.npz",
    ):
        assert "is an input too" in run(*words.split(), code=2).stderr
        assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == kept


@pytest.mark.parametrize("settings", [{"lora_alpha": 32}, {"peft_type": "LOHA"}, {"modules_to_save": ["proj_out"]}])
def test_an_adapter_is_sampled_on_its_base(tmp_path, model, settings):
    whole = DiffusionPipeline.from_pretrained(model)
    section = {"peft_type": "LORA", "r": 2, "target_modules": ["to_q"], **settings}
    adapted = add_adapter(whole.transformer, section, str(model))
    shake(torch.nn.ParameterList(value for value in adapted.parameters() if value.requires_grad))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    whole.transformer = adapted.merge_and_unload()
    whole.save_pretrained(tmp_path / "whole")

    def sample(name: str) -> Any:
        return run("sample", tmp_path / name, "--out", tmp_path / f"{name}.png", "--steps", 2)

    pictures = [sample(name) and read_image(tmp_path / f"{name}.png").pixels for name in ("model", "adapter", "whole")]
    assert_same_picture(*pictures[1:])
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() > 1


def test_a_picture_is_turned_as_it_is_shown(tmp_path, monkeypatch):
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=turned)
    assert read_picture(tmp_path / "turned.jpg").size == (20, 40)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with refused(DataError, "turned.jpg"):
        read_picture(tmp_path / "turned.jpg")


def test_a_scheduler_of_an_absent_library_is_refused_by_its_name(tmp_path, monkeypatch, model):
    """As diffusers stands in for DPMSolverSDEScheduler without torchsde, for a library that no machine here has."""
    about = {"__module__": "diffusers.utils.dummy_music_objects", "_backends": ["torch", "note_seq"]}
    about["__init__"] = lambda self: requires_backends(self, about["_backends"])
    monkeypatch.setattr(diffusers, "MusicScheduler", DummyObject("MusicScheduler", (), about), raising=False)
    words = ["sample", model, "--out", tmp_path / "grid.png"]
    asked = run(*words, "--scheduler", "MusicScheduler", code=2).stderr
    index = model / "model_index.json"
    index.write_text(index.read_text().replace("DDIMScheduler", "MusicScheduler"))
    for told in (asked, run(*words, code=1).stderr):
        assert "MusicScheduler" in told and re.search("note.seq", told) and "Traceback" not in told


def test_what_is_no_pipeline_is_refused(tmp_path, monkeypatch):
    """No index; or that of an early snapshot of examples/disentangled_dit/peers.py."""
    for index in (None, {"scheduler": ["diffusers", "DDIMScheduler"]}, {"_class_name": 5}, []):
        if index is not None:
            (tmp_path / "model_index.json").write_text(json.dumps(index))
        assert "model_index.json" in run("sample", tmp_path, "--out", tmp_path / "grid.png", code=2).stderr, index
    # A mistyped folder, and a name without a Hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("runs/x/snapshot", "nobody/nothing"):
        told = run("sample", name, "--out", tmp_path / "grid.png", code=2).stderr
        assert f"{name} is no diffusers pipeline" in " ".join(told.split())


def test_a_grid_names_its_rows():
    pictures = [[Image.new("RGB", (8, 8), color)] * 2 for color in ("red", "blue")]
    grid = draw_grid(pictures, ["short", "a name that is far too long to be shown"])
    assert [grid.getpixel((grid.width - 10, row)) for row in (10, 80)] == [(255, 0, 0), (0, 0, 255)]
    assert np.asarray(grid.crop((0, 0, grid.width - 132, 66)).convert("L")).min() < 100
