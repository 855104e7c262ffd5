"""The app in a real browser, Chromium without a window: what is dropped, pressed and moved gives what the API does."""

import io
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hf_ext
from hf_ext import EMRModel, SemanIRForImageRestoration, restore_image
from hf_ext import app_work as work
from tests.app.test_app import make_dit, serve, write_sound

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install chromium or google-chrome"),
]
# Milliseconds that the page has for what a model computes on a busy machine.
PATIENCE = 240_000


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """Where the app is served by its command, and the folder of the DiT that it was given."""
    model = make_dit(tmp_path_factory.mktemp("browser") / "dit")
    with serve(model) as served:
        yield served, model


@pytest.fixture
def page(address, tmp_path):
    """The app in a browser whose microphone hears a file; asks nobody but this machine, and ends without an error."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    write_sound(tmp_path / "spoken.wav", 48000)
    microphone = f"--use-file-for-fake-audio-capture={tmp_path / 'spoken.wav'}%noloop"
    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", microphone]
    asked, errors = [], []
    with playwright.sync_playwright() as player:
        # As root, Chromium has no sandbox; what it opens here is ours.
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *fake])
        page = browser.new_page(viewport={"width": 1100, "height": 860})
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address[0])
        page.wait_for_selector("#restore-run")
        yield page
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        browser.close()
    others = [url for url in asked if not url.startswith((address[0], "data:", "blob:"))]
    assert not others and not errors


def show_tab(page, name: str):
    """Opens a tab; its part of the page."""
    page.get_by_role("tab", name=name).click()
    return page.get_by_role("tabpanel").filter(visible=True)


def shown(page, place: str) -> list[np.ndarray]:
    """The pictures that a part of the page shows."""
    sources = [image.get_attribute("src") for image in page.locator(f"{place} img").all()]
    found = []
    for source in sources:
        with urllib.request.urlopen(source) as answer, Image.open(io.BytesIO(answer.read())) as picture:
            found.append(np.asarray(picture.convert("RGB")))
    return found


def wait_for_pictures(page, place: str, count: int, before: list | None = None) -> list[np.ndarray]:
    """Pictures of a part of the page once they are there, and the last is another than before."""
    old = page.locator(f"{place} img").last.get_attribute("src") if before else None
    script = "([place, count, old]) => { const all = [...document.querySelectorAll(place + ' img')];"
    script += " return all.length >= count && all.at(-1).src !== old }"
    page.wait_for_function(script, arg=[place, count, old])
    return shown(page, place)


@pytest.fixture
def photo(tmp_path) -> Path:
    """A small picture with noise."""
    rows, columns = np.mgrid[:48, :64]
    clean = np.stack([4 * columns, 5 * rows, 255 - 4 * columns], -1)
    noisy = clean + np.random.default_rng(0).normal(0, 25, clean.shape)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_a_picture_is_dropped_and_restored_and_the_slider_of_strength_counts(page, photo):
    pixels = np.asarray(Image.open(photo))
    model = SemanIRForImageRestoration.from_pretrained(hf_ext.released("denoise-color")).eval()
    page.locator("input[type=file]").first.set_input_files(photo)
    page.wait_for_selector("img[src*='photo.png']")
    page.click("#restore-run")
    found = wait_for_pictures(page, "#restore-result", 2)
    np.testing.assert_array_equal(found[0], pixels)
    assert abs(found[1].astype(int) - restore_image(model, pixels)).max() <= 1

    old = page.locator("#restore-result img").last.get_attribute("src")
    handle = page.locator("#restore-strength input[type=range]")
    handle.focus()
    # From 1 in steps of 0.05.
    for _ in range(10):
        handle.press("ArrowLeft")
    page.click("#restore-run")
    page.wait_for_function(
        "old => [...document.querySelectorAll('#restore-result img')].at(-1)?.src !== old && "
        "document.querySelectorAll('#restore-result img').length >= 2",
        arg=old,
    )
    half = shown(page, "#restore-result")[1]
    assert abs(half.astype(int) - restore_image(model, pixels, strength=0.5)).max() <= 1
    assert abs(half.astype(int) - found[1]).max() > 1


def test_the_controls_of_a_drawing_are_moved(page, address):
    show_tab(page, "Draw")
    size = page.locator("#draw-size input[type=number]")
    size.fill("3")
    size.press("Enter")
    page.click("#draw-run")
    (found,) = wait_for_pictures(page, "#draw-result", 1)
    # The first model and its first class are chosen.
    expected = np.asarray(work.draw(str(hf_ext.released("cifar10")), "airplane", 3, 0, 0, False, 20, 3.0, 0))
    assert found.shape == expected.shape and abs(found.astype(int) - expected).max() <= 1


def test_a_file_and_a_microphone_are_heard(page, tmp_path):
    write_sound(tmp_path / "a.wav")
    source = str(hf_ext.released("spoken-digits"))
    *_, expected = work.hear_file(source, str(tmp_path / "a.wav"))
    show_tab(page, "Listen")
    page.locator("#listen-file input[type=file]").set_input_files(tmp_path / "a.wav")
    page.wait_for_selector("#listen-file audio, #listen-file #waveform", state="attached")
    page.click("#listen-run")
    result = page.locator("#listen-result")
    digits = " ".join(word for _, word in expected)
    page.wait_for_function("[...document.querySelectorAll('#listen-result td')].length >= 4")
    assert result.locator("h2").inner_text() == digits

    page.get_by_role("button", name="Record").click()
    page.wait_for_function("!document.querySelector('#listen-result h2')")
    # What is heard of a stream begins anywhere in it; that words come is what a browser can show.
    page.wait_for_function("[...document.querySelectorAll('#listen-result td')].length >= 2")
    assert re.fullmatch(r"\d( \d)*", result.locator("h2").inner_text())


def test_tasks_of_a_merge_are_switched(page, photo):
    pixels = np.asarray(Image.open(photo))
    merged = EMRModel.from_pretrained(hf_ext.released("restore-tasks"))
    panel = show_tab(page, "Merge")
    panel.locator("input[type=file]").first.set_input_files(photo)
    page.wait_for_function("[...document.querySelectorAll('img')].some(image => image.src.includes('photo.png'))")
    page.click("#merge-run")
    (_, first), every = wait_for_pictures(page, "#merge-result", 2), wait_for_pictures(page, "#merge-all", 4)
    old = page.locator("#merge-result img").last.get_attribute("src")
    page.locator("#merge-task").get_by_text("jpeg").click()
    page.wait_for_function("old => [...document.querySelectorAll('#merge-result img')].at(-1)?.src !== old", arg=old)
    second = shown(page, "#merge-result")[1]
    for task, found in zip(("noise", "jpeg"), (first, second), strict=True):
        expected = restore_image(merged.set_task(task).model, pixels)
        assert abs(found.astype(int) - expected).max() <= 1, task
    assert abs(first.astype(int) - second).max() > 1 and len(every) >= 4


def test_what_is_missing_is_said_on_the_page(page):
    page.click("#restore-run")
    page.get_by_text("There is no picture yet; add one first.").wait_for()


def test_an_example_is_a_click_away_and_its_result_is_a_sentence(page):
    page.locator("#restore-examples button").first.click()
    page.wait_for_selector("img[src*='noise.png']")
    page.click("#restore-run")
    page.wait_for_function("/ s\\. /.test(document.querySelector('#restore-said')?.innerText || '')")
    assert re.match(
        r"denoise-color restored 240 × 160 pixels at strength 1 in [\d.]+ s\.", page.inner_text("#restore-said")
    )
    for tab in ("draw", "listen", "merge"):
        show_tab(page, tab.capitalize())
        assert page.locator(f"#{tab}-examples button").count() >= 1
        assert len(page.inner_text(f"#{tab}-about")) > 60


def test_a_page_as_wide_as_a_phone_has_nothing_beside_it(page):
    page.set_viewport_size({"width": 390, "height": 844})
    for tab in ("Restore", "Draw", "Listen", "Merge"):
        show_tab(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
