"""Distances of folders of pictures: those of all features at once, from files, statistics and batches."""

import contextlib
import gc
import hashlib
import io
import json

import numpy as np
import pytest
import yaml
from PIL import Image

from hf_ext.distributed import Ranks
from hf_ext.errors import DataError, MissingColumn, UsageError
from hf_ext.metrics import ClassifierFeatures, CLIPScores, frechet_distance, kernel_distance_of_subsets
from hf_ext.tasks import picture_scores
from hf_ext.tasks.diffusion_data import write_tar
from hf_ext.tasks.picture_scores import load_network, score
from hf_ext.training import evaluate_checkpoint
from tests.kit.command_line import run
from tests.kit.own_data import write_files
from tests.kit.pictures import encode
from tests.kit.refusals import refused
from tests.kit.scorers import write_clip, write_inception

from .diffusion_testing import nothing_copied, write_judge


def write_noise(folder, seed: int, count: int) -> np.ndarray:
    images = np.random.default_rng(seed).integers(256, size=(count, 16, 16, 3), dtype=np.uint8)
    folder.mkdir()
    write_files(folder, {f"{number:06d}.png": encode(image) for number, image in enumerate(images)})
    return images


def write_rows(folder, name: str, values: list) -> None:
    """What `hf-ext sample` writes beside its pictures."""
    rows = [json.dumps({"file_name": f"{number:06d}.png", name: value}) for number, value in enumerate(values)]
    write_files(folder, {"metadata.jsonl": "\n".join(rows)})


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pictures_are_seen_on_white(mode, tmp_path):
    picture = Image.new("RGBA", (16, 16), (255, 0, 255, 0))
    picture.paste((0, 128, 0, 255), (0, 0, 16, 8))
    shown = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    converted = picture.quantize(method=Image.Quantize.FASTOCTREE) if mode == "P" else picture.convert(mode)
    for name, image in (("made", converted), ("real", shown.convert("L" if mode == "LA" else "RGB"))):
        write_files(tmp_path / name, {f"{number}.png": encode(image) for number in range(2)})
    judge = write_judge(tmp_path / "judge")
    assert score(str(tmp_path / "made"), str(tmp_path / "real"), judge)["feature_distance"] < 1e-6


def test_statistics_that_are_none_are_named(tmp_path):
    write_noise(tmp_path / "made", 0, 3)
    judge, bad = write_judge(tmp_path / "judge"), tmp_path / "bad.npz"
    bare, right = io.BytesIO(), {"mu": np.zeros(8), "sigma": np.eye(8)}
    np.save(bare, np.zeros(3))
    contents = [b"x", b"", bare.getvalue()]
    wrong = {"mu": np.array([None])}, {"mu": np.array(["a"])}, {"sigma": np.eye(8) * 1j}, {"count": "many"}, {"mu": 1}
    for arrays in wrong:
        np.savez(bad, **right | arrays)
        contents += [bad.read_bytes(), bad.read_bytes()[:90]]
    for content in contents:
        bad.write_bytes(content)
        with refused(DataError, "bad.npz"):
            score(str(tmp_path / "made"), str(bad), judge)
    with refused(ValueError, "device none"):
        score(str(tmp_path / "made"), str(bad), judge, device="none")


def test_folders_are_scored_as_all_features_at_once_and_statistics_again(tmp_path):
    network = ClassifierFeatures(write_judge(tmp_path / "judge"))
    made = network(write_noise(tmp_path / "made", 0, 11))
    write_files(tmp_path / "made", {"sampling.json": "{}"})
    write_rows(tmp_path / "made", "label", [1] * 11)
    real = network(write_noise(tmp_path / "real", 1, 14))
    words = ["dit", "score", tmp_path / "made", tmp_path / "real", "--network", tmp_path / "judge", "--device", "cpu"]
    found = json.loads(run(*words, "--batch-size", 4, "--kernel", "--keep", tmp_path / "real.npz", "--json").stdout)
    kernel, spread = kernel_distance_of_subsets(made, real, subset_size=11)
    assert found == {
        "feature_distance": pytest.approx(frechet_distance(made, real), rel=1e-3),
        "kernel_distance": pytest.approx(kernel, rel=1e-3),
        "kernel_distance_standard_deviation": pytest.approx(spread, rel=1e-2),
        "pictures": 11,
        "reference_pictures": 14,
    }
    words[3] = tmp_path / "real.npz"
    again = json.loads(run(*words, "--json").stdout)
    assert again["feature_distance"] == pytest.approx(found["feature_distance"], rel=1e-6)
    assert again["reference_pictures"] == 14 and set(again) == {"feature_distance", "pictures", "reference_pictures"}
    assert "feature_distance" in run(*words).stdout
    with refused(UsageError, "real.txt"):
        score(tmp_path / "made", tmp_path / "real", str(tmp_path / "judge"), keep=tmp_path / "real.txt")
    with refused(ValueError, "judge", "regnet"):
        CLIPScores(str(tmp_path / "judge"))
    with refused(UsageError, "kernel"):
        score(str(tmp_path / "made"), str(tmp_path / "real.npz"), str(tmp_path / "judge"), kernel=True)
    (tmp_path / "words.jsonl").write_text('{"text": "no picture"}\n')
    with refused(DataError, "words.jsonl"):
        score(str(tmp_path / "made"), str(tmp_path / "words.jsonl"), str(tmp_path / "judge"), device="cpu")


@pytest.mark.parametrize("wrong", ["empty", "one", "sizes", "broken"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_set_that_cannot_be_scored_is_named(tmp_path, wrong, place):
    network = write_inception(tmp_path / "network.pt")
    write_noise(tmp_path / "right", 0, 2)
    write_noise(tmp_path / wrong, 1, {"empty": 0, "one": 1}.get(wrong, 2))
    added = {"sizes": {"wide.png": encode(Image.new("RGB", (8, 16)))}, "broken": {"part.png": b""}}
    write_files(tmp_path / wrong, added.get(wrong, {}))
    sets = [str(tmp_path / "right")] * 2
    sets[place] = str(tmp_path / wrong)
    told = run("dit", "score", *sets, "--network", network, "--device", "cpu", "--batch-size", 2, code=2).stderr
    assert sets[place] in told and "Set --" not in told


SOUND = {"png": {}, "bmp": {}, "webp": {"lossless": True}, "tiff": {}}
BROKEN = {"cut": lambda content: content[:60], "empty": lambda _: b"", "page": lambda _: b"<html>404</html>"}


# Pillow leaves the file of a picture that is cut off open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("endings", [["png"], ["png", "webp"], ["bmp", "tiff", "webp"]])
@pytest.mark.parametrize("form", ["folder", "tars"])
def test_bad_pictures_of_the_reference_are_left_out_named_and_counted(tmp_path, form, endings, caplog):
    """Whatever their endings; of tar files also those without a picture. Of the pictures none may be bad."""
    images, judge, bad = write_noise(tmp_path / "made", 0, 12), write_judge(tmp_path / "judge"), {}
    files: dict[str, dict[str, bytes]] = {}
    for number, image in enumerate(images):
        ending = endings[number % len(endings)]
        files[f"{number:03d}"] = {ending: encode(image, ending.upper(), **SOUND[ending])}
    for name, spoil in BROKEN.items():
        bad[name] = {endings[0]: spoil(files["000"][endings[0]])}
    if form == "folder":
        named = {f"{name}.{end}": content for name, held in (files | bad).items() for end, content in held.items()}
        place = write_files(tmp_path / "web", named)
    else:
        bad["none"] = {"txt": b"a cat"}
        rows = [(name, {"txt": b"a hen", **held}) for name, held in (files | bad).items()]
        place = tmp_path / "*.tar"
        write_tar(tmp_path / "0.tar", rows[:9]), write_tar(tmp_path / "1.tar", rows[9:])
    words = [tmp_path / "made", place, "--network", judge, "--device", "cpu", "--batch-size", 5]
    with nothing_copied() if form == "tars" else contextlib.nullcontext():
        opened = picture_scores.Pictures(str(place), "train", Ranks(), 0.9)
        statistics, _ = picture_scores.see(opened, ClassifierFeatures(judge), "reference")
        assert statistics.count == 12 and len(opened.bad) == len(bad)
    found = json.loads(run("dit", "score", *words, "--max-bad-examples", 0.5, "--json").stdout)
    counts = found.pop("pictures"), found.pop("reference_pictures"), found.pop("reference_pictures_left_out")
    assert counts == (12, 12, len(bad)) and found == {"feature_distance": pytest.approx(0, abs=1e-6)}
    assert all(any(name in record.message for record in caplog.records) for name in bad)
    share = (len(bad) - 0.5) / (12 + len(bad))
    with refused(DataError, str(place), "max_bad_examples"):
        score(tmp_path / "made", place, judge, max_bad_examples=share, device="cpu")
    with refused(DataError, str(place)):
        score(place, tmp_path / "made", judge, max_bad_examples=1.0, device="cpu")
    with refused(UsageError, "real.npz"):
        score(tmp_path / "real.npz", place, judge, device="cpu")
    # Here, where the warning is ignored.
    gc.collect()


@pytest.mark.slow
def test_pictures_of_the_reference_are_cut_as_a_training_cuts_them(tmp_path):
    # Beside the middle square there is something else, of another width in each.
    wide = [np.pad(each, ((0, 0), (n, n), (0, 0))) for n, each in enumerate(write_noise(tmp_path / "made", 0, 4))]
    write_files(tmp_path / "real", {f"{number}.png": encode(image) for number, image in enumerate(wide)})
    network = write_inception(tmp_path / "network.pt")
    given = (str(tmp_path / "made"), str(tmp_path / "real"), network)
    found = score(*given, size=16, keep=tmp_path / "real.npz", device="cpu")
    assert found["fid"] == pytest.approx(0, abs=1e-3) and found["reference_pictures"] == 4
    with pytest.raises(ValueError, match="one size"):
        score(*given, device="cpu")
    for reference in (str(tmp_path / "real.npz"), None):
        with refused(UsageError, "size"):
            score(given[0], reference, network if reference else None, clip=network, size=16, device="cpu")


def test_features_for_the_kernel_distance_are_bounded_and_drawn_at_random(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_scores, "KEPT", 5)
    network = ClassifierFeatures(write_judge(tmp_path / "judge"), batch_size=3)
    features = network(write_noise(tmp_path / "made", 0, 11))
    pictures = picture_scores.Pictures(str(tmp_path / "made"), "train", Ranks())
    statistics, seen = picture_scores.see(pictures, network, "pictures")
    chosen = sorted(sorted(range(11), key=lambda number: hashlib.sha256(f"(0, {number})".encode()).digest())[:5])
    np.testing.assert_allclose(seen, features[chosen], atol=1e-5 * np.abs(features).max())
    assert statistics.count == 11 and chosen != [*range(5)]


@pytest.mark.slow
def test_fid_by_a_file_whose_hash_is_checked(tmp_path):
    write_noise(tmp_path / "made", 0, 5), write_noise(tmp_path / "real", 1, 6)
    network = write_inception(tmp_path / "network.pt")
    digest = hashlib.sha256((tmp_path / "network.pt").read_bytes()).hexdigest()
    words = ["dit", "score", tmp_path / "made", tmp_path / "real", "--device", "cpu", "--json", "--network"]
    found = json.loads(run(*words, f"{network}#sha256={digest.upper()}", "--keep", tmp_path / "real.npz").stdout)
    assert found["fid"] > 0 and found["pictures"] == 5
    words[3] = tmp_path / "real.npz"
    assert json.loads(run(*words, network).stdout)["fid"] == pytest.approx(found["fid"])
    # The same words, another network: of the file, of the statistics.
    other = write_inception(tmp_path / "other.pt", scale=2.0)
    for source, told in ((f"{other}#sha256={digest}", digest), (other, "real.npz")):
        with refused(ValueError, told):
            score(str(tmp_path / "made"), str(tmp_path / "real.npz"), source, device="cpu")
    (tmp_path / "page.pt").write_text("<html>404</html>")
    with refused(ValueError, "page.pt", "TorchScript"):
        load_network(str(tmp_path / "page.pt"), "cpu", 8)


def test_clip_score_of_a_folder_that_sample_wrote(tmp_path):
    images, texts = write_noise(tmp_path / "made", 0, 5), ["a cat", "a dog", "red", "blue", "a cat"]
    model = write_clip(tmp_path / "clip")
    with refused(MissingColumn, "text"):
        score(str(tmp_path / "made"), clip=model, device="cpu")
    write_rows(tmp_path / "made", "text", texts)
    found = json.loads(run("dit", "score", tmp_path / "made", "--clip", model, "--batch-size", 2, "--json").stdout)
    assert found == {"clip_score": pytest.approx(CLIPScores(model)(list(images), texts).mean(), abs=1e-3)}
    files = [{"png": encode(image), "txt": text.encode()} for image, text in zip(images, texts, strict=True)]
    write_tar(tmp_path / "made.tar", [(f"{number:06d}", parts) for number, parts in enumerate(files)])
    assert score(str(tmp_path / "made.tar"), clip=model, device="cpu") == pytest.approx(found, abs=1e-4)
    for given in ({}, {"network": model}, {"reference": "real"}, {"clip": model, "kernel": True}):
        with refused(UsageError, "REFERENCE"):
            score(str(tmp_path / "made"), **given)


@pytest.mark.parametrize("kind", ["folder", "below a file"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(tmp_path, kind):
    place = tmp_path / "kept.npz"
    if kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"")
        place = place / "kept.npz"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"method": "semanir", "data": {"eval": {"path": "nowhere"}}}))
    with refused(UsageError if kind == "folder" else OSError, "kept.npz"):
        score("nowhere", "nowhere", "nobody/network", keep=place, device="cpu")
    with refused(UsageError if kind == "folder" else OSError, "kept.npz"):
        evaluate_checkpoint("nowhere", tmp_path / "run.yaml", output=place)
