"""Data as people have them: patterns, lists, mixtures, compressed texts, sound files, data sets in memory."""

import gzip
import io
import itertools
import json
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest

from hf_ext.data.bad_examples import BadExamples
from hf_ext.data.files import read_recording
from hf_ext.data.opening import SourceError, open_source
from hf_ext.errors import DataError
from hf_ext.settings import SettingsError
from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.training import DataArguments, DataSource, evaluate
from hf_ext.training.arguments import build
from hf_ext.training.data import TrainingLoader
from hf_ext.training.state import RunFolder
from tests.kit.own_data import write_classes, write_files
from tests.kit.refusals import refused
from tests.training.tiny import SIDE, TinyTask, make_arguments, run, write_images

from .odd_data import write

soundfile = pytest.importorskip("soundfile")


def texts(source):
    return [row["text"] for row in open_source(source)]


@pytest.mark.parametrize("streaming", [False, True])
def test_patterns_lists_and_compressed_files_are_one_data_set(tmp_path, streaming):
    one = write(tmp_path / "a" / "1.jsonl.gz", [{"text": "a"}, {"text": "b"}])
    two = write(tmp_path / "a" / "2.jsonl.gz", [{"text": "c"}])
    write_files(tmp_path, {"lines.txt": "d\ne\n", "table.csv": "words,more\nf,1\n"})
    assert texts(DataSource(str(tmp_path / "a" / "*.gz"), streaming=streaming)) == ["a", "b", "c"]
    assert texts(DataSource([two, one], streaming=streaming)) == ["c", "a", "b"]
    table = {"path": str(tmp_path / "table.csv"), "rename_columns": {"words": "text"}}
    everything = DataSource([str(tmp_path / "a"), str(tmp_path / "lines.txt"), table], streaming=streaming)
    assert texts(everything) == ["a", "b", "c", "d", "e", "f"]
    if not streaming:
        # What only one part has is left out; the columns of streamed texts are not known beforehand.
        assert open_source(everything).column_names == ["text"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_follows_its_weights_and_holds_everything(tmp_path, streaming):
    few = write(tmp_path / "few.jsonl", [{"text": f"few {row}"} for row in range(10)])
    many = write(tmp_path / "many.jsonl", [{"text": f"many {row}"} for row in range(300)])
    source = DataSource([{"path": few, "weight": 1}, {"path": many, "weight": 3}], streaming=streaming)
    found = Counter(texts(source))
    assert len(found) == 310
    share = sum(count for text, count in found.items() if text.startswith("few")) / found.total()
    assert share == pytest.approx(0.25, abs=0.06)
    # Without weights nothing is repeated.
    assert Counter(texts(DataSource([few, many], streaming=streaming))).most_common(1)[0][1] == 1


def test_a_list_that_cannot_be_used_is_refused_in_words():
    for path, said in (
        *[([], "path is empty"), ([3], "path"), ([{"path": "a", "weight": 0}], "weight must be more than 0")],
        ([{"path": "a", "wait": 1}], r"unknown key 'wait' in section 'path\[0\]'. Did you mean 'weight'"),
        ([{"path": "a", "streaming": True}], "streaming and shuffle_buffer are set for the list"),
    ):
        with pytest.raises(ValueError, match=said):
            build(DataSource, {"path": path})


def packed() -> bytes:
    """An archive with one text."""
    with zipfile.ZipFile(whole := io.BytesIO(), "w") as archive:
        archive.writestr("a.txt", "a" * 100)
    return whole.getvalue()


BROKEN = {
    "cut.zip": packed()[:-30],
    "cut.tar.gz": gzip.compress(tarfile.TarInfo("a.txt").tobuf() + bytes(1024))[:40],
    "cut.jsonl.gz": gzip.compress(b'{"a": 1}\n' * 1000)[:-12],
    "none.parquet": b"PAR1",
    "text.npz": packed(),
    # A header that says a petabyte.
    "large.npy": b"\x93NUMPY\x01\0v\0"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000, 1000), }".ljust(117)
    + b"\n",
    # The reader of Arrow ends the process at these.
    "null.json": b"null",
    "blank.jsonl": b" \n\n null \n",
    "later.jsonl": b'{"a": 1}\nnull\n{"a": 2}\n',
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_file_is_refused_by_name(tmp_path, name, streaming):
    place = write_files(tmp_path, {name: BROKEN[name]}) / name
    with refused(DataError, name):
        next(iter(open_source(DataSource(str(place), streaming=streaming))))


def test_nulls_inside_of_rows_and_lists_are_read(tmp_path):
    (tmp_path / "list.json").write_text('[\n{"a":\nnull\n},\n{"a": 1}\n]')
    write(tmp_path / "rows.jsonl", [{"a": None}, {"a": 1}])
    for name in ("list.json", "rows.jsonl"):
        assert open_source(DataSource(str(tmp_path / name)))["a"] == [None, 1]


def test_parts_without_a_common_column_and_absent_parts_are_named(tmp_path):
    one = write(tmp_path / "one.jsonl", [{"text": "a"}])
    two = write(tmp_path / "two.jsonl", [{"words": "b"}])
    both = write(tmp_path / "both.jsonl", [{"text": "a", "words": "b"}])
    for facts, path, renamed in (
        (["text", "words", "rename_columns"], [one, two], {}),
        (["--data.train.path"], [one, str(tmp_path / "absent-*")], {}),
        (["nothing", "read"], one, {"nothing": "text"}),
        (["second", "'text'"], both, {"words": "text"}),
    ):
        with refused(SourceError, *facts):
            open_source(DataSource(path, rename_columns=renamed or None), "data.train")
    assert open_source(DataSource(both, rename_columns={"words": "text", "text": "words"}))["text"] == ["b"]


def write_sounds(folder):
    """Two words as WAV and FLAC at different rates, one of them with two channels."""
    tone = np.sin(np.arange(8000) / 9).astype(np.float32) / 2
    for word in ("no", "yes"):
        (folder / word).mkdir(parents=True)
    soundfile.write(folder / "no" / "1.wav", tone, 8000)
    soundfile.write(folder / "yes" / "2.flac", tone.repeat(2)[:, None].repeat(2, 1), 16000)
    return folder, tone


@pytest.mark.parametrize("streaming", [False, True])
def test_sound_files_are_read_without_torchcodec(tmp_path, streaming):
    folder, tone = write_sounds(tmp_path / "sounds")
    task = AudioTask(sampling_rate=8000, max_length=8000, num_labels=2)
    data = open_source(DataSource(str(folder), streaming=streaming))
    assert data.features["label"].names == ["no", "yes"]
    rows = list(data)
    for row in rows:
        assert row["audio"]["bytes"] is None
        samples = read_recording(row["audio"], 8000)
        # FLAC holds 16 bits, and the file of 16,000 samples a second is brought down to 8,000.
        tolerance = 1e-4 if row["label"] == 0 else 0.05
        assert samples.shape == tone.shape and np.abs(samples - tone)[100:-100].max() < tolerance
        sample = task.training_sample(row, np.random.default_rng(0))
        assert sample["input_values"].shape[0] == 8000 and int(sample["labels"]) == row["label"]
    named = open_source(DataSource(str(folder / "*" / "*.flac"), streaming=streaming))
    assert [row["audio"]["path"].endswith("2.flac") for row in named] == [True]
    # A column of parquet.
    row = {"bytes": (folder / "no" / "1.wav").read_bytes(), "path": "1.wav"}
    data = datasets.Dataset.from_list([{"audio": row}]).cast_column("audio", datasets.Audio(decode=False))
    data.to_parquet(tmp_path / "sounds.parquet")
    (found,) = open_source(DataSource(str(tmp_path / "sounds.parquet"), streaming=streaming))
    assert np.abs(read_recording(found["audio"], 8000) - tone).max() < 1e-4
    with refused(DataError, "sound", "file"):
        read_recording({"bytes": b"no sound", "path": "1.wav"}, 8000)


def test_several_evaluation_sets_have_names_workers_and_a_batch_size(tmp_path, examples):
    images = write_images(tmp_path / "images", 5)
    data = {"train": {"path": str(examples)}, "num_workers": 1}
    data["eval"] = {"numbers": {"path": str(examples)}, "pictures": {"path": str(images)}}
    arguments = make_arguments(tmp_path / "run", data, per_device_eval_batch_size=4)
    found = run(TinyTask(), arguments)
    assert found["numbers_examples"] == 9 and found["pictures_examples"] == 5
    rows = [row for row in RunFolder(tmp_path / "run").read_metrics() if "eval_numbers_mse" in row]
    scores = [row["eval_numbers_mse"] for row in rows]
    assert scores and all("eval_pictures_mse" in row for row in rows)
    results = json.loads((tmp_path / "run" / "best" / "eval.json").read_text())["results"]
    assert {(row["dataset"], row["metric"]) for row in results} >= {(examples.name, "mse"), ("images", "mse")}
    assert min(scores) == next(row["value"] for row in results if row["metric"] == "mse")
    # The same scores by another batch size and without workers.
    task = TinyTask()
    model = task.build_model({}, str(tmp_path / "run" / "snapshot")).eval()
    again = evaluate(task, model, open_source(DataSource(str(images))), batch_size=1)
    assert again["mse"] == pytest.approx(found["pictures_mse"], rel=1e-5)
    (images / "004.png").write_bytes(b"no picture")
    for workers in (0, 1):
        with refused(OSError, "example 4", "004"):
            evaluate(task, model, open_source(DataSource(str(images))), num_workers=workers)
    with refused(SettingsError, "per_device_eval_batch_size"):
        make_arguments(tmp_path / "other", data, per_device_eval_batch_size=0)
    with refused(SettingsError, "data.eval.streaming"):
        build(DataArguments, {"eval": {"a": {"path": "b", "streaming": True}}})


@pytest.mark.parametrize("streaming", [False, True])
def test_classes_of_several_folders_go_by_their_names(tmp_path, streaming):
    folders = [write_classes(tmp_path / "a", "cat", "horse"), write_classes(tmp_path / "b", "crane", "cat")]
    data = open_source(DataSource(folders, streaming=streaming))
    names = data.features["label"].names
    assert names == ["cat", "crane", "horse"] and data.features["image"].decode
    rows = data.decode(False) if streaming else data.cast_column("image", datasets.Image(decode=False))
    assert {(names[row["label"]], Path(row["image"]["path"]).parent.name) for row in rows} == {
        (name, name) for name in names
    }
    # As a training reads them, with a picture that cannot be decoded.
    (tmp_path / "b" / "crane" / "one.png").write_bytes(b"no picture")
    source = DataSource(folders, streaming=streaming)
    task = PixelTask(image_size=SIDE, num_labels=3, mean=[0.0], std=[1.0])
    bad = BadExamples(share=1.0, total=4)
    loader = TrainingLoader(open_source(source), source, task.training_sample, 0, 2, 0, 0, 1, bad=bad)
    for batch in itertools.islice(loader, 4):
        brightness = (batch["input_values"][:, 0, 0] * 255).round().int().tolist()
        assert [len(names[label]) for label in batch["labels"].tolist()] == brightness
    assert len(bad.found) >= 1


def test_classes_of_parts_that_cannot_be_joined_are_named(tmp_path):
    same = [write_classes(tmp_path / "a", "cat", "dog"), write_classes(tmp_path / "b", "cat", "dog")]
    assert open_source(DataSource(same))["label"][:] == [0, 1, 0, 1]
    words = write(tmp_path / "words.jsonl", [{"label": "cat"}])
    for parts in ([words, same[0]], [same[0], words]):
        with refused(SourceError, "label"):
            open_source(DataSource(parts))
    with refused(SourceError, "Cat", "cat", "dog"):
        open_source(DataSource([same[0], write_classes(tmp_path / "c", "Cat", "dog")]))


@pytest.mark.parametrize("streaming", [False, True])
def test_slices_of_paired_folders_share_nothing(tmp_path, streaming):
    for side in ("lq", "hq"):
        write_images(tmp_path / "pairs" / side, 10)

    def read(split):
        return [*open_source(DataSource(str(tmp_path / "pairs"), split=split, streaming=streaming))]

    splits = ("train", "train[:80%]", "train[80%:]")
    whole, *parts = ([row["hq"].tobytes() for row in read(split)] for split in splits)
    assert sum(parts, []) == whole and list(map(len, parts)) == [8, 2]
    for split, said in (("test[:3]", "has no split 'test'"), ("train[:0]", "of 10 pairs is empty")):
        with pytest.raises(ValueError, match=said):
            read(split)
    (tmp_path / "pairs" / "hq" / "009.png").unlink()
    with refused(SourceError, "got 10", "009"):
        read("train")


def test_files_are_found_from_the_working_folder_and_gone_ones_not_in_the_cache(tmp_path, monkeypatch):
    write(tmp_path / "words" / "one.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path / "words")
    assert texts(DataSource("one.jsonl")) == texts(DataSource("*.jsonl")) == texts(DataSource(".")) == ["a"]
    monkeypatch.chdir(tmp_path)
    assert texts(DataSource("words")) == ["a"]
    (tmp_path / "words").rename(tmp_path / "moved")
    with refused(SourceError, "the Hub", "folder"):
        open_source(DataSource("words"))
