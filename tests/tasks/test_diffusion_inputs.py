"""What a training reads: latents drawn from their posterior and of several sizes, stored texts, captions, crops."""

import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow.parquet import read_metadata
from torch.utils.data import default_collate

from hf_ext.errors import DataError, MissingColumn, UsageError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.settings import build
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_data import (
    SPREAD,
    Crops,
    View,
    bucket_sizes,
    cut_view,
    encode_posterior,
    load_autoencoder,
    nearest_bucket,
    read_row,
    to_pixels,
    write_row,
)
from hf_ext.tasks.diffusion_texts import NULL, Captions, TextEncoder
from hf_ext.tasks.precompute import precompute
from hf_ext.training import DataSource
from hf_ext.training.data import IndexedSamples, TrainingLoader
from tests.kit.refusals import refused

from .diffusion_testing import (
    MODEL,
    check_resuming,
    losses,
    make_arguments,
    rows_of,
    run,
    settings,
    write_pictures,
    write_table,
)

# Tall, square and wide, several of each.
SIZES = [(24, 12), (16, 16), (12, 24), (30, 15), (20, 20), (16, 32), (18, 18), (24, 13), (17, 16)]
LENGTH = 8


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures", side_column=SIZES)


def encode(pictures, vae, out, **changes):
    return precompute(settings(pictures, vae, **changes), out)


def task_of(vae):
    return {"image_size": 16, "vae": str(vae)}


def test_a_posterior_is_kept_and_drawn_from(tmp_path, pictures, vae):
    out = encode(pictures, vae, tmp_path / "latents", posterior=True)
    rows, autoencoder = rows_of(out), load_autoencoder(str(vae))
    plain = rows_of(encode(pictures, vae, tmp_path / "modes"))
    assert SPREAD not in plain.column_names and [row["latent"] for row in rows] == [row["latent"] for row in plain]
    # The same numbers that the autoencoder's own distribution draws, shifted and scaled as the network takes them.
    pixels = torch.rand(2, 3, 16, 16) * 2 - 1
    mean, spread = encode_posterior(autoencoder, pixels)
    torch.testing.assert_close(mean, DisentangledDiTPipeline.encode_image(autoencoder, pixels))
    drawn = autoencoder.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(0))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mean + spread * noise, (drawn - 0.3) * 0.7, atol=1e-5, rtol=1e-5)

    task = build(DisentangledDiTTask, {"image_size": 16, "vae": str(vae), "posterior": True}, "task")
    task.read_data(rows)
    task.build_model(MODEL, None)
    drawn = (task.training_sample(rows[0], np.random.default_rng(seed)) for seed in range(300))
    samples = torch.stack([sample["latents"] for sample in drawn])
    mode, kept = read_row(rows[0])[0], np.frombuffer(rows[0][SPREAD], dtype=np.float16)
    spread = torch.tensor(kept.astype(np.float32)).view(mode.shape)
    assert spread.min() > 0
    torch.testing.assert_close(samples.mean(0), mode, atol=float(spread.max()) * 0.3, rtol=0)
    torch.testing.assert_close(samples.std(0) / spread, torch.ones_like(spread), atol=0.25, rtol=0)
    # An evaluation takes the mode.
    assert torch.equal(task.training_sample(rows[0], None)["latents"], mode)
    with refused(DataError, "latent_spread", "task.post"):
        run(make_arguments(tmp_path / "never", tmp_path / "modes", task={**task_of(vae), "posterior": True}))


def test_pictures_are_drawn_from_their_posterior_too(tmp_path, pictures, vae):
    tasks = [build(DisentangledDiTTask, {**task_of(vae), "posterior": draws}, "task") for draws in (True, False)]
    batch = {"pixels": torch.rand(2, 3, 16, 16) * 2 - 1}
    for task, differs in zip(tasks, (True, False), strict=True):
        first, second = (task._clean(batch, task.posterior) for _ in range(2))
        assert torch.equal(first, second) != differs
    plain = SimpleNamespace(dtype=torch.float32, config={}, encode=lambda pixels, return_dict: (pixels,))
    with refused(UsageError, "distribution", "posterior"):
        encode_posterior(plain, torch.zeros(1, 3, 8, 8))


def test_stored_texts_train_without_the_encoder(tmp_path, pictures, vae, encoder, monkeypatch):
    texts = {"text_encoder": str(encoder), "max_text_length": LENGTH}
    out = encode(pictures, vae, tmp_path / "latents", **texts)
    rows = rows_of(out)
    assert len(rows) == 9
    # Of long offsets: a list of `binary` ends at 2 GiB a file.
    assert rows.features["text_states"] == datasets.List(datasets.Value("large_binary"))
    # Of no text in the first row of each of the three files.
    counts = [read_metadata(path).num_rows for path in sorted(out.glob("*.parquet"))]
    firsts = [sum(counts[:place]) for place in range(3) if counts[place]]
    assert len(counts) == 3 and sum(counts) == 9
    assert [number for number, row in enumerate(rows) if row[NULL] is not None] == firsts
    task = {**task_of(vae), **texts}
    model = {**MODEL, "condition_dropout": 0.5}
    calls = []
    plain = TextEncoder.states
    monkeypatch.setattr(TextEncoder, "states", lambda self, tokens: calls.append(1) or plain(self, tokens))
    made, metrics = run(make_arguments(tmp_path / "run", out, task=task, model=model))
    assert not calls and np.isfinite(metrics["loss"])
    # What is attended to is what the encoder says in the step, but for the precision that is kept.
    chosen = [rows[index] for index in (0, 1, 4)]
    stored = default_collate([made.captions.sample(row, None) for row in chosen])
    both, dropped = [], torch.tensor([False, True, False])
    for batch in (stored, default_collate([made.captions.tokens(row["text"]) for row in chosen])):
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
        both.append(made.captions.encode(made.captions.drop(batch, dropped), generators))
    torch.testing.assert_close(*both, atol=5e-3, rtol=5e-3)
    assert not torch.equal(both[0][1], made.captions.encode(stored)[1])
    # Fresh noise in the padding at every step, and the real tokens as they were.
    again = [made.captions.encode(stored) for _ in range(2)]
    real = int(stored["length"][0])
    assert 0 < real < LENGTH
    assert torch.equal(again[0][0, :real], again[1][0, :real]) and not torch.equal(again[0], again[1])
    # The pipeline samples with the encoder.
    pipeline = DisentangledDiTPipeline.from_pretrained(tmp_path / "run" / "snapshot")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(prompt="a red hen", num_inference_steps=1).images[0].size == (16, 16)
    with refused(UsageError, "8 tokens", "task.max_text_length"):
        run(make_arguments(tmp_path / "short", out, task={**task, "max_text_length": 5}))
    with refused(UsageError, "joint_attention_dim"):
        run(make_arguments(tmp_path / "wide", out, task=task, model={**MODEL, "joint_attention_dim": 16}))
    with refused(DataError, "text", "label"):
        Captions(str(encoder), LENGTH, "zeros", 0.0, {"text": 1, "label": 1}).read_data(rows)
    with refused(UsageError, "null_states"):
        Captions(str(encoder), LENGTH, "zeros", 0.0, "text").read_data(rows.select([1, 2]))
    with refused(UsageError, "task.text_encoder", "org/other"):
        Captions("org/other", LENGTH, "zeros", 0.0, "text").read_data(rows)
    Captions("moved/encoder", LENGTH, "zeros", 0.0, "text").read_data(rows)


def test_captions_of_several_lengths_are_drawn_by_their_weights(tmp_path, vae, encoder):
    short, long = ["a hen", "fish"] * 2, [["a red hen on grass", "a red hen"], ["green fish"]] * 2
    data = write_table(tmp_path / "captioned", [(16, 16)] * 4, short=short, long=long)
    texts = {"text_encoder": str(encoder), "max_text_length": LENGTH}
    task = build(DisentangledDiTTask, {"image_size": 16, **texts, "text_column": {"short": 1, "long": 3}}, "task")
    row = rows_of(data)[0]
    drawn = [task.captions.draw(row, np.random.default_rng(seed)) for seed in range(800)]
    shares = {text: sum(found[0] == text for found in drawn) / 800 for text in ("a hen", *long[0])}
    assert shares == pytest.approx({"a hen": 1 / 4, "a red hen on grass": 3 / 8, "a red hen": 3 / 8}, abs=0.06)
    assert task.captions.draw(row, None) == ("a hen", "short", 0)
    # Stored, the same draw gives the states of the same caption.
    out = encode(data, vae, tmp_path / "latents", text_column=["short", "long"], posterior=True, **texts)
    stored = rows_of(out)[0]
    for seed in range(6):
        found = task.captions.sample(stored, np.random.default_rng(seed))
        tokens = task.captions.tokens(drawn[seed][0])
        expected, lengths = task.captions.states({name: value[None] for name, value in tokens.items()})
        assert int(found["length"]) == int(lengths)
        states = found["states"][: int(lengths)].float()
        torch.testing.assert_close(states, expected[0, : int(lengths)], atol=5e-3, rtol=5e-3)
    # Drawn captions, and latents drawn from their posterior.
    texts |= {"text_column": {"short": 1, "long": 3}, "posterior": True}
    check_resuming(tmp_path, out, task={**task_of(vae), **texts})


def test_captions_that_are_none_are_refused(tmp_path, vae, encoder):
    captions = Captions(str(encoder), LENGTH, "zeros", 0.0, {"short": 1, "long": 1})
    for value in ("", "  ", None, [], ["a hen", ""], 3):
        with refused(DataError, "short"):
            captions.draw({"short": value, "long": value}, None)
    with refused(MissingColumn, "short", column="long", option="task.text_column"):
        [captions.draw({"short": "a hen"}, np.random.default_rng(seed)) for seed in range(9)]
    with refused(UsageError, "max_text_length", "513", "512"):
        TextEncoder(str(encoder), 513).pack(["a hen"], "cpu")
    data = write_table(tmp_path / "captioned", [(16, 16)] * 2, text=["a hen", ""])
    # One of two is more than may be left out; then it is, and listed.
    with refused(ValueError, "of 2 examples"):
        encode(data, vae, tmp_path / "a", text_encoder=str(encoder))
    out = encode(data, vae, tmp_path / "c", text_encoder=str(encoder), max_bad_examples=0.5)
    assert len(rows_of(out)) == 1 and len((out / "bad_examples.jsonl").read_text().splitlines()) == 1
    with refused(MissingColumn, "text", column="long", option="text_column"):
        encode(data, vae, tmp_path / "b", text_encoder=str(encoder), text_column=["long"])


def test_latents_of_several_sizes_are_read_in_batches_of_one(tmp_path, pictures, vae, capsys):
    out = encode(pictures, vae, tmp_path / "latents", max_ratio=2.0, bucket_step=4)
    task, metrics = check_resuming(tmp_path, out, task=task_of(vae))
    assert np.isfinite(metrics["loss"]) and len(losses(tmp_path / "whole")) == 4
    rows, source = rows_of(out), DataSource(str(out))
    groups = task.read_data(rows)
    assert sorted(np.bincount(groups).tolist()) == [2, 3, 4]
    loader = iter(TrainingLoader(rows, source, task.training_sample, 0, 2, 0, 0, 1, groups=groups))
    shapes = {tuple(next(loader)["latents"].shape) for _ in range(12)}
    assert {shape[0] for shape in shapes} == {2} and len(shapes) == 3
    # Of 3, 4 and 2 pictures: batches of 3 fill up 3, 6 and 3 places.
    capsys.readouterr()
    changes = {"num_train_epochs": 1, "per_device_train_batch_size": 3}
    run(make_arguments(tmp_path / "run", out, task=task_of(vae), **changes))
    assert len(losses(tmp_path / "run")) == 4
    assert "1 of 3 groups of examples" in (said := "".join(capsys.readouterr())) and "their 2 examples" in said


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("size", [8, 24, [16, 32]])
def test_latents_of_another_size_than_the_models_are_refused(tmp_path, vae, size, streaming):
    out = encode(write_pictures(tmp_path / "pictures", 4, size=(24, 24)), vae, tmp_path / "latents")
    task = {"image_size": size, "vae": str(vae)}
    model = {**MODEL, "num_classes": 3}
    arguments = make_arguments(tmp_path / "run", out, streaming=streaming, task=task, model=model)
    with refused(ValueError, "[8, 8]", "sample_size", "image_size"):
        run(arguments)


# Of latents: all in the data, and one that a training reads; the last is of none like the model's.
READ = [
    *(([64, 96], [size], size, None) for size in ([64, 64], [80, 48], [56, 72])),
    ([32, 32], [[32, 32], [64, 64]], [64, 64], None),
    ([32, 32], [[64, 64]], [64, 64], "32 × 32"),
    ([64, 96], [[32, 32]], [32, 32], "78 × 78"),
]


@pytest.mark.parametrize(("own", "sizes", "size", "told"), READ)
def test_latents_of_about_the_models_area_are_read(own, sizes, size, told):
    view = View(np.zeros((8, 8, 3)), (8, 8), (0, 0), False)
    row = lambda size: {**write_row(torch.zeros(3, *size), view), "label": 1}  # noqa: E731
    data = datasets.Dataset.from_list([row(each) for each in sizes])
    task = build(DisentangledDiTTask, {"image_size": own}, "task")
    task.read_data(data)
    task.build_model({**MODEL, "num_classes": 2}, None)
    read = lambda: task.training_sample(row(size), np.random.default_rng(0))  # noqa: E731
    if told is None:
        assert list(read()["latents"].shape) == [3, *size]
    else:
        with refused(DataError, "--size", told, str(own)):
            read()


def test_printing_inks_are_left_out_of_a_training_and_evaluated_as_pillow_reads_them():
    inks = Image.new("RGB", (8, 8), "teal").convert("CMYK")
    task = build(DisentangledDiTTask, {"image_size": 8}, "task")
    model = task.build_model({**MODEL, "num_classes": 2}, None)
    rows = [{"image": picture, "label": 0} for picture in (inks, inks.convert("RGB"))]
    with refused(DataError, "CMYK"):
        task.training_sample(rows[0], np.random.default_rng(0))
    first, second = task.evaluate_batch(model, rows, [0, 0])
    assert first["loss"] == pytest.approx(second["loss"])


# Crops, mirroring and their controls; buckets; batches of one group each


def ramp(height, width):
    """Red tells the column, green the row."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width)[None], np.arange(height)[:, None]
    return Image.fromarray(pixels)


def cut_often(picture, size, crops, times):
    return [cut_view(picture, size, 3, crops, np.random.default_rng(seed)) for seed in range(times)]


@pytest.mark.parametrize("seed", range(12))
def test_controls_say_where_the_part_was(seed):
    """A picture that need not be resized: the part is found again at the place that the controls name."""
    view = cut_view(ramp(40, 64), (40, 24), 3, Crops(flip=0.5), np.random.default_rng(seed))
    (top, left), whole = view.crop, np.asarray(ramp(40, 64))
    # Crop coordinates are those of the picture after mirroring: left' = W - (left + W_crop).
    shown = whole[:, ::-1] if view.flip else whole
    np.testing.assert_array_equal(view.pixels, shown[top : top + 40, left : left + 24])
    controls = {name: value.tolist() for name, value in view.controls.items()}
    assert controls.pop("aspect_ratio") == [pytest.approx(math.log(64 / 40))]
    sizes = {"original_size": [40, 64], "target_size": [40, 24]}
    assert controls == {**sizes, "crop": [top, left], "flip": [float(view.flip)]}


def test_places_and_mirroring_are_drawn_and_the_middle_is_not():
    views = cut_often(ramp(40, 64), (40, 24), Crops(), 200)
    assert {view.crop[1] for view in views} == set(range(41))
    assert 70 < sum(view.flip for view in views) < 130
    never = cut_often(ramp(40, 64), (40, 24), Crops(False, 0.0), 9)
    assert {(view.crop, view.flip) for view in never} == {((0, 20), False)}
    middle = cut_view(ramp(40, 64), (40, 24), 3, Crops(), None)
    np.testing.assert_array_equal(middle.pixels, never[0].pixels)


def test_global_crops_see_the_whole_short_side_and_local_ones_keep_the_scale():
    crops = Crops(flip=0.0, local_prob=0.5, local_size=64)
    views = cut_often(ramp(128, 200), (32, 32), crops, 300)
    # A picture of 128 x 200 is resized to 32 x 50 for a global crop, and to 64 x 100 for a local one.
    spans = [(int(view.pixels[..., 1].max()) - int(view.pixels[..., 1].min())) for view in views]
    is_local = [span < 80 for span in spans]
    assert 110 < sum(is_local) < 190
    for view, local in zip(views, is_local, strict=True):
        assert view.crop[0] <= (32 if local else 0) and view.crop[1] <= (68 if local else 18)
        assert view.original_size == (128, 200) and view.target_size == (32, 32)
    assert max(view.crop[1] for view in views) > 60


def test_smaller_originals_are_told_and_lack_what_is_fine():
    noise = Image.fromarray(np.random.default_rng(0).integers(256, size=(32, 48, 3), dtype=np.uint8))
    crops = Crops(flip=0.0, shrink_prob=0.5, shrink_size=8)
    views = cut_often(noise, (32, 32), crops, 300)
    sides = np.array([view.original_size[0] for view in views])
    assert set(sides) == set(range(8, 33)) and 110 < (sides < 32).sum() < 180
    for view in views:
        assert view.original_size[1] == round(1.5 * view.original_size[0]) and view.pixels.shape == (32, 32, 3)
        assert view.crop[0] == 0 and view.crop[1] <= 17
    fine = [np.diff(view.pixels.astype(float), axis=1) for view in views]
    energies = np.array([np.square(steps).mean() for steps in fine])
    assert energies[sides <= 16].max() < 0.2 * energies[sides == 32].min()
    again = cut_view(noise, (32, 32), 3, crops, np.random.default_rng(7))
    np.testing.assert_array_equal(again.pixels, views[7].pixels)
    # A place in the picture of the later training, whatever the original; no picture is made larger for it.
    local = Crops(flip=0.0, local_prob=1.0, local_size=48, shrink_prob=1.0, shrink_size=8)
    crops_seen = {view.crop for view in cut_often(noise, (32, 32), local, 200)}
    assert {top for top, _ in crops_seen} == set(range(17)) and max(left for _, left in crops_seen) > 36
    assert cut_view(Image.new("L", (7, 5)), (16, 16), 1, local, np.random.default_rng(0)).original_size == (5, 7)
    assert cut_view(noise, (32, 32), 3, local, None).original_size == (32, 48)


def test_small_and_grey_pictures_are_enlarged():
    view = cut_view(Image.new("L", (7, 5), 200), (16, 16), 1, Crops(), np.random.default_rng(0))
    assert view.pixels.shape == (16, 16, 1) and view.original_size == (5, 7) and set(view.pixels.flat) == {200}
    assert cut_view(Image.new("L", (7, 5)), (16, 16), 3, Crops(), None).pixels.shape == (16, 16, 3)
    pixels = to_pixels([view])
    assert pixels.shape == (1, 1, 16, 16) and torch.allclose(pixels, torch.full_like(pixels, 200 / 127.5 - 1))
    for mode, wanted in (("I;16", "8 bits"), ("F", "8 bits"), ("CMYK", "RGB")):
        with refused(DataError, mode, wanted):
            cut_view(Image.new(mode, (9, 9)), (4, 4), 1, Crops(), None)
    # A transparent picture is cut on white.
    colours = np.full((8, 8, 4), (255, 0, 255, 0), dtype=np.uint8)
    colours[4:] = (0, 128, 0, 255)
    view = cut_view(Image.fromarray(colours), (8, 8), 3, Crops(), None)
    assert (view.pixels[:4] == 255).all() and (view.pixels[4:] == (0, 128, 0)).all()


@pytest.mark.parametrize(("side", "step", "ratio"), [(512, 64, 2.0), (256, 16, 3.0), (64, 8, 1.0)])
def test_buckets_have_about_one_area(side, step, ratio):
    buckets = bucket_sizes(side, step, ratio)
    assert (side, side) in buckets and len(set(buckets)) == len(buckets)
    assert {(width, height) for height, width in buckets} == set(buckets)
    for height, width in buckets:
        assert height % step == width % step == 0
        assert side * side * 0.7 < height * width <= side * side
        assert max(height / width, width / height) <= ratio
    ratios = [width / height for height, width in buckets]
    assert ratios == sorted(ratios)
    # A picture of a bucket's own shape goes there, whatever its size.
    assert all(nearest_bucket((2 * height, 2 * width), buckets) == (height, width) for height, width in buckets)
    with refused(UsageError, "multiple"):
        bucket_sizes(100, 64, 2.0)


def test_a_latent_survives_its_row():
    view = cut_view(ramp(30, 50), (16, 24), 3, Crops(flip=1.0), np.random.default_rng(1))
    latent = torch.randn(4, 2, 3)
    again, controls = read_row({**write_row(latent, view), "label": 3})
    assert torch.equal(again, latent.half().float())
    assert all(np.array_equal(controls[name], value) for name, value in view.controls.items())
    with refused(DataError, "crop"):
        read_row({name: value for name, value in write_row(latent, view).items() if name != "crop"})
    for name, value in (("original_size", [0, 5]), ("original_size", [5]), ("crop", [])):
        with refused(DataError, name):
            read_row({**write_row(latent, view), name: value})


def test_batches_are_of_one_group_and_every_example_comes_once_an_epoch():
    groups = np.array([0] * 7 + [1] * 4 + [2] * 1)
    samples, again = (IndexedSamples([*range(12)], lambda row, generator: row, 3, groups, 3) for _ in range(2))
    # 7 in three batches, 4 in two, 1 in one.
    assert samples.epoch_length == 18
    epochs = [[samples[epoch * 18 + offset][0] for offset in range(18)] for epoch in range(4)]
    for epoch in epochs:
        assert set(epoch) == set(range(12))
        assert all(len({groups[row] for row in epoch[start : start + 3]}) == 1 for start in range(0, 18, 3))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Read from the middle, the order is the same.
    assert [again[20 + offset][0] for offset in range(9)] == [samples[20 + offset][0] for offset in range(9)]


def test_batches_stay_of_one_group_where_examples_are_bad():
    groups = np.array([0] * 5 + [1] * 2 + [2] * 1)
    data = datasets.Dataset.from_dict({"row": range(8)})
    # All of group 1, the only one of group 2, and so much of group 0 that whole batches are bad.
    broken = {1, 2, 3, 5, 6, 7}

    def transform(example, generator):
        if example["row"] in broken:
            raise ValueError("broken")
        return example["row"]

    samples = IndexedSamples(data, transform, 3, groups, 2, bad_allowed=100)
    for position in range(0, 40, 2):
        batch = [samples[position], samples[position + 1]]
        assert {row for row, _ in batch} <= {0, 4}
        # An example is counted once, however often it fills its batch.
        assert all(len({row["example"] for row in bad}) == len(bad) for _, bad in batch)
    broken |= {0, 4}
    with refused(ValueError, "broken"):
        samples[0]
