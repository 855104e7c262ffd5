"""The router: the nearest centroid, kept in the artifact, used for `task_ids="auto"`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from hf_ext.emr import EMRModel
from hf_ext.emr import model as emr_model
from hf_ext.emr.routing import ROUTER_FILE, TaskRouter
from hf_ext.merging import merge_checkpoints
from tests.emr.emr_testing import tiny_bert, tiny_semanir, tiny_unet


def test_the_nearest_centroid_in_units_of_the_spread():
    # The first feature varies by 10 inside a task and says little; the second by 0.1, and decides.
    features = {"x": torch.tensor([[-10.0, 0.0], [10.0, 0.2]]), "y": torch.tensor([[-5.0, 1.0], [15.0, 1.2]])}
    router = TaskRouter.fit(features)
    torch.testing.assert_close(router.centroids, torch.tensor([[0.0, 0.1], [5.0, 1.1]]))
    torch.testing.assert_close(router.scale, torch.tensor([10.0, 0.1]))
    assert router.predict(torch.tensor([[5.0, 0.1], [0.0, 1.0], [100.0, 0.3]])) == ["x", "y", "x"]


def test_one_sample_of_each_task_is_enough():
    router = TaskRouter.fit({"x": torch.zeros(1, 3), "y": torch.ones(1, 3)})
    assert router.predict(torch.tensor([[0.4, 0.4, 0.4], [0.6, 0.6, 0.6]])) == ["x", "y"]


def test_saved_and_loaded(tmp_path: Path):
    router = TaskRouter.fit({"x": torch.randn(4, 3), "ü": torch.randn(5, 3) + 4})
    assert router.save(tmp_path) == tmp_path / ROUTER_FILE
    loaded = TaskRouter.load(tmp_path)
    assert loaded.tasks == ["x", "ü"]
    assert torch.equal(loaded.centroids, router.centroids)
    assert torch.equal(loaded.scale, router.scale)
    assert [path.name for path in tmp_path.iterdir()] == [ROUTER_FILE]


@pytest.mark.parametrize(
    "features",
    [{}, {"x": torch.zeros(0, 3)}, {"x": torch.zeros(3)}, {"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)}],
    ids=["none", "empty", "flat", "uneven"],
)
def test_features_that_do_not_fit(features):
    with pytest.raises(ValueError, match=r"\(samples, features\) is needed"):
        TaskRouter.fit(features)


def test_files_that_are_no_router(tmp_path: Path):
    with pytest.raises(ValueError, match="fit a router first, or name the tasks"):
        TaskRouter.load(tmp_path)
    path = tmp_path / ROUTER_FILE
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="not a router"):
        TaskRouter.load(tmp_path)
    tensors = {"centroids": torch.zeros(2, 3), "scale": torch.ones(3)}
    for tasks, message in (
        ("[1, 2]", "the names of the tasks are"),
        ('["x"]', r"a router of 1 tasks has centroids \(2, 3\)"),
    ):
        save_file(tensors, path, metadata={"tasks": tasks})
        with pytest.raises(ValueError, match=message):
            TaskRouter.load(tmp_path)
    with pytest.raises(ValueError, match=r"\(samples, 3\) is needed"):
        TaskRouter(["x", "y"], torch.zeros(2, 3), torch.ones(3)).predict(torch.zeros(2, 4))


def sentences(low: int, high: int, count: int, seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(low, high, (count, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(count, 6, dtype=torch.long)
    mask[0, 3:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def test_samples_without_a_task_are_routed(tmp_path: Path):
    base = tiny_bert(tmp_path / "base")
    tasks = {n: str(tiny_bert(tmp_path / n, s, base=base, num_labels=s + 1)) for s, n in enumerate("ab", 1)}
    config = {"base": str(base), "tasks": tasks}
    emr = EMRModel.from_pretrained(merge_checkpoints(config, tmp_path / "merged", progress=False).path)
    one, two = sentences(4, 10, 4, 1), sentences(20, 28, 4, 2)
    both = {name: torch.cat([one[name], two[name]]) for name in one}
    with pytest.raises(ValueError, match="fit a router first"):
        emr(**both, task_ids="auto")
    emr.fit_router({"a": sentences(4, 10, 16, 3) | {"labels": torch.zeros(16)}, "b": sentences(20, 28, 16, 4)})
    chosen = ["a"] * 4 + ["b"] * 4
    assert emr.route(**both) == chosen
    output = emr(**both, task_ids="auto")
    assert [len(logits) for logits in output.logits] == [2] * 4 + [3] * 4
    again = EMRModel.from_pretrained(tmp_path / "merged")
    assert again.route(**both) == chosen
    # Padding is no part of the mean.
    padded = both | {"input_ids": both["input_ids"].masked_fill(both["attention_mask"] == 0, 25)}
    torch.testing.assert_close(emr.features(padded), emr.features(both))
    # Features are the base's.
    encoder = AutoModel.from_pretrained(base).eval()
    with torch.no_grad():
        hidden = encoder(**both).last_hidden_state
    weights = both["attention_mask"][..., None]
    torch.testing.assert_close(emr.features(both), (hidden * weights).sum(1) / weights.sum(1))
    with pytest.raises(ValueError, match=r"examples of \['c'\]"):
        emr.fit_router({"c": one})
    with pytest.raises(ValueError, match=r"no examples of \['b'\]; a router that is saved needs some of \['a', 'b'\]"):
        emr.fit_router({"a": one})
    assert emr.fit_router({"a": one}, save=False).tasks == emr.route(**one)[:1] == ["a"]
    # Of tasks that were added or removed since.
    for tasks in ("a", "abc", "ac"):
        other = tmp_path / f"tasks-{tasks}"
        shutil.copytree(tmp_path / "merged", other)
        TaskRouter(list(tasks), torch.zeros(len(tasks), 16), torch.ones(16)).save(other)
        with pytest.raises(ValueError, match=r"tells apart .*, the artifact has \['a', 'b'\]: call fit_router again"):
            EMRModel.from_pretrained(other, base=base)(**both, task_ids="auto")
    # A commit in the cache of the Hub is not changed, though it is a folder.
    cached = tmp_path / "models--me--merged" / "snapshots" / "0123"
    shutil.copytree(tmp_path / "merged", cached)
    (cached / ROUTER_FILE).unlink()
    elsewhere = EMRModel.from_pretrained(cached, base=base)
    elsewhere.fit_router({"a": one, "b": two})
    assert elsewhere.route(**both) == chosen and not (cached / ROUTER_FILE).exists()


def test_images_and_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = tiny_semanir(tmp_path / "base")
    tasks = {name: str(tiny_semanir(tmp_path / name, seed, base=base)) for seed, name in enumerate("ab", 1)}
    config = {"base": str(base), "tasks": tasks}
    emr = EMRModel.from_pretrained(merge_checkpoints(config, tmp_path / "merged", progress=False).path)
    dark, light = torch.rand(3, 3, 8, 8) * 0.2, 0.8 + torch.rand(3, 3, 8, 8) * 0.2
    emr.fit_router({"a": {"pixel_values": dark}, "b": {"pixel_values": light}}, save=False)
    assert not (tmp_path / "merged" / ROUTER_FILE).exists()
    assert emr.route(pixel_values=torch.full((1, 3, 8, 8), 0.1)) == ["a"]
    assert emr.route(pixel_values=torch.full((1, 3, 8, 8), 0.9)) == ["b"]
    # The base follows the model.
    emr.to(torch.float64)
    assert emr.route(pixel_values=torch.full((1, 3, 8, 8), 0.9, dtype=torch.float64)) == ["b"]
    devices = []
    monkeypatch.setattr(emr_model, "BaseFeatures", lambda *_, device, **__: devices.append(device) or dict)
    emr.to("meta").features({})
    assert devices == [torch.device("meta")]
    monkeypatch.undo()
    base = tiny_unet(tmp_path / "unet")
    config = {"base": str(base), "tasks": {"a": str(tiny_unet(tmp_path / "unet-a", 1, base=base))}}
    unet = EMRModel.from_pretrained(merge_checkpoints(config, tmp_path / "unets", progress=False).path)
    with pytest.raises(ValueError, match="the router needs a transformers model, this is one of diffusers"):
        unet.fit_router({"a": {}})
