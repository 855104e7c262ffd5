"""Estimates of noise and JPEG quality, and the strength that is chosen by them."""

import io

import numpy as np
import pytest
import skimage.data
from PIL import Image, ImageDraw, ImageFont

from hf_ext import released
from hf_ext.errors import UsageError
from hf_ext.restoration.damage import Damage, choose_strength, estimate_damage
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration
from tests.kit.refusals import refused
from tests.restoration.test_tiles import make_model


def write_text() -> np.ndarray:
    """Black text on white, where clipping takes half of the noise."""
    picture = Image.new("RGB", (320, 160), "white")
    for top in range(0, 160, 20):
        ImageDraw.Draw(picture).text((4, top), "The quick brown fox jumps", "black", ImageFont.load_default(14))
    return np.asarray(picture)


# 200 x 220 pixels of photographs without a trace of JPEG.
PICTURES = {
    name: lambda name=name: np.atleast_3d(getattr(skimage.data, name)())[60:260, 100:320]
    for name in ("astronaut", "chelsea", "coffee", "camera", "moon", "brick")
}


def add_noise(pixels: np.ndarray, sigma: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, sigma, pixels.shape)
    return np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8)


def compress(pixels: np.ndarray, quality: int | str, **options) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]).save(file, "JPEG", quality=quality, **options)
    return np.atleast_3d(np.asarray(Image.open(file)))


@pytest.mark.parametrize("name", PICTURES)
def test_noise_and_quality_are_found(name):
    clean = PICTURES[name]()
    noise, quality = estimate_damage(clean)
    assert noise < 2 and quality is None
    for sigma in (3, 50):
        noise, quality = estimate_damage(add_noise(clean, sigma))
        # Clipping takes a part of strong noise.
        assert 0.85 * sigma < noise < 1.1 * sigma + 1 and quality is None
    for quality, subsampling in ((3, 0), (20, 2), (60, 0), (95, 2)):
        found = estimate_damage(compress(clean, quality, subsampling=subsampling)).quality
        assert found == pytest.approx(quality, abs=1)


@pytest.mark.parametrize("preset", [("web_low", 34), ("medium", 64), ("web_high", 82)])
def test_other_tables_have_a_quality_too(preset):
    """Photoshop's tables are not the standard's."""
    assert estimate_damage(compress(PICTURES["astronaut"](), preset[0])).quality == pytest.approx(preset[1], abs=6)


@pytest.mark.parametrize(("name", "quality"), [("astronaut", 8), ("chelsea", 40), ("camera", 75)])
def test_a_cropped_or_turned_picture_keeps_its_quality(name, quality):
    whole = compress(PICTURES[name](), quality)
    for part in (whole[3:, 5:], whole[1:-4, :-2], np.rot90(whole[:-3, :-5]), whole[:, ::-1][:, 3:]):
        assert estimate_damage(part).quality == pytest.approx(quality, abs=1)


DRAWINGS = {
    "pixel": np.zeros((1, 1, 3), np.uint8),
    "strip": np.full((5, 40, 4), 200, np.uint8),
    "grey": np.full((64, 64, 1), 77, np.uint8),
    "blue": np.full((64, 64, 3), (0, 0, 255), np.uint8),
    "ramp": np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 100, 0),
    "checkerboard": np.kron(np.indices((20, 20)).sum(0) % 2, np.ones((8, 8)))[..., None],
    "text": write_text(),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_have_no_damage_but_noise_on_white_paper_is_seen(name):
    assert estimate_damage(DRAWINGS[name]) == Damage(0.0, None)
    assert name != "text" or 0.4 * 20 < estimate_damage(add_noise(DRAWINGS[name], 20)).noise < 20


def test_strength_rises_with_the_damage():
    by_noise = [choose_strength(Damage(noise, None)) for noise in (0, 2.3, 2.5, 3, 8, 50)]
    assert by_noise == sorted(by_noise)
    assert (by_noise[0], by_noise[1], by_noise[-2], by_noise[-1]) == (0, 0, 1, 1)
    by_quality = [choose_strength(Damage(0, quality)) for quality in (100, 95, 84, 83, 75, 10, 1)]
    assert by_quality == sorted(by_quality) and by_quality[:3] == [0, 0, 0] and by_quality[4:] == [1, 1, 1]
    # The larger of both counts.
    assert choose_strength(Damage(50, 99)) == choose_strength(Damage(0, 20)) == 1


@pytest.fixture(scope="module")
def photo() -> SemanIRForImageRestoration:
    return SemanIRForImageRestoration.from_pretrained(released("photo")).eval()


NEARLY_CLEAN = "astronaut chelsea coffee camera moon brick coins page text clock cell rocket"


@pytest.mark.parametrize("name", NEARLY_CLEAN.split())
def test_photo_by_its_own_strength_makes_nothing_worse_that_is_nearly_clean(photo, name):
    """Halved, so that no picture has a trace of JPEG or noise of its own."""
    whole = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
    half = whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)
    clean = np.asarray(half)[-100:, -100:]
    damaged = [compress(clean, quality, subsampling=kind) for quality, kind in ((85, 2), (95, 0))]
    for given, least in (*((one, -0.1) for one in (*damaged, add_noise(clean, 2))), (add_noise(clean, 10), 2)):
        before, after = (np.mean((clean.astype(float) - one) ** 2) for one in (given, restore_image(photo, given)))
        assert 10 * np.log10(before / after) >= least


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_auto_is_the_strength_of_the_damage(channels):
    model = make_model()
    pixels = np.tile(add_noise(skimage.data.chelsea()[:48, :56], 3)[..., :1], channels)
    share = choose_strength(estimate_damage(pixels))
    assert 0 < share < 1
    automatic = restore_image(model, pixels, strength="auto")
    np.testing.assert_array_equal(automatic, restore_image(model, pixels, strength=share))
    clean = np.full((40, 40, channels), 90, np.uint8)
    np.testing.assert_array_equal(restore_image(model, clean, strength="auto"), clean)


def test_a_model_may_have_a_strength_of_its_own():
    pixels = add_noise(skimage.data.chelsea()[:48, :56], 3)
    model = make_model()
    whole, automatic = restore_image(model, pixels), restore_image(model, pixels, strength="auto")
    model.config.restoration_strength = "auto"
    np.testing.assert_array_equal(restore_image(model, pixels), automatic)
    np.testing.assert_array_equal(restore_image(model, pixels, strength=1), whole)
    assert (whole != automatic).any()
    model.config.restoration_strength = None
    np.testing.assert_array_equal(restore_image(model, pixels), whole)
    for wrong in ("full", 2, [1]):
        model.config.restoration_strength = wrong
        with refused(UsageError, wrong):
            restore_image(model, pixels)


@pytest.mark.parametrize("damage", ["noise", "jpeg", "none"])
def test_colours_that_cannot_be_seen_decide_nothing(damage):
    clean = PICTURES["astronaut"]()
    kinds = {"noise": add_noise(clean, 25), "jpeg": compress(clean, 30), "none": clean, "black": np.zeros_like(clean)}
    seen, alpha = kinds.pop(damage), np.full((*clean.shape[:2], 1), 255, np.uint8)
    whole = estimate_damage(seen)
    assert whole == estimate_damage(np.concatenate([seen, alpha], axis=-1))
    alpha[:, :80] = 0
    for hidden in (kind for name, kind in kinds.items() if name != "none"):
        half = np.where(alpha > 0, seen, hidden)
        found = estimate_damage(np.concatenate([half, alpha], axis=-1))
        assert found == estimate_damage(seen[:, 80:]) and abs(choose_strength(found) - choose_strength(whole)) < 0.15
        faint = np.concatenate([half, np.maximum(alpha, 9)], axis=-1)
        assert estimate_damage(faint) == found
    # Where next to nothing is seen, all of it is taken.
    assert estimate_damage(np.concatenate([seen, np.zeros_like(alpha)], axis=-1)) == whole
