"""What a training reads: latents drawn from their posterior, stored texts, captions of several lengths, buckets."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from pyarrow.parquet import read_metadata

from hf_ext.data.opening import match_classes
from hf_ext.errors import DataError, MissingColumn, UsageError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.settings import SettingsError, build
from hf_ext.tasks import diffusion_texts
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_buckets import group_pictures
from hf_ext.tasks.diffusion_latents import SPREAD, encode_posterior, load_autoencoder, read_row
from hf_ext.tasks.diffusion_texts import NULL, Captions, TextEncoder
from hf_ext.tasks.precompute import precompute
from hf_ext.training.data import IndexedSamples, TrainingLoader
from tests.kit.refusals import refused

from .diffusion_testing import (
    CLASSES,
    MODEL,
    check_resuming,
    losses,
    make_arguments,
    rows_of,
    run,
    settings,
    write_pictures,
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
    samples = torch.stack(
        [task.training_sample(rows[0], np.random.default_rng(seed))["latents"] for seed in range(300)]
    )
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
    with refused(SettingsError, "task.vae"):
        build(DisentangledDiTTask, {"posterior": True}, "task")


def test_an_autoencoder_without_a_distribution_has_no_posterior():
    class Plain(torch.nn.Module):
        dtype, config = torch.float32, {}

        def encode(self, pixels, return_dict):
            return (pixels,)

    with refused(UsageError, "distribution", "posterior"):
        encode_posterior(Plain(), torch.zeros(1, 3, 8, 8))


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
    samples = [made.captions.sample(row, None) for row in (rows[0], rows[1], rows[4])]
    stored = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    tokens = [made.captions.tokens(rows[index]["text"]) for index in (0, 1, 4)]
    fresh = {name: torch.stack([found[name] for found in tokens]) for name in tokens[0]}
    dropped = torch.tensor([False, True, False])
    both = [
        made.captions.encode(
            made.captions.drop(batch, dropped), [torch.Generator().manual_seed(seed) for seed in range(3)]
        )
        for batch in (stored, fresh)
    ]
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


def test_captions_are_read_without_the_encoder(encoder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the encoder is loaded")

    monkeypatch.setattr(diffusion_texts.AutoModelForTextEncoding, "from_pretrained", refuse)
    assert TextEncoder(str(encoder), LENGTH).tokens("a red hen")["input_ids"].shape == (LENGTH,)


def test_shifted_timesteps_know_the_size_of_the_pictures(vae):
    task = build(DisentangledDiTTask, {"vae": str(vae), "timesteps": {"distribution": "shifted"}}, "task")
    with refused(DataError, "task.image_size"):
        task.build_model({**MODEL, "sample_size": 64, "in_channels": 4, "num_classes": 3}, None)


def captioned(folder, **columns):
    """A few pictures with these columns."""
    folder.mkdir()
    count = len(next(iter(columns.values())))
    pixels = np.random.default_rng(0).integers(256, size=(count, 16, 16, 3), dtype=np.uint8)
    kinds = {
        name: datasets.List(datasets.Value("string")) if isinstance(value[0], list) else datasets.Value("string")
        for name, value in columns.items()
    }
    features = datasets.Features({"image": datasets.Image(), **kinds})
    rows = {"image": [Image.fromarray(picture) for picture in pixels], **columns}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / "train.parquet"))
    return folder


def test_captions_of_several_lengths_are_drawn_by_their_weights(tmp_path, vae, encoder):
    short, long = ["a hen", "fish"] * 2, [["a red hen on grass", "a red hen"], ["green fish"]] * 2
    data = captioned(tmp_path / "captioned", short=short, long=long)
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
        expected, lengths = task.captions.states(
            {name: value[None] for name, value in task.captions.tokens(drawn[seed][0]).items()}
        )
        assert int(found["length"]) == int(lengths)
        torch.testing.assert_close(
            found["states"][: int(lengths)].float(), expected[0, : int(lengths)], atol=5e-3, rtol=5e-3
        )
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
    for columns in ({}, {"short": 0}, {"short": -1}, {"short": None}, {"short": "much"}):
        with refused(SettingsError, "above 0"):
            build(DisentangledDiTTask, {"text_column": columns}, "task")
    data = captioned(tmp_path / "captioned", text=["a hen", ""])
    # One of two is more than may be left out; then it is, and listed.
    with refused(ValueError, "of 2 examples"):
        encode(data, vae, tmp_path / "a", text_encoder=str(encoder))
    out = encode(data, vae, tmp_path / "c", text_encoder=str(encoder), max_bad_examples=0.5)
    assert len(rows_of(out)) == 1 and len((out / "bad_examples.jsonl").read_text().splitlines()) == 1
    with refused(MissingColumn, "text", column="long", option="text_column"):
        encode(data, vae, tmp_path / "b", text_encoder=str(encoder), text_column="long")


def test_views_are_the_same_after_an_interruption(tmp_path, pictures):
    crops = {"local_prob": 0.3, "local_size": 24, "shrink_prob": 0.5, "shrink_size": 4}
    check_resuming(tmp_path, pictures, task={"image_size": 16, "crops": crops})


BUCKETS = {"image_size": 16, "buckets": {"max_ratio": 2.0, "step": 4}}


def test_pictures_go_into_buckets_as_they_are_read(tmp_path, pictures):
    task, metrics = check_resuming(tmp_path, pictures, task=BUCKETS)
    assert np.isfinite(metrics["loss"]) and len(losses(tmp_path / "whole")) == 4
    rows = rows_of(pictures)
    groups = task.read_data(rows)
    assert {task.sizes[group] for group in groups} == {(20, 12), (16, 16), (12, 20)}
    for row, group, (height, width) in zip(rows, groups, SIZES, strict=True):
        sample = task.training_sample(row, np.random.default_rng(0))
        assert tuple(sample["pixels"].shape[1:]) == task.sizes[group]
        assert sample["controls"]["original_size"].tolist() == [height, width]
    source = make_arguments(tmp_path / "run", pictures).data_arguments.train_source
    loader = iter(TrainingLoader(rows, source, task.training_sample, 0, 2, 0, 0, 1, groups=groups))
    assert len({tuple(next(loader)["pixels"].shape) for _ in range(12)}) == 3


def test_buckets_know_turned_and_broken_pictures(tmp_path):
    kinds = datasets.Features({"image": datasets.Image(decode=False)})
    picture, turned = Image.new("RGB", (40, 20)), Image.Exif()
    turned[274] = 6
    picture.save(tmp_path / "wide.png")
    picture.save(tmp_path / "turned.jpg", exif=turned)
    files = [{"bytes": None, "path": str(tmp_path / "wide.png")}]
    files += [{"bytes": (tmp_path / "turned.jpg").read_bytes(), "path": None}, {"bytes": b"none", "path": None}, None]
    data = datasets.Dataset.from_dict({"image": files}, features=kinds)
    assert group_pictures(data, "image", [(32, 16), (16, 16), (16, 32)]).tolist() == [2, 0, 0, 0]
    assert data.cast_column("image", datasets.Image())[1]["image"].size == (20, 40)
    with refused(MissingColumn, "image", column="photo", option="task.image_column"):
        group_pictures(data, "photo", [(16, 16)])


def test_sizes_are_read_without_decoding(tmp_path, monkeypatch):
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "head.png", exif=turned)
    content = (tmp_path / "head.png").read_bytes()
    # The chunk with its length before it and its sum behind it, moved behind the pixels.
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    behind = content[:start] + content[end:-12] + content[start:end] + content[-12:]
    Image.new("RGB", (40, 20)).save(tmp_path / "plain.png")
    files = [{"bytes": found, "path": None} for found in (content, behind, (tmp_path / "plain.png").read_bytes())]
    features = datasets.Features({"image": datasets.Image()})
    data = datasets.Dataset.from_dict({"image": files}, features=features)
    assert [row["image"].size for row in data] == [(20, 40), (20, 40), (40, 20)]
    loaded, load = [], PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: loaded.append(1) or load(self))
    assert group_pictures(data, "image", [(32, 16), (16, 16), (16, 32)]).tolist() == [0, 0, 2]
    # That with words behind its pixels alone.
    assert len(loaded) == 1


def test_a_picture_that_came_back_has_its_bucket(tmp_path):
    picture, path = Image.new("RGB", (40, 20)), tmp_path / "late.png"
    picture.save(tmp_path / "wide.png")
    path.write_bytes(b"none")
    files = [{"bytes": None, "path": str(tmp_path / name)} for name in ("wide.png", "late.png")]
    data = datasets.Dataset.from_dict({"image": files}, features=datasets.Features({"image": datasets.Image()}))
    assert group_pictures(data, "image", [(32, 16), (16, 16), (16, 32)]).tolist() == [2, 2]
    picture.rotate(90, expand=True).save(path)
    assert group_pictures(data, "image", [(32, 16), (16, 16), (16, 32)]).tolist() == [2, 0]


def test_a_broken_picture_among_buckets_is_left_out(tmp_path):
    pictures = write_pictures(tmp_path / "pictures", side_column=[(16, 16)] * 3)
    rows = rows_of(pictures).cast_column("image", datasets.Image(decode=False)).to_list()
    rows[1]["image"] = {"bytes": b"none", "path": "broken.png"}
    broken = datasets.Dataset.from_list(rows, features=rows_of(pictures).features)
    task = build(DisentangledDiTTask, BUCKETS, "task")
    groups = task.read_data(broken)
    task.build_model(MODEL, None)
    samples = IndexedSamples(broken, task.training_sample, 0, groups, 2, bad_allowed=1)
    read = [samples[position] for position in range(2 * samples.epoch_length)]
    assert {sample["pixels"].shape for sample, _ in read} == {(3, 16, 16)}
    assert {row["example"] for _, bad in read for row in bad} == {"1"}


def test_an_epoch_of_buckets_is_counted_whole(tmp_path, pictures, capsys):
    # Of 3, 4 and 2 pictures: batches of 3 fill up 3, 6 and 3 places.
    changes = {"num_train_epochs": 1, "per_device_train_batch_size": 3}
    run(make_arguments(tmp_path / "run", pictures, task=BUCKETS, **changes))
    assert len(losses(tmp_path / "run")) == 4
    assert "1 of 3 groups of examples" in (said := "".join(capsys.readouterr())) and "their 2 examples" in said


def test_buckets_are_refused_where_they_cannot_be(tmp_path, pictures, vae):
    with refused(UsageError, "stream"):
        run(make_arguments(tmp_path / "a", pictures, True, task=BUCKETS))
    out = encode(pictures, vae, tmp_path / "latents")
    with refused(UsageError, "latents"):
        run(make_arguments(tmp_path / "b", out, task={**task_of(vae), "buckets": {"step": 4}}))
    with refused(UsageError, "task.buckets.step"):
        run(make_arguments(tmp_path / "c", pictures, task=BUCKETS, model={**MODEL, "patch_size": 8}))
    for task, words in (
        ({"image_size": [16, 8], "buckets": {}}, "give task.image_size as one side"),
        ({"image_size": 16, "buckets": {"max_ratio": 0.5}}, "a finite ratio of at least 1"),
        ({"image_size": 100, "buckets": {}}, "multiple of 64"),
        ({"image_size": 64, "buckets": {"ratio": 2}}, "unknown key 'ratio' in section 'task.buckets'"),
    ):
        with pytest.raises(ValueError, match=words):
            build(DisentangledDiTTask, task, "task")


def test_classes_of_an_evaluation_go_by_their_names_and_rows_need_pictures(tmp_path, pictures):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["emu", "cat"])}
    columns = {"image": [Image.new("RGB", (16, 16))] * 3, "label": [0, 1, 0]}
    other = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    task = build(DisentangledDiTTask, {"image_size": 16}, "task")
    task.read_data(rows_of(pictures))
    assert task.known_classes == CLASSES
    matched = match_classes(other, task)
    assert [CLASSES[label] for label in matched["label"]] == ["emu", "cat", "emu"]
    with refused(DataError, "bird"):
        match_classes(other.cast_column("label", datasets.ClassLabel(names=["cat", "bird"])), task)
    task.build_model(MODEL, None)
    with refused(DataError, "image"):
        task.training_sample({"image": None, "label": 0}, np.random.default_rng(0))
