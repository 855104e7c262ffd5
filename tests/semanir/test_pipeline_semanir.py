"""pipeline("image-restoration"): folders and Hub ids, files, PIL images and arrays, one or many."""

import base64
import http.server
import json
import threading
from functools import partial

import numpy as np
import pytest
from huggingface_hub import close_session
from PIL import Image
from transformers import pipeline

from hf_ext import restore_image
from hf_ext.errors import DataError, UsageError
from hf_ext.hub.publish import push
from hf_ext.restoration.pipeline import ImageRestorationPipeline
from hf_ext.semanir import SemanIRForImageRestoration, SemanIRImageProcessor, pipeline_semanir
from tests.kit.hub import run_python
from tests.kit.models import assert_same_picture
from tests.kit.pictures import noise
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

COLOUR = noise(9, 13, 3)
make_model = partial(tiny_restorer, scale=2)
plain_pipeline = partial(pipeline_semanir.ImageRestorationPipeline, device="cpu", task="image-restoration")
rich_pipeline = partial(pipeline, "image-restoration", device="cpu")


@pytest.fixture
def restore():
    return rich_pipeline(model=make_model())


def test_every_kind_of_input_and_lists_of_them(restore, tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    wanted = restore_image(make_model(), COLOUR)
    inputs = [str(tmp_path / "a.png"), tmp_path / "a.png", Image.fromarray(COLOUR), COLOUR, np.float32(COLOUR / 255)]
    for image in inputs:
        restored = restore(image)
        assert restored.size == (26, 18)
        assert_same_picture(np.asarray(restored), wanted)
    restored = restore([*inputs, Image.fromarray(COLOUR[:5])], batch_size=4)
    assert [image.size for image in restored] == [(26, 18)] * 5 + [(26, 10)]
    assert [image.size for image in restore(image for image in inputs)] == [(26, 18)] * 5
    # Grey, alpha and 16 bits are kept.
    for mode in ("L", "LA", "RGBA"):
        restored = restore(Image.fromarray(COLOUR).convert(mode))
        assert (restored.mode, restored.size) == (mode, (26, 18))
    deep = COLOUR.astype(np.uint16) * 257
    assert restore(deep, output_type="np").dtype == np.uint16
    assert (restore(deep).mode, restore(deep[..., 0]).mode) == ("RGB", "I;16")


@pytest.mark.parametrize("make", [plain_pipeline, rich_pipeline], ids=["plain", "hf_ext"])
def test_an_address_brings_what_its_file_does(make, tmp_path):
    restore = make(model=make_model())
    pictures = {mode: Image.fromarray(COLOUR).convert(mode) for mode in ("L", "LA", "RGBA")}
    pictures["deep"] = Image.fromarray(COLOUR[..., 0].astype(np.uint16) * 100)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, picture in pictures.items():
            path = tmp_path / f"{name}.png"
            picture.save(path)
            wanted = restore(path, output_type="np")
            assert wanted.dtype == (np.uint16 if name == "deep" else np.uint8)
            held = base64.b64encode(path.read_bytes()).decode()
            for address in (f"data:image/png;base64,{held}", f"http://127.0.0.1:{server.server_port}/{path.name}"):
                found = restore(address, output_type="np")
                assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
        server.shutdown()
    if make is rich_pipeline:
        with refused(DataError, "1e-06"):
            restore(f"data:image/png;base64,{held}", max_megapixels=1e-6)


def test_options_for_all_calls_and_for_one():
    model, image = make_model(scale=1), COLOUR.astype(np.float32) / 255
    restore = rich_pipeline(model=model, top_k=1, output_type="np")
    for options in ({}, {"top_k": 4}, {"tile": 32}, {"self_ensemble": True}, {"strength": 0.3}):
        wanted = restore_image(model, image, **{"top_k": 1, **options})
        np.testing.assert_allclose(restore(COLOUR, **options), wanted.clip(0, 1) * 255, atol=0.51)


def test_what_cannot_be_restored_is_refused(restore, tmp_path):
    (tmp_path / "text.png").write_text("not a picture")
    for kind, facts, image, options in (
        (DataError, ["picture", "Pillow"], str(tmp_path / "text.png"), {}),
        (FileNotFoundError, [], "nowhere.png", {}),
        (TypeError, ["picture", "file"], 3, {}),
        (ValueError, ["max_megapixels"], COLOUR, {"tiles": 3}),
        (ValueError, ["pil", "np"], COLOUR, {"output_type": "jpeg"}),
        (UsageError, ["infinite", "NaN"], np.full((4, 4, 3), np.nan), {}),
    ):
        with refused(kind, *facts):
            restore(image, **options)
    # Noise that was not clipped is a picture, and an empty list is one of none.
    assert restore(np.full((8, 9, 3), 1.3, np.float32)).size == (18, 16)
    assert restore([]) == []


# Fields of a model, channels and kind of a picture.
PAIRED = {
    "grey": ({}, 1, np.uint8),
    "grey-alpha": ({"scale": 2}, 2, np.uint8),
    "colour": ({}, 3, np.uint16),
    "colour-alpha": ({"scale": 2}, 4, np.uint8),
    "grey-model": ({"num_channels": 1}, 1, np.uint16),
    "grey-model-colours": ({"num_channels": 1}, 4, np.uint8),
    "mosaic": ({"num_channels": 4, "num_channels_out": 3, "scale": 2}, 1, np.uint16),
}


@pytest.mark.parametrize("case", PAIRED)
def test_the_plain_pipeline_that_travels_gives_the_same_pictures(case):
    fields, channels, dtype = PAIRED[case]
    plain, rich = (make(model=tiny_restorer(**fields)) for make in (plain_pipeline, rich_pipeline))
    picture = noise(9, 13, channels, dtype=dtype, seed=1)
    for image in (picture, picture / np.float32(np.iinfo(dtype).max)):
        found, wanted = plain(image, output_type="np", top_k=4), rich(image, output_type="np", top_k=4)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        # Colours of a grey model go as one batch, here one by one: a last bit may round otherwise.
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1
    for restore in (plain, rich):
        for fact, shape in (("(2, 4, 4, 3)", (2, 4, 4, 3)), ("5 channels", (4, 4, 5))):
            with refused(ValueError, fact):
                restore(np.zeros(shape))
        for one, same in ((picture > 99, (picture > 99) * np.uint8(255)), (picture.astype(">u2"), np.uint16(picture))):
            assert np.array_equal(restore(one, output_type="np"), restore(same, output_type="np"))


def test_the_plain_pipeline_reads_files_and_names_what_hf_ext_would_add(tmp_path):
    plain = plain_pipeline(model=make_model())
    Image.fromarray(COLOUR).convert("LA").save(tmp_path / "a.png")
    restored = plain(tmp_path / "a.png")
    assert (restored.mode, restored.size) == ("LA", (26, 18))
    for name in ("tile", "self_ensemble", "max_megapixels", "strength"):
        with refused(ValueError, name):
            plain(COLOUR, **{name: 32})
    with refused(ValueError, "top_k", "output_type"):
        plain(COLOUR, tiles=3)


# Runs as somebody without hf_ext and then as somebody with it; numba would need ten seconds for each copy of the code.
PULL = """
import json, sys
import numpy as np
sys.modules["hf_ext"] = sys.modules["numba"] = None
from transformers import pipeline
image = np.array(json.loads(sys.argv[1]), dtype=np.uint8)
results, trust = [], {"trust_remote_code": True, "device": "cpu"}

def run(restore, prefix):
    assert type(restore).__module__.startswith(prefix) and type(restore.model).__module__.startswith(prefix), restore
    assert restore.task == "image-restoration"
    results.append(restore(image, output_type="np").tolist())
    return restore

try:
    pipeline("image-restoration", model="me/model", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("remote code ran without being trusted")
run(pipeline(model="me/model", **trust), "transformers_modules.")
restore = run(pipeline("image-restoration", model="me/model", **trust), "transformers_modules.")
# what is saved again is whole
restore.save_pretrained("again")
run(pipeline("image-restoration", model="again", **trust), "transformers_modules.")
del sys.modules["hf_ext"]
import hf_ext

def ask(question=""):
    raise AssertionError(f"asked: {question}")

__builtins__.input = ask
run(pipeline(model="me/model", device="cpu"), "hf_ext.")
run(pipeline("image-restoration", model="me/model", **trust), "hf_ext.")
run(pipeline("image-restoration", model="again", device="cpu"), "hf_ext.")
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
def test_what_a_pipeline_saved_is_pushed_and_pulled_with_and_without_hf_ext(hub, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    SemanIRImageProcessor().save_pretrained(tmp_path / "model")
    rich_pipeline(model=str(tmp_path / "model")).save_pretrained(tmp_path / "pipeline")
    config = json.loads((tmp_path / "pipeline" / "config.json").read_text())
    assert config["custom_pipelines"].keys() == {"image-restoration"}
    push(tmp_path / "pipeline", "me/model", endpoint=hub.url, token=False, check=False)
    close_session()
    # where the installed package loads it, transformers would ask for trust
    assert not hasattr(SemanIRForImageRestoration.from_pretrained(tmp_path / "model").config, "custom_pipelines")
    shown = run_python(PULL, hub.url, tmp_path / "home", json.dumps(COLOUR.tolist()))
    wanted = restore_image(model, COLOUR).astype(int)
    results = json.loads(shown.splitlines()[-1])
    assert len(results) == 6
    for restored in results:
        # other copies of the network, and another way to compute attention: a last bit may round otherwise
        assert abs(np.array(restored) - wanted).max() <= 1


@pytest.mark.parametrize("strength", [None, 0.5, "auto"])
def test_the_pipeline_that_travels_says_that_it_makes_the_whole_change(strength, recwarn):
    model = make_model()
    if strength is not None:
        model.config.restoration_strength = strength
    for kind, warns in ((ImageRestorationPipeline, False), (pipeline_semanir.ImageRestorationPipeline, True)):
        recwarn.clear()
        kind(model=model, device="cpu")
        assert sum("own strength" in str(item.message) for item in recwarn) == (warns and strength is not None)
