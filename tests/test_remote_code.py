"""What we publish loads with and without hf_ext, from a folder and from a Hub, and again when it was saved again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageToImage

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.hub.publish import push, stage
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor, SemanIRModel
from tests.hub_testing import run_python

# huggingface_hub 2.4 itself sends large files with an argument that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

SMALL = {"embed_dim": 8, "num_heads": (2, 2), "depths": (1, 2), "window_size": 4, "top_k": 6}
MODELS = {
    "columnar": SMALL | {"scale": 2, "image_mean": [0.4, 0.5, 0.6]},
    "u-shaped": SMALL | {"architecture": "u-shaped", "refinement_depth": 1, "downsampling": "unshuffle"},
}

# Runs in its own process. Arguments: "absent" or "installed"; sources by name as JSON; the image; where to write.
LOAD = """
import json, sys
presence, sources, image, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
if presence == "absent":
    sys.modules["hf_ext"] = None
else:
    import hf_ext.semanir
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageToImage

trust = {"trust_remote_code": True} if presence == "absent" else {}
image = load_file(image)["image"]
results = {}

def run(name, source, options):
    processor = AutoImageProcessor.from_pretrained(source, **options, **trust)
    head = AutoModelForImageToImage.from_pretrained(source, **options, **trust)
    base = AutoModel.from_pretrained(source, **options, **trust)
    config = AutoConfig.from_pretrained(source, **options, **trust)
    expected = "transformers_modules." if presence == "absent" else "hf_ext.semanir."
    for loaded in (processor, head, base, config):
        assert type(loaded).__module__.startswith(expected), type(loaded)
    assert config.to_dict() == head.config.to_dict() | {"architectures": config.architectures}
    inputs = processor([image], return_tensors="pt")
    with torch.no_grad():
        results[f"{name}/head"] = head(**inputs).reconstruction
        results[f"{name}/base"] = base(**inputs).last_hidden_state
    return head, processor

for name, (source, options) in sources.items():
    if presence == "absent":
        try:
            AutoModelForImageToImage.from_pretrained(source, **options, trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise AssertionError("remote code ran without being trusted")
    head, processor = run(name, source, options)
    again = f"{out}-{name}"
    head.save_pretrained(again)
    processor.save_pretrained(again)
    run(f"{name}/again", again, {})
save_file({key: value.contiguous() for key, value in results.items()}, out)
"""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The number of threads decides the order of sums, and the other processes have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randint(0, 256, (3, 9, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def published(tmp_path_factory, one_thread, image) -> Iterator[tuple[EmbeddedHub, Path, dict, dict]]:
    """A Hub and folders with both architectures; the sources by name, and what each must give."""
    place = tmp_path_factory.mktemp("published")
    save_file({"image": image}, place / "image.safetensors")
    sources, expected = {}, {}
    with EmbeddedHub(place / "hub") as hub:
        for name, options in MODELS.items():
            torch.manual_seed(0)
            model = SemanIRForImageRestoration(SemanIRConfig(**options)).eval()
            processor = SemanIRImageProcessor(size_divisor=2)
            folder = stage(model, place / name, processor=processor, repo_id=f"org/{name}")
            info = push(folder, f"org/{name}", endpoint=hub.url, token=False, check=False)
            sources |= {f"{name}-local": [str(folder), {}], f"{name}-hub": [f"org/{name}", {"revision": info.oid}]}
            with torch.no_grad():
                inputs = processor([image], return_tensors="pt")
                for where in ("local", "hub"):
                    expected[f"{name}-{where}/head"] = model(**inputs).reconstruction
                    expected[f"{name}-{where}/base"] = model.model(**inputs).last_hidden_state
        yield hub, place, sources, expected
        close_session()


@pytest.mark.parametrize("presence", ["absent", "installed"])
def test_every_way_to_load_gives_equal_bits(published, image, presence):
    hub, place, sources, expected = published
    # nothing is taken from the repository's folder: the installed package is what a stranger would have
    home, out = place / f"home-{presence}", place / f"{presence}.safetensors"
    run_python(LOAD, hub.url, home, presence, json.dumps(sources), str(place / "image.safetensors"), str(out))
    results = load_file(out)
    assert set(results) == {key for name in expected for key in (name, name.replace("/", "/again/"))}
    for name, value in expected.items():
        for key in (name, name.replace("/", "/again/")):
            assert results[key].equal(value), key
            assert not value.isnan().any() and value.std() > 0
    # what was saved from remote code is ours again, without a trust flag
    for name in sources:
        again = f"{out}-{name}"
        head = AutoModelForImageToImage.from_pretrained(again)
        processor = AutoImageProcessor.from_pretrained(again)
        assert type(head) is SemanIRForImageRestoration and type(processor) is SemanIRImageProcessor
        with torch.no_grad():
            value = head(**processor([image], return_tensors="pt")).reconstruction
        assert value.equal(expected[f"{name}/head"])


def test_the_installed_package_needs_no_trust_flag(published, image):
    _, _, sources, expected = published
    for name, (source, _) in sources.items():
        if name.endswith("-hub"):
            continue
        assert type(AutoConfig.from_pretrained(source)) is SemanIRConfig
        base = AutoModel.from_pretrained(source)
        processor = AutoImageProcessor.from_pretrained(source)
        assert type(base) is SemanIRModel and processor.size_divisor == 2
        with torch.no_grad():
            value = base(**processor([image], return_tensors="pt")).last_hidden_state
        assert value.equal(expected[f"{name}/base"])
