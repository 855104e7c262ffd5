"""What a training reads: latents drawn from their posterior and of several sizes, stored texts, captions."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from pyarrow.parquet import read_metadata

from hf_ext.errors import DataError, MissingColumn, UsageError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.settings import build
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_latents import SPREAD, encode_posterior, load_autoencoder, read_row
from hf_ext.tasks.diffusion_texts import NULL, Captions, TextEncoder
from hf_ext.tasks.precompute import precompute
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
    drawn = [task.training_sample(rows[0], np.random.default_rng(seed)) for seed in range(300)]
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
    samples = [made.captions.sample(row, None) for row in (rows[0], rows[1], rows[4])]
    stored = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    tokens = [made.captions.tokens(rows[index]["text"]) for index in (0, 1, 4)]
    fresh = {name: torch.stack([found[name] for found in tokens]) for name in tokens[0]}
    dropped = torch.tensor([False, True, False])
    both = []
    for batch in (stored, fresh):
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


def test_views_are_the_same_after_an_interruption(tmp_path, pictures):
    crops = {"local_prob": 0.3, "local_size": 24, "shrink_prob": 0.5, "shrink_size": 4}
    check_resuming(tmp_path, pictures, task={"image_size": 16, "crops": crops})


def test_latents_of_several_sizes_are_read_in_batches_of_one(tmp_path, pictures, vae, capsys):
    out = encode(pictures, vae, tmp_path / "latents", max_ratio=2.0, bucket_step=4)
    task, metrics = check_resuming(tmp_path, out, task=task_of(vae))
    assert np.isfinite(metrics["loss"]) and len(losses(tmp_path / "whole")) == 4
    assert sorted(np.bincount(task.read_data(rows_of(out))).tolist()) == [2, 3, 4]
    # Of 3, 4 and 2 pictures: batches of 3 fill up 3, 6 and 3 places.
    capsys.readouterr()
    changes = {"num_train_epochs": 1, "per_device_train_batch_size": 3}
    run(make_arguments(tmp_path / "run", out, task=task_of(vae), **changes))
    assert len(losses(tmp_path / "run")) == 4
    assert "1 of 3 groups of examples" in (said := "".join(capsys.readouterr())) and "their 2 examples" in said
