"""Files that were cut off, wherever that is: refused in words, never replaced if they are somebody's."""

from pathlib import Path

import pytest
from PIL import Image

from hf_ext.errors import DataError
from hf_ext.files import write_json
from hf_ext.restoration.files import read_frames
from hf_ext.restoration.jobs import Job, Plan, megapixels_of, plan_jobs
from hf_ext.restoration.records import Records, choose_jobs, identify_model
from tests.kit.pictures import encode, noise
from tests.kit.refusals import refused


def container(ending: str, **options) -> bytes:
    """Three frames or pages where there may be several."""
    first, *more = noise(3, 12, 14, 3)
    more = more if ending in ("gif", "tif", "webp", "png", "mpo") else []
    return encode(first, {"jpg": "JPEG", "tif": "TIFF"}.get(ending, ending.upper()), more, **options)


KINDS = {
    **{
        ending: (ending, {})
        for ending in ("gif", "tif", "webp", "png", "jpg", "bmp", "mpo", "tga", "ico", "pcx", "dds")
    },
    "progressive": ("jpg", {"progressive": True}),
    "deflated": ("tif", {"compression": "tiff_adobe_deflate"}),
    "lzw": ("tif", {"compression": "tiff_lzw"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_anywhere_is_refused_in_words_and_kept(kind, tmp_path):
    ending, options = KINDS[kind]
    data = container(ending, **options)
    ending = f".{ending}" if f".{ending}" != ".mpo" else ".jpg"
    (tmp_path / "out").mkdir()
    there = tmp_path / "out" / f"a{ending}"
    records, refused = Records(tmp_path / "out", "model", {}), 0
    for length in sorted({*range(1, 120, 2), *range(120, len(data), max(1, len(data) // 60))}):
        cut = data[:length]
        try:
            read_frames(cut)
        except DataError:
            refused += 1
        there.write_bytes(cut)
        job = Job("a", cut, there, ending)
        assert megapixels_of(job) >= 0
        # Named like the animation, or read from standard input.
        assert plan_jobs([str(there)], tmp_path / "new").jobs
        assert records.state(job) == "foreign"
    assert refused > 20


@pytest.mark.parametrize(
    ("content", "recorded", "state"),
    [
        ("cut", False, "foreign"),
        ("large", False, "foreign"),
        ("empty", False, "ours"),
        ("cut", True, "ours"),
        ("text", True, "ours"),
        # A result that somebody has changed since is theirs.
        ("large", True, "foreign"),
        *(("folder", recorded, "foreign") for recorded in (False, True)),
    ],
)
def test_only_results_of_our_own_are_damaged(content, recorded, state, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    there, data = tmp_path / "a.jpg", container("jpg")
    if content == "folder":
        there.mkdir()
    else:
        there.write_bytes({"cut": data[:-30], "text": b"mine", "large": data, "empty": b""}[content])
    job, records = Job("b", b"a picture", there, ".jpg"), Records(tmp_path, "model", {})
    if recorded:
        records.add(job, b"a result")
        records = Records(tmp_path, "model", {})
    assert records.state(job) == state
    plan, to_do = choose_jobs(Plan([job], {}), records, overwrite=False)
    foreign = state == "foreign"
    assert (list(plan.refused), [job.replace for job in to_do]) == (["b"] * foreign, [True] * (not foreign))
    assert bool(choose_jobs(Plan([job], {}), records, overwrite=True)[1]) == (content != "folder")
    assert Image.MAX_IMAGE_PIXELS == 40


def test_an_adapter_is_another_model_on_another_base(tmp_path):
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    write_json(tmp_path / "adapter" / "adapter_config.json", {"base_model_name_or_path": str(tmp_path / "base")})
    before = identify_model(str(tmp_path / "adapter"))
    assert before == identify_model(str(tmp_path / "adapter"))
    (tmp_path / "base" / "model.safetensors").write_text("trained on")
    assert identify_model(str(tmp_path / "adapter")) != before


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "MPO", "TIFF", "GIF", "TGA"])
def test_a_result_ends_as_what_is_in_a_file_that_is_named_a_gif(format, tmp_path):
    Image.new("RGB", (9, 8)).save(tmp_path / "a.gif", format)
    wanted = {"JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp", "TIFF": ".tif"}.get(format, ".png")
    for out in (tmp_path / "out", None):
        (job,) = plan_jobs([str(tmp_path / "a.gif")], out).jobs
        assert job.ending == wanted


@pytest.mark.parametrize(
    ("lists", "given"),
    [
        ({"a.txt": "@a.txt"}, "@a.txt"),
        ({"a.txt": "@b.txt", "b.txt": "@a.txt"}, "@a.txt"),
        ({}, "@at.png"),
        ({"at.png": "\udcff"}, "@at.png"),
    ],
)
def test_lists_that_cannot_be_read_are_refused(lists, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in lists.items():
        Path(name).write_text(text, errors="surrogateescape")
    with refused(DataError, given):
        plan_jobs([given], tmp_path / "out")
