"""`hf-ext hub serve` is a small process: it imports neither torch nor transformers, and a stop signal ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.hub import ask, client_environment, commit_body, create_repository

from .conftest import COMMIT, peak_memory, serving


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory that Linux shows")
def test_serving_takes_little_memory_and_time(tmp_path: Path) -> None:
    with serving(tmp_path / "hub") as (url, process):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        # Processor time, of which transformers alone would take eight times as much on the same machine.
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        memory = peak_memory(process)
        assert create_repository(url, "me/model").status == 200
        header = b'{"w": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}}'
        weights = len(header).to_bytes(8, "little") + header + bytes(12)
        files = {"README.md": b"---\nlicense: mit\n---\n", ".gitignore": b"*.tmp\n", "model.safetensors": weights}
        assert ask(url, "POST", COMMIT, commit_body(files)).status == 200
        described = ask(url, "GET", "/api/models/me/model").json()
        assert described["cardData"] == {"license": "mit"} and described["safetensors"]["total"] == 6
        later = peak_memory(process)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and told.endswith("heavy: []\n"), told
    assert memory < 60 << 20 and later < 80 << 20, f"{memory >> 20} MiB, {later >> 20} MiB with a model"
    assert seconds < 2, "0.2 s on the machine of the developers; the bound leaves room for ten times slower ones"


def test_serving_behind_a_proxy_with_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("writer\n")
    words = ["--token-file", str(tmp_path / "token"), "--public-url", "https://hub.lab", "--allowed-host", "other.lab"]
    with serving(tmp_path / "hub", *words, "--max-connections", "20") as (url, process):
        assert process.stdout is not None and "HF_ENDPOINT=https://hub.lab " in process.stdout.readline()
        for host in ("hub.lab", "other.lab:8443"):
            headers = {"Host": host, "Authorization": "Bearer writer"}
            assert ask(url, "GET", "/api/whoami-v2", headers=headers).status == 200
        assert ask(url, "GET", "/api/models", headers={"Host": "evil.lab"}).status == 403


@pytest.mark.slow
def test_importing_the_library_registers_its_models_unless_it_is_told_not_to(tmp_path: Path) -> None:
    program = "import sys, hf_ext; print('transformers' in sys.modules, 'hf_ext.semanir' in sys.modules)"
    for setting, wanted in ((None, "True True"), ("1", "True True"), ("0", "False False")):
        environment = client_environment("http://127.0.0.1:9", tmp_path)
        environment |= {} if setting is None else {"HF_EXT_REGISTER_MODELS": setting}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == wanted, done.stderr
    # A name that is asked for brings its registration along.
    program = "import hf_ext, transformers; hf_ext.SemanIRConfig; transformers.AutoConfig.for_model('semanir')"
    environment = client_environment("http://127.0.0.1:9", tmp_path) | {"HF_EXT_REGISTER_MODELS": "0"}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
