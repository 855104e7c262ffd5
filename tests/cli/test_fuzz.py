"""Whatever files a stranger sends: no command of hf-ext shows a traceback, takes long, or fills the memory."""

from __future__ import annotations

import random
import shutil
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from diffusers import DDIMScheduler, FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler

from hf_ext_cli.main import main
from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.kit.process_state import peak_memory

from .fuzzing import COMMANDS, SAMPLE_PICTURES, change_json, change_sample, write_samples

# A warning is no error to who runs a command.
pytestmark = pytest.mark.filterwarnings("ignore")
MAX_SECONDS = 10
MAX_BYTES = 500_000_000


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(autouse=True)
def in_the_samples(samples, monkeypatch, offline):
    """A name that a change made may be one of a Hub: nobody is asked. Paths in the samples are relative."""
    monkeypatch.chdir(samples)


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not let a process measure its memory")


def call(words: list[str]) -> tuple[int, float, str]:
    """Exit code, seconds of processor time, and the traceback or nothing, of one call."""
    started = time.process_time()
    result = CliRunner().invoke(main, words)
    seconds = time.process_time() - started
    expected = result.exception is None or isinstance(result.exception, SystemExit)
    trace = "" if expected else "".join(traceback.format_exception(*result.exc_info))
    return result.exit_code, seconds, trace or ("Traceback" in result.output and result.output) or ""


def fuzz(samples: Path, place: Path, calls: int, seed: int) -> Counter[tuple[str, int]]:
    """Calls commands on changed samples; how often each ended with which exit code."""
    chance, codes = random.Random(seed), Counter[tuple[str, int]]()
    kinds = [(kind, command) for count, kind, command in COMMANDS for _ in range(count)]
    for number in range(calls):
        kind, command = chance.choice(kinds)
        changed = change_sample(samples, kind, place / f"{number}", chance)
        words = [word.format(x=changed, all=samples) for word in command.split()]
        code, seconds, trace = call(words)
        assert not trace, f"call {number}, hf-ext {' '.join(words)} (files are still there):\n{trace}"
        assert seconds < MAX_SECONDS, f"call {number}, hf-ext {' '.join(words)}: {seconds:.1f} s of processor time"
        codes[" ".join(command.split()[:1]), code] += 1
        for path in place.glob(f"{number}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return codes


def check_codes(codes: Counter[tuple[str, int]]) -> None:
    # A picture that could not be restored beside others, and a card that is not as it should be, end with 1.
    assert {command for command, code in codes if code == 1} <= {"restore", "card"}, codes
    assert {code for _, code in codes} == {0, 1, 2}, codes


# Twenty thousand in the slow suite.
@pytest.mark.parametrize(
    ("files", "seed"), [(100, 0), *(pytest.param(5000, seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]
)
def test_changed_files(samples, tmp_path, files, seed):
    # Kernels are compiled and libraries imported at the first call of each.
    fuzz(samples, tmp_path, min(files, 100), seed=1)
    forget_peak()
    before = peak_memory()
    check_codes(fuzz(samples, tmp_path, files, seed))
    assert peak_memory() - before < MAX_BYTES


@pytest.mark.parametrize(
    "scheduler",
    [
        DDIMScheduler,
        pytest.param(UniPCMultistepScheduler, marks=pytest.mark.slow),
        pytest.param(FlowMatchHeunDiscreteScheduler, marks=pytest.mark.slow),
    ],
    ids=lambda kind: kind.__name__,
)
def test_changed_schedulers(tmp_path, scheduler):
    # They take whatever their configuration says, and stumble over it in the steps.
    make_pipeline(scheduler()).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    chance, before, codes = random.Random(0), config.read_bytes(), Counter[int]()
    for number in range(100):
        config.write_bytes(change_json(before, chance))
        code, seconds, trace = call(
            [*SAMPLE_PICTURES.split(), str(tmp_path / "model"), "--out", str(tmp_path / "a.png")]
        )
        assert not trace, f"call {number}:\n{config.read_text()}\n{trace}"
        assert seconds < MAX_SECONDS, f"call {number}: {seconds:.1f} s of processor time\n{config.read_text()}"
        codes[code] += 1
    assert set(codes) == {0, 2}, codes
