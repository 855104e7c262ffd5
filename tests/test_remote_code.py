"""Published models load with and without hf_ext, from a folder and from a Hub, and again when saved again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageToImage

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.fast import semanir_operators
from hf_ext.hub.publish import push, stage
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor
from tests.kit.hub import run_python
from tests.kit.models import assert_same_answers

SMALL = {"embed_dim": 8, "num_heads": (2, 2), "depths": (1, 2), "window_size": 4, "top_k": 6}
MODELS = {
    "columnar": SMALL | {"scale": 2, "image_mean": [0.4, 0.5, 0.6]},
    "u-shaped": SMALL | {"architecture": "u-shaped", "refinement_depth": 1, "downsampling": "unshuffle"},
}

# The source whose kernels are compiled from remote code. Each copy of the code would take ten seconds for that: what
# the others give torch computes.
COMPILED = "columnar-local"

# Runs in its own process. Arguments: "absent" or "installed"; sources by name as JSON, the one that is compiled first;
# the image; where to write.
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
    if presence == "absent":
        sys.modules["numba"] = None
    for again in ("again", "once-more"):
        folder = f"{out}-{name}-{again}"
        head.save_pretrained(folder)
        processor.save_pretrained(folder)
        if again == "again":
            head, processor = run(f"{name}/again", folder, {})
save_file({key: value.contiguous() for key, value in results.items()}, out)
"""


IMAGE = torch.randint(0, 256, (3, 9, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[tuple[EmbeddedHub, Path, dict, dict]]:
    """A Hub and folders with both architectures; the sources by name, and what each must give by who computes."""
    # Their number decides the order of sums, and the other processes have one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("published")
    save_file({"image": IMAGE}, place / "image.safetensors")
    sources: dict = {}
    expected: dict = {"kernels": {}, "torch": {}}
    with EmbeddedHub(place / "hub") as hub:
        for name, options in MODELS.items():
            torch.manual_seed(0)
            model = SemanIRForImageRestoration(SemanIRConfig(**options)).eval()
            processor = SemanIRImageProcessor(size_divisor=2)
            model.save_pretrained(place / "saved" / name)
            processor.save_pretrained(place / "saved" / name)
            folder = stage(place / "saved" / name, place / name, repo_id=f"org/{name}")
            info = push(folder, f"org/{name}", endpoint=hub.url, token=False, check=False)
            sources |= {f"{name}-local": [str(folder), {}], f"{name}-hub": [f"org/{name}", {"revision": info.oid}]}
            inputs = processor([IMAGE], return_tensors="pt")
            for computer, values in expected.items():
                with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
                    if computer == "torch":
                        patch.setattr(semanir_operators, "native_kernels_work", lambda: False)
                    for where in ("local", "hub"):
                        values[f"{name}-{where}/head"] = model(**inputs).reconstruction
                        values[f"{name}-{where}/base"] = model.model(**inputs).last_hidden_state
        yield hub, place, sources, expected
        close_session()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("presence", ["absent", "installed"])
def test_every_way_to_load_gives_the_same_answers(published, presence):
    hub, place, sources, expected = published
    # nothing is taken from the repository's folder: the installed package is what a stranger would have
    home, out = place / f"home-{presence}", place / f"{presence}.safetensors"
    run_python(LOAD, hub.url, home, presence, json.dumps(sources), str(place / "image.safetensors"), str(out))
    results = load_file(out)
    assert [*sources][0] == COMPILED
    wanted = {}
    for name in expected["kernels"]:
        for key in (name, name.replace("/", "/again/")):
            compiled = presence == "installed" or key.startswith(COMPILED) and "/again/" not in key
            wanted[key] = expected["kernels" if compiled else "torch"][name]
    assert set(results) == set(wanted)
    for key, value in wanted.items():
        assert_same_answers(results[key], value, key)
        assert not value.isnan().any() and value.std() > 0
    # what was saved from remote code is whole, and ours again without a trust flag
    for name in sources:
        for again in ("again", "once-more"):
            folder = Path(f"{out}-{name}-{again}")
            assert_same_files(place / name.rpartition("-")[0], folder)
        head = AutoModelForImageToImage.from_pretrained(folder)
        processor = AutoImageProcessor.from_pretrained(folder)
        assert type(head) is SemanIRForImageRestoration and type(processor) is SemanIRImageProcessor
        with torch.no_grad():
            value = head(**processor([IMAGE], return_tensors="pt")).reconstruction
        assert_same_answers(value, expected["kernels"][f"{name}/head"], name)


def assert_same_files(published: Path, saved: Path) -> None:
    """A model that was loaded and saved again has all files of the published one but its card, with equal content."""
    names = {path.name for path in published.iterdir()} - {"README.md"}
    assert {path.name for path in saved.iterdir()} == names
    for name in names:
        if name.endswith(".json"):
            assert json.loads((saved / name).read_text()) == json.loads((published / name).read_text()), name
        elif name.endswith(".py"):
            assert (saved / name).read_bytes() == (published / name).read_bytes(), name
        elif name.endswith(".safetensors"):
            ours, theirs = load_file(saved / name), load_file(published / name)
            assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs), name
