"""hf-ext restore: which pictures, where to, under which names; all of it found out before the model is loaded."""

import io
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.errors import DataError
from hf_ext.files import write_json
from hf_ext.restoration import jobs
from hf_ext.restoration.files import Picture, read_frames
from hf_ext.restoration.jobs import Job, Plan, plan_jobs
from hf_ext.restoration.records import Records, choose_jobs, identify_model
from hf_ext.restoration.run import restore_files
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration
from tests.hub.published import contents
from tests.kit import command_line
from tests.kit.pictures import encode, noise, write_image
from tests.kit.refusals import refused
from tests.kit.restorers import files

run = partial(command_line.run, "restore")


@pytest.fixture
def model(folder_of_model):
    return SemanIRForImageRestoration.from_pretrained(folder_of_model).eval()


def test_one_clash_of_names_is_reported_and_the_others_go_on(folder_of_model, photos, tmp_path):
    write_image(photos / "A.jpg", Picture(noise(4, 4, 3)))
    write_image(photos / "c.png", Picture(noise(5, 4, 3)))
    out = tmp_path / "out"
    result = run(folder_of_model, photos, "--out", out, "--format", "png", code=1)
    assert files(out) == ["A.png", "c.png", "more/b.png"]
    assert f"{photos}/a.png: would be written to {out}/a.png, and so would {photos}/A.jpg" in result.stderr
    assert "--name '{stem}-{ext}'" in result.stderr and result.stdout.startswith("3 restored")
    assert "Error: 1 of 4 pictures could not be restored." in result.stderr
    run(folder_of_model, photos, "--out", out, "--format", "png", "--name", "{stem}-{ext}")
    assert {"A-jpg.png", "a-png.png", "c-png.png", "more/b-png.png"} <= set(files(out))
    # No result replaces an input.
    before = contents(photos)
    result = run("no/model", photos, "--out", photos, "--overwrite", code=2)
    assert f"a.png: its result would replace {photos}/a.png" in result.stderr
    assert "none of 4 pictures can be restored" in result.stderr and contents(photos) == before


def test_a_picture_may_have_the_name_of_a_file_and_a_folder_that_of_a_picture(folder_of_model, photos, tmp_path):
    for name, kind in {"b.png": "PNG", "made/B.JPG": "JPEG", "c.tiff": "TIFF", "d.gif": "GIF"}.items():
        for already in (0, 1):
            result = run(folder_of_model, photos / "a.png", "--out", tmp_path / name)
            assert result.stdout.count("1 already restored") == already, name
        with Image.open(tmp_path / name) as image:
            assert (image.format, image.size) == (kind, (13, 10))
    (tmp_path / "album.png").mkdir()
    for name in ("album.png", "new.png/", "new.heic/", "new.tif/."):
        for already in (0, 1):
            result = run(folder_of_model, photos, "--out", f"{tmp_path}/{name}")
            assert result.stdout.count("2 already restored") == already, name
        assert files(tmp_path / name) == ["a.png", "more/b.png"]


def test_a_name_puts_results_beside_their_inputs(folder_of_model, photos):
    options = ("--out", photos, "--name", "{stem}_{{new}}")
    assert run(folder_of_model, photos, *options).stdout.startswith("2 restored")
    wanted = ["a.png", "a_{new}.png", "more/b.png", "more/b_{new}.png"]
    assert files(photos) == wanted
    # Results are no inputs, neither of a second run nor of one that starts again.
    assert "2 already restored" in run(folder_of_model, photos, *options).stdout
    assert run(folder_of_model, photos, *options, "--overwrite").stdout.startswith("2 restored")
    assert files(photos) == wanted
    result = run(folder_of_model, photos / "a.png", photos / "a_{new}.png", *options, code=1)
    assert f"a_{{new}}.png: is at the path of the result of {photos}/a.png" in result.stderr


def test_a_folder_that_cannot_be_written_is_found_before_the_model(photos, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    result = run("no/model", photos, "--out", tmp_path / "file" / "out", code=2)
    assert f"cannot write to {tmp_path}/file/out: {tmp_path}/file is not a folder." in result.stderr
    # A folder below is in the way as well.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "more").write_text("in the way")
    assert "out/more is not a folder" in run("no/model", photos, "--out", tmp_path / "out", code=2).stderr

    def fail(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    result = run("no/model", photos, "--out", tmp_path / "new", code=1)
    assert f"cannot write to {tmp_path}/new: Permission denied." in result.stderr
    assert not (tmp_path / "new").exists()


PROGRAM = """
import sys
from hf_ext_cli.main import main

main(sys.argv[1:], standalone_mode=False)
heavy = {"torch", "transformers", "hf_ext.semanir"} & set(sys.modules)
assert not heavy, heavy
"""


def test_where_nothing_is_to_do_nothing_is_loaded(folder_of_model, photos, tmp_path):
    out = tmp_path / "out"
    words = ["restore", str(folder_of_model), str(photos), "--out", str(out), "--compare"]
    run(*words[1:])
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 restored to {out}; 2 already restored (--overwrite restores them again)\n"
    assert done.stderr == ""
    (out / "comparison.html").unlink()
    assert "2 already restored" in run(*words[1:]).stdout and (out / "comparison.html").exists()


def test_what_cannot_be_read_is_named_and_counted(folder_of_model, photos, tmp_path, hide_library):
    hide_library("pillow_heif")
    hide_library("rawpy")
    (photos / "2-cut.png").write_bytes((photos / "a.png").read_bytes()[:230])
    Image.new("1", (3000, 2000)).save(photos / "3-bomb.png")
    (photos / "x.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 40)
    (photos / "raw.NEF").write_bytes(b"raw")
    (photos / "new.jxl").write_bytes(b"\xff\n")
    out = tmp_path / "out"
    result = run(folder_of_model, photos, "--out", out, "--max-megapixels", "5", code=1)
    for name, said in (
        ("2-cut.png", "is damaged or incomplete"),
        ("3-bomb.png", "has 3000 x 2000 pixels; the limit is 5 megapixels"),
        ("x.HEIC", 'needs pip install "hf-ext[images]" (pillow-heif).'),
        ("raw.NEF", 'needs pip install "hf-ext[images]" (rawpy).'),
        ("new.jxl", "pictures of .jxl are not read"),
    ):
        assert f"{photos / name}: {said}" in result.stderr
    assert files(out) == ["a.png", "more/b.png"] and result.stdout.startswith("2 restored")
    assert "Error: 5 of 7 pictures could not be restored." in result.stderr
    result = run(folder_of_model, photos / "x.HEIC", "--out", out, code=2)
    assert "none of 1 picture can be restored" in result.stderr


def moving(format: str, **options) -> bytes:
    first, *more = (noise(8, 9, 3, seed=seed) // 64 * 85 for seed in range(3))
    return encode(first, format, more, **options)


def test_every_frame_is_restored(folder_of_model, model, tmp_path):
    """Formats stay as they are, a moving GIF too."""
    (tmp_path / "in.png").write_bytes(moving("PNG", duration=[50, 120, 300], loop=0))
    (tmp_path / "in.gif").write_bytes(moving("GIF"))
    out = tmp_path / "out"
    run(folder_of_model, tmp_path / "in.png", tmp_path / "in.gif", "--out", out, "--compare")
    assert files(out) == ["comparison.html", "in.gif", "in.png"]
    before, after = read_frames(tmp_path / "in.png"), read_frames(out / "in.png")
    assert (after.durations, after.plays) == (before.durations, before.plays) == ([50.0, 120.0, 300.0], 0)
    for first, second in zip(before.pictures, after.pictures, strict=True):
        np.testing.assert_array_equal(second.pixels, restore_image(model, first.pixels))
    assert len(read_frames(out / "in.gif").pictures) == 3
    result = run(folder_of_model, tmp_path / "in.gif", "--out", tmp_path / "jpg", "--format", "jpg", code=1)
    assert "in.gif: JPEG cannot store an animation of 3 frames. Write a .gif, .png or .webp." in result.stderr


def test_standard_output_has_the_format_that_was_asked_for(folder_of_model, photos):
    still, gif = (photos / "a.png").read_bytes(), moving("GIF", loop=0)
    for given, options, wanted in (
        (still, ["--format", "webp"], "WEBP"),
        (still, [], "PNG"),
        (gif, [], "GIF"),
        (gif, ["--format", "png"], "PNG"),
    ):
        shown = run(folder_of_model, "-", "--out", "-", *options, given=given).stdout_bytes
        with Image.open(io.BytesIO(shown)) as image:
            assert image.format == wanted and getattr(image, "n_frames", 1) == (3 if given == gif else 1)


def test_linked_folders_are_searched_once(folder_of_model, photos, tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    write_image(tmp_path / "elsewhere" / "c.png", Picture(noise(5, 4, 3)))
    (photos / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(photos)
    (photos / "itself.png").symlink_to("itself.png")
    (photos / "gone.png").symlink_to("nothing")
    run(folder_of_model, photos, "--out", tmp_path / "out")
    assert files(tmp_path / "out") == ["a.png", "linked/c.png", "more/b.png"]
    told = [message for message in caplog.messages if "leads nowhere" in message]
    assert ["gone.png" in told[0], "itself.png" in told[1], len(told)] == [True, True, 2]


def test_a_pipe_is_read_once(photos, tmp_path):
    """Such as `<(curl ...)` of a shell is."""
    os.mkfifo(tmp_path / "pipe")
    content = (photos / "a.png").read_bytes()
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
    writer.start()
    (job,) = jobs.plan_jobs([str(tmp_path / "pipe")], tmp_path / "out").jobs
    writer.join()
    assert job == jobs.Job("pipe", content, tmp_path / "out" / "pipe.png", ".png")
    planned = [(job, True), (job._replace(source=b"of the same name"), True)]
    assert len(jobs._without_clashes(planned, refused := {}, False)) == len(refused) == 1


NAMES = ("restored", "{stem", "../{stem}", "{stem}.png", "{ext}", "{stem}/x")
COLOURS = ("transparent", "#ff000080", "'rgb(300, 0, 0)'")
NONSENSE = [
    # A name for two pictures; its own input; a format that is read alone; a second name; somebody's text.
    (". --out one.png", "one.png/"),
    *((f"a.png --out {name}", "") for name in ("a.png", "one.heic", "text.txt", "more/b.png/")),
    ("a.png --out one.png --name {stem}_b", "leave out --name"),
    *((f"a.png --out one.png --format {kind} --compare", "leave out --format") for kind in ("jpg", "png")),
    ("a.png --out - --name {stem}_b", "--name needs a folder"),
    ("a.png --out - --compare --name {stem}_b", "--compare needs a folder"),
    *((f". --out new --name {name}", name) for name in NAMES),
    *((f". --out new --background {colour}", "background") for colour in COLOURS),
    *((f". --out new --max-megapixels {most}", "max-megapixels") for most in ("nan", "0")),
    *((f". --out new --strength {share}", "strength") for share in ("nan", "2", "much")),
    (". --out new --device meta", "device"),
    (". --out ''", "out"),
]


@pytest.mark.parametrize(("words", "fact"), NONSENSE)
def test_words_that_mean_nothing_are_refused_and_nothing_is_written(words, fact, folder_of_model, photos, monkeypatch):
    (photos / "text.txt").write_text("mine")
    before = files(photos)
    monkeypatch.chdir(photos)
    assert fact in run(folder_of_model, *shlex.split(words), code=2).stderr
    assert files(photos) == before and not (photos / "new").exists()


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
@pytest.mark.parametrize(("model_of_other", "fails"), [("ours", False), ("other", True), (None, True)])
def test_two_commands_with_one_folder_share_its_results(model, photos, tmp_path, model_of_other, fails, moment):
    """The other one makes both results after this one was planned, or while it restores; None is no command."""
    out, plan = tmp_path / "out", plan_jobs([str(photos)], tmp_path / "out")
    ours = Records(out, "ours", {})
    _, to_do = choose_jobs(plan, ours, overwrite=False)

    def make(*_: float) -> None:
        if not out.exists():
            restore_files(model, to_do, records=model_of_other and Records(out, model_of_other, {}))

    if moment == "before":
        make()
    report = restore_files(model, to_do, records=ours, progress=make)
    assert [*report.failed] == [job.name for job in to_do if fails]
    # The one that was begun is done; the next is found to be.
    assert len(report.restored) == (moment == "meanwhile" and not fails)
    assert len([*out.rglob("*.png")]) == len(to_do) == 2 and not [*out.rglob("*.tmp-*")]
    state = {"ours": "same", "other": "ours", None: "foreign"}[model_of_other]
    assert {Records(out, "ours", {}).state(job) for job in to_do} == {state}


def test_what_killed_commands_left_is_removed_of_finished_pictures_too(folder_of_model, photos, tmp_path):
    out, words = tmp_path / "out", (folder_of_model, photos, "--out", tmp_path / "out")
    run(*words)
    # What is young may be in the making, and other names are others' business.
    parts = {"more/.b.png.tmp-00000000": 0, ".a.png.tmp-00000000": 0, ".a.png.tmp-11111111": 9e9, ".z.tmp-00000000": 0}
    for name, time in parts.items():
        (out / name).write_bytes(b"part")
        os.utime(out / name, (time, time))
    assert "2 already restored" in run(*words).stdout
    assert [name for name in parts if (out / name).exists()] == [*parts][2:]


def test_a_picture_that_a_cpus_memory_cannot_hold_stops_no_other(model, photos, tmp_path):
    def only_the_small_one(module, args, inputs):
        if inputs["pixel_values"].shape[-1] > 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    names = {"a.png": "a.png", "b.png": "more/b.png"}
    planned = [jobs.Job(name, photos / place, tmp_path / name, ".png") for name, place in names.items()]
    hook = model.register_forward_pre_hook(only_the_small_one, with_kwargs=True)
    report = restore_files(model, planned)
    hook.remove()
    assert report.restored == [tmp_path / "b.png"]
    assert report.failed == {"a.png": "a.png: not enough memory; try --tile auto"}
    # A bug is no picture's fault.
    hook = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
    with refused(RuntimeError, "a bug"):
        restore_files(model, [job._replace(replace=True) for job in planned])
    hook.remove()


def container(ending: str, **options) -> bytes:
    """Three frames or pages where there may be several."""
    first, *more = noise(3, 12, 14, 3)
    more = more if ending in ("gif", "tif", "webp", "png", "mpo") else []
    return encode(first, {"jpg": "JPEG", "tif": "TIFF"}.get(ending, ending.upper()), more, **options)


KINDS = [(ending, {}) for ending in ("gif", "tif", "webp", "png", "jpg", "bmp", "mpo", "tga", "ico", "pcx", "dds")]
KINDS += [("tif", {"compression": f"tiff_{kind}"}) for kind in ("adobe_deflate", "lzw")]


@pytest.mark.parametrize(("ending", "options"), [*KINDS, ("jpg", {"progressive": True})])
def test_a_file_that_was_cut_anywhere_is_refused_in_words_and_kept(ending, options, tmp_path):
    data, ending = container(ending, **options), ".jpg" if ending == "mpo" else f".{ending}"
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


ENCODED = ("gif", "png", "jpg", "webp", "bmp")


@pytest.mark.parametrize(("ending", "options"), [kind for kind in KINDS if kind[0] in ENCODED])
def test_a_result_of_which_the_last_bytes_are_gone_is_made_anew(ending, options, tmp_path):
    data, there = container(ending, **options), tmp_path / f"a.{ending}"
    job = Job("b", b"a picture", there, there.suffix)
    Records(tmp_path, "model", {}).add(job, data)
    # What somebody added to, or made in its place, is whole.
    theirs = [data + b"more", encode(noise(5, 6, 3), {"jpg": "JPEG"}.get(ending, ending.upper()))]
    for state, written in (("ours", [data[:-lost] for lost in (1, 4, 12, 13, 30)]), ("foreign", theirs)):
        for content in written:
            there.write_bytes(content)
            assert Records(tmp_path, "model", {}).state(job) == state, len(content)


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
