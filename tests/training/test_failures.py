"""What goes wrong is said in one clear line, and the last good state stays."""

import json
import re
import shutil
from unittest import mock

import pytest
import torch

from hf_ext.errors import DataError, UsageError
from hf_ext.training import Callback
from hf_ext.training.launch import main
from hf_ext.training.state import RunFolder
from tests.kit.models import file_limit
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused

from .launching import launch_two
from .tiny import TinyTask, contents, fails, make_arguments, make_task, run, write_config, write_images


def test_help_and_missing_words(capsys):
    assert main(["--help"]) == 0
    assert "accelerate launch -m hf_ext.training FILE.yaml" in capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    assert main(["-h"], usage="a script's own words\n") == 0
    assert capsys.readouterr().out == "a script's own words\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_step", "3"], "unknown key 'max_step'. Did you mean 'max_steps'?"),
        (["--max_steps", "0"], "max_steps must be a whole number of at least 1; got 0"),
        (["--data.train.paht", "x"], "unknown key 'paht' in section 'data.train'"),
        (["--task.noise", "loud"], "section 'task'"),
        (["--method", "none"], "unknown method 'none'; allowed: disentangled-dit, "),
        (["--lr_scheduler_type", "greedy"], "lr_scheduler_type must be one of constant,"),
        (["--ema_decay", "1"], "ema_decay must be in [0, 1)"),
        (["--peft.peft_type", "LORA"], "set init_from"),
        (["--data.eval.path", "x", "--data.eval.streaming"], "data.eval.streaming must be false"),
        (["--data.train.shuffle_buffer", "9"], "shuffle_buffer must be 0 or, with streaming: true"),
        (["stray"], "unexpected argument 'stray'"),
        (["--output_dir", "~nobody-here/x"], "a path begins with ~ and the name of no user"),
        (["--data.train.path", "None"], "the text 'None'"),
        (["--report_to", "tensorboard,wandb"], "[tensorboard, wandb]"),
        (["--learning_rate", "\u0661"], "learning_rate"),
        (["--help", "--method", "none"], "unknown method 'tiny'"),
        # What this machine cannot do.
        (["--mixed_precision", "fp16"], "mixed_precision fp16 needs a GPU"),
        (["--report_to", "wandb"], "report_to is 'wandb'; installed here are"),
        (["--data.num_workers", "999999"], "data.num_workers is 999999"),
        (["--data.train.streaming", "--data.num_workers", "3"], "a process has only 2 shard(s)"),
    ],
)
def test_wrong_words_exit_with_2_and_name_the_key(tmp_path, capsys, examples, words, message):
    assert message in fails(capsys, 2, write_config(tmp_path, examples), *words)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_utf_8(tmp_path, capsys):
    (tmp_path / "latin.yaml").write_bytes("seed: 1\nmethod: Gr\xfc\xdfe\n".encode("latin-1"))
    assert "line 2 is not UTF-8" in fails(capsys, 2, str(tmp_path / "latin.yaml"))


def test_what_is_not_finite_stops_before_anything_is_saved(tmp_path, capsys, examples):
    for fault, message in (
        ("nan_at=2", "the loss is nan between steps 3 and 4"),
        ("overflow_at=3", "weights are no longer finite after step 4"),
    ):
        folder = tmp_path / fault
        said = fails(capsys, 1, write_config(tmp_path, examples), f"--task.{fault}", f"--output_dir={folder}")
        assert f"{message}; the last good state is step 2" in said
        assert RunFolder(folder).saved_steps() == [2]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_vanished_file_is_named(tmp_path, capsys, workers):
    # Pairs are read from their folders; of a plain folder `datasets` makes a copy.
    for side in ("lq", "hq"):
        write_images(tmp_path / "pairs" / side, 6)

    class VanishingTask(TinyTask):
        def loss(self, model, batch, step):
            (tmp_path / "pairs" / "hq" / "003.png").unlink(missing_ok=True)
            return super().loss(model, batch, step)

    config = write_config(tmp_path, tmp_path / "pairs", max_steps=99)
    message = fails(capsys, 1, config, "--data.num_workers", workers, make_task=lambda arguments: VanishingTask())
    assert "cannot be read" in message and "003.png" in message and "Restore the file" in message
    assert RunFolder(tmp_path / "run").saved_steps()


FOREIGN = [("snapshot/model.bin", ""), ("args.json", '{"lr": 1}'), ("args.json", "{"), ("mine.tmp", "precious")]


@pytest.mark.parametrize(("name", "content"), FOREIGN)
def test_folders_of_others_are_left_alone(tmp_path, examples, name, content):
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with refused(ValueError, "mine.tmp" if name == "mine.tmp" else "args.json"):
        run(TinyTask(), make_arguments(tmp_path / "run", examples))
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == content


def test_an_output_that_is_no_folder_or_within_the_data_is_refused(tmp_path, examples):
    (tmp_path / "d").write_text("precious")
    links = {"to nothing": "nowhere", "ring": "ring", "to a file": "d"}
    for name in links:
        (tmp_path / name).symlink_to(tmp_path / links[name])
    for name in ("d", *links):
        with refused(UsageError, f"{tmp_path / name} is no folder"):
            run(TinyTask(), make_arguments(tmp_path / name, examples))
    with refused(DataError, "inside", "output_dir"):
        run(TinyTask(), make_arguments(examples / "run", examples))
    assert not (examples / "run").exists()
    # Where the output of the run itself goes.
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "train.log").write_text("started")
    run(TinyTask(), make_arguments(tmp_path / "e", examples, max_steps=1))
    assert (tmp_path / "e" / "train.log").read_text() == "started"


@pytest.mark.parametrize("row", [b"{}", b"[1]", b'{"step": "1", "example": 1}', b"\xff\xfe", b"[" * 9999])
@pytest.mark.parametrize(("name", "number"), [("metrics.jsonl", 4), ("bad_examples.jsonl", 1)])
def test_a_damaged_row_is_named(tmp_path, halfway, row, name, number):
    with (tmp_path / "run" / name).open("ab") as file:
        file.write(row + b"\n")
    with refused(DataError, name, f"line {number}"):
        run(TinyTask(), make_arguments(tmp_path / "run", halfway))


def test_a_cut_off_row_of_metrics_is_survived(tmp_path, halfway):
    run(TinyTask(), make_arguments(tmp_path / "whole", halfway))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "samples": 20, "loss": 9.0}) + '\n{"step": 6, "sam')
    run(TinyTask(), make_arguments(tmp_path / "run", halfway))
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: shutil.rmtree(run), "was removed or renamed"),
        (lambda run: run.rename(run.with_name("moved")), "was removed or renamed"),
        (lambda run: (shutil.rmtree(run / "state"), (run / "state").touch()), "Remove the cause"),
        (lambda run: (shutil.rmtree(run / "snapshot"), (run / "snapshot").touch()), "the last good state is step 2"),
    ],
)
def test_a_folder_that_is_changed_under_a_run_is_named(tmp_path, examples, change, said):
    class Changes(Callback):
        def on_log(self, step, values):
            return change(tmp_path / "run") and None if step == 3 else None

    with refused(OSError, said):
        run(TinyTask(), make_arguments(tmp_path / "run", examples, logging_steps=1), None, None, [Changes()])
    if (tmp_path / "run" / "state").is_file():
        with refused(DataError, "state"):
            run(TinyTask(), make_arguments(tmp_path / "run", examples))


def test_a_full_disk_keeps_the_last_good_state(tmp_path, capsys, examples):
    config = write_config(tmp_path, examples, lr_scheduler_type="constant")
    forget_accelerate()
    assert main([config, "--max_steps", "2"], make_task) == 0
    # A limit for files is what a full disk looks like to the writer.
    with file_limit(2000):
        message = fails(capsys, 1, config)
    assert message.startswith("Error: cannot write") and "the last good state is step 2" in message
    assert RunFolder(tmp_path / "run").saved_steps() == [2]
    forget_accelerate()
    assert main([config], make_task) == 0
    assert RunFolder(tmp_path / "run").saved_steps() == [2, 4]
    assert not [*(tmp_path / "run").glob("**/*.tmp*")]


@pytest.mark.slow
def test_no_process_waits_for_one_that_failed(tmp_path, examples):
    (tmp_path / "run" / "snapshot").mkdir(parents=True)
    config = write_config(tmp_path, examples, method="semanir")
    text = launch_two("hf_ext.training", config, code=1)
    # The one that failed says why; the other one ends in silence, and is not cut off in the middle of waiting.
    assert len(re.findall("^Error: .*no args.json", text, re.M)) == text.count("no args.json") == 1, text
    assert "Connection" not in text


def test_a_training_without_memory_names_the_flags_to_lower(tmp_path, examples, monkeypatch, capsys):
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ):
        monkeypatch.setattr(TinyTask, "loss", mock.Mock(side_effect=error))
        forget_accelerate()
        assert main([write_config(tmp_path, examples)], make_task) == 1
        said, flags = capsys.readouterr().err, ("--per_device_train_batch_size", "--activation_checkpointing true")
        assert all(told in said for told in (str(error), *flags))
