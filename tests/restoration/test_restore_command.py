"""hf-ext restore on real folders of pictures."""

import io
import os
import re
import shutil
from urllib.parse import unquote_to_bytes

import numpy as np
import peft
import pytest
import torch
from PIL import Image

from hf_ext.restoration.comparison import write_page
from hf_ext.restoration.files import Picture, read_image
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration
from tests.kit.command_line import run
from tests.kit.models import assert_same_picture
from tests.kit.pictures import noise, write_image
from tests.kit.restorers import files


def test_a_folder_is_restored_with_its_paths(models, photos, tmp_path):
    out = tmp_path / "out"
    for name in ("notes.txt", "paper.pdf", ".hidden.png"):
        (photos / name).write_text("no picture, and not named as one")
    result = run("restore", models / "restore", photos, "--out", out)
    assert files(out) == ["a.png", "more/b.png"]
    assert result.stdout.startswith(f"2 restored to {out}; 0.00 megapixels in ")
    assert result.stdout.endswith(" MP/s\n")
    model = SemanIRForImageRestoration.from_pretrained(models / "restore")
    for name in files(out):
        pixels = read_image(photos / name).pixels
        assert_same_picture(read_image(out / name).pixels, restore_image(model, pixels))


def test_files_of_others_are_left_alone_unless_told(models, photos, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.png").write_bytes(b"mine")
    result = run("restore", models / "restore", photos, "--out", out, code=1)
    assert "1 restored" in result.stdout
    assert f"{out}/a.png exists" in result.stderr and "Error: 1 of 2 pictures could not be restored." in result.stderr
    assert (out / "a.png").read_bytes() == b"mine"
    assert "2 restored" in run("restore", models / "restore", photos, "--out", out, "--overwrite").stdout
    assert read_image(out / "a.png").pixels.shape == (10, 13, 3)
    # A result that somebody has changed since is theirs.
    write_image(out / "a.png", Picture(noise(4, 4, 3)))
    result = run("restore", models / "restore", photos, "--out", out, code=1)
    assert "1 already restored" in result.stdout and read_image(out / "a.png").pixels.shape == (4, 4, 3)


def test_a_result_is_skipped_only_if_the_same_picture_model_and_options_made_it(models, photos, tmp_path):
    out, words = tmp_path / "out", ("restore", models / "restore", photos, "--out", tmp_path / "out")
    run(*words)
    assert "2 already restored" in run(*words).stdout
    first = (out / "a.png").read_bytes()
    # Another option, another model, another picture; then all as it was.
    assert "2 of them replace results" in run(*words, "--strength", "0.5").stdout
    assert (out / "a.png").read_bytes() != first
    assert "2 restored" in run("restore", models / "enlarge", photos, "--out", out).stdout
    assert read_image(out / "a.png").pixels.shape == (20, 26, 3)
    assert "2 restored" in run(*words).stdout
    assert (out / "a.png").read_bytes() == first
    write_image(photos / "a.png", Picture(noise(5, 6, 3)))
    result = run(*words)
    assert "1 restored" in result.stdout and "1 already restored" in result.stdout
    assert read_image(out / "a.png").pixels.shape == (5, 6, 3)


def test_a_result_that_was_cut_off_is_made_anew_and_a_record_that_was_says_nothing(folder_of_model, photos, tmp_path):
    out, words = tmp_path / "out", ("restore", folder_of_model, photos, "--out", tmp_path / "out")
    run(*words)
    whole = (out / "a.png").read_bytes()
    for left in (0, 40, 200):
        (out / "a.png").write_bytes(whole[:left])
        result = run(*words)
        assert "1 restored" in result.stdout and "1 already restored" in result.stdout
        assert (out / "a.png").read_bytes() == whole
    with (out / ".hf-ext-restored.jsonl").open("a") as record:
        record.write('[1]\n{"result": "more/b.png", "made')
    # The next one stands behind it in the same line, as on a disk that was full.
    for said in ("2 restored", "2 already restored"):
        assert said in run(*words, "--strength", "0.5").stdout


def test_coding_and_background_are_options_and_what_is_lost_is_said(models, tmp_path):
    transparent = np.full((8, 9, 4), (255, 0, 255, 0), np.uint8)
    transparent[2:6, 2:6] = (0, 0, 0, 255)
    write_image(tmp_path / "logo.png", Picture(transparent))
    words = ("restore", models / "restore", tmp_path / "logo.png", "--strength", "0", "--out", tmp_path / "out")
    result = run(*words, "--format", "jpg")
    assert "logo.png: JPEG has no transparency: composed on #ffffff (--background)" in result.stderr
    assert read_image(tmp_path / "out" / "logo.jpg").pixels[0, 0].min() > 250
    run(*words, "--format", "jpg", "--background", "#102030", "--quality", "100")
    assert np.abs(read_image(tmp_path / "out" / "logo.jpg").pixels[0, 0].astype(int) - (16, 32, 48)).max() <= 2
    run(*words, "--format", "webp", "--lossless")
    np.testing.assert_array_equal(read_image(tmp_path / "out" / "logo.webp").pixels, transparent)
    for wrong in ("--lossless", "--format jpg --lossless", "--background no", "--format webp --quality 80 --lossless"):
        run(*words, *wrong.split(), code=2)


def test_patterns_lists_and_standard_input(models, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("restore", models / "restore", "photos/**/*.png", "--out", "pattern")
    assert files(tmp_path / "pattern") == ["a.png", "more/b.png"]
    run("restore", models / "restore", "@-", "--out", "list", given="photos/a.png\n\nphotos/more/b.png\n")
    assert files(tmp_path / "list") == ["a.png", "b.png"]
    (tmp_path / "names").write_text("photos/more\n")
    run("restore", models / "restore", "@names", "--out", "named")
    assert files(tmp_path / "named") == ["b.png"]
    data = (photos / "a.png").read_bytes()
    run("restore", models / "restore", "-", "--out", "stdin", given=data)
    assert files(tmp_path / "stdin") == ["stdin.png"]
    result = run("restore", models / "restore", "-", "--out", "-", given=data)
    shown = Image.open(io.BytesIO(result.stdout_bytes))
    assert_same_picture(np.asarray(shown), read_image(tmp_path / "list" / "a.png").pixels)
    result = run("restore", models / "restore", "photos", "--out", "-", code=2)
    assert "standard output takes one picture, got 2" in result.stderr
    result = run("restore", models / "restore", "-", "--out", "broken", given=b"text", code=1)
    assert "standard input: is not a picture that Pillow can read (4 bytes)" in result.stderr


@pytest.mark.parametrize("given", ["photos", "photos/**/*.png"])
@pytest.mark.parametrize("out", ["photos/new", ".", "photos/.."])
def test_results_are_no_inputs_and_inputs_no_results(given, out, models, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for again in (False, True):
        assert ("2 already restored" in run("restore", models / "restore", given, "--out", out).stdout) == again
        assert {"a.png", "more/b.png"} <= {*files(tmp_path / out)} and len(files(tmp_path)) == 4


def test_options_reach_the_model(models, folder_of_model, tmp_path):
    write_image(tmp_path / "a.png", Picture(noise(10, 45, 3)))
    model = SemanIRForImageRestoration.from_pretrained(folder_of_model)
    pixels = read_image(tmp_path / "a.png").pixels
    plain = restore_image(model, pixels)
    words = ("restore", folder_of_model, tmp_path / "a.png", "--out")
    for name, value in (("tile", 32), ("self-ensemble", True), ("top-k", 1), ("strength", 0.5), ("strength", "auto")):
        result = run(*words, tmp_path / f"{value}", f"--{name}", *([] if value is True else [value]))
        assert (": strength 1" in result.stderr) == (value == "auto")
        restored = read_image(tmp_path / f"{value}" / "a.png").pixels
        assert_same_picture(restored, restore_image(model, pixels, **{name.replace("-", "_"): value}))
        assert value in (32, "auto") or (restored != plain).mean() > 0.02
    run(*words, tmp_path / "tiles", "--tile", "auto")
    run(*words, tmp_path / "half", "--dtype", "bfloat16", "--device", "cpu")
    difference = read_image(tmp_path / "half" / "a.png").pixels.astype(int) - plain
    assert 0 < np.abs(difference).max() < 5
    # An option is not wrong of each picture.
    for model, option, said in (
        ("restore", ("--tile", 10), "give a multiple of 4 (this model's windows) from 32 up"),
        ("restore", ("--device", "tpu"), "device tpu cannot be used"),
        ("enlarge", ("--strength", "auto"), "enlarges"),
    ):
        refused = run("restore", models / model, tmp_path, "--out", tmp_path / "o", *option, code=2)
        assert refused.stderr.count(said) == 1


def test_a_page_compares_before_and_after(models, photos, tmp_path):
    out, words = tmp_path / "out", ("restore", models / "enlarge", photos, "--out", tmp_path / "out", "--compare")
    (photos / "broken.png").write_text("no picture")
    run(*words, code=1)
    page = out / "comparison.html"
    assert page.read_text().count("<figure>") == 2
    shutil.rmtree(out / "more")
    page.write_text("of somebody")
    result = run(*words, code=1)
    assert "comparison.html would be replaced; give --overwrite" in result.stderr and not (out / "more").exists()
    # It has the results of earlier runs too, and one of our own is made again.
    for before in (None, "a page of ours"):
        page.unlink() if before is None else shutil.rmtree(out / "more")
        result = run(*words, code=1)
        assert "1 restored" in result.stdout and page.read_text().count("<figure>") == 2
        assert ("made anew, with the pictures of this call alone" in result.stderr) == (before is not None)


def test_adapters_and_other_models(models, photos, tmp_path):
    torch.manual_seed(0)
    base = SemanIRForImageRestoration.from_pretrained(models / "restore")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["query_key_value"], r=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    run("restore", tmp_path / "adapter", photos / "a.png", "--out", tmp_path / "out")
    pixels = read_image(photos / "a.png").pixels
    wanted = restore_image(adapted.merge_and_unload().eval(), pixels)
    assert_same_picture(read_image(tmp_path / "out" / "a.png").pixels, wanted)
    bare = restore_image(SemanIRForImageRestoration.from_pretrained(models / "restore"), pixels)
    assert (wanted != bare).mean() > 0.02
    said = run("restore", "spoken-digits", photos / "a.png", "--out", tmp_path / "o", code=2).stderr
    assert "contains a mrconv model, not SemanIR" in said


def test_a_page_names_its_pictures_from_where_it_lies(tmp_path):
    """Names are text, not markup, or no text at all; kinds that browsers do not show are left out."""
    names = ("a.png", "b c#1.JPG", '"><script>x</script>.webp', "d.tif", "e%41.gif", os.fsdecode(b"a\xff.png"))
    pairs = [(name, tmp_path / "in" / name, tmp_path / "out" / "deep" / name) for name in names]
    pairs.append(("f.heic", tmp_path / "in" / "f.heic", tmp_path / "out" / "f.png"))
    pairs.append(("standard input", b"content", tmp_path / "out" / "stdin.png"))
    (tmp_path / "out").mkdir()
    write_page(tmp_path / "out" / "page.html", pairs)
    page = (tmp_path / "out" / "page.html").read_text()
    assert page.count("<figure>") == 5 and "<script" not in page and "3 of 8" in page
    addresses = re.findall(r'src="([^"]*)"', page)
    found = [(tmp_path / "out" / os.fsdecode(unquote_to_bytes(address))).resolve() for address in addresses]
    assert found == [tmp_path / side / name for name in names if name != "d.tif" for side in ("out/deep", "in")]
    write_page(tmp_path / "page.html", pairs[:1])
    assert "Left out" not in (tmp_path / "page.html").read_text()
