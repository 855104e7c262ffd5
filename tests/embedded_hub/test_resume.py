"""A download whose connection breaks goes on where it stopped, by a Range request of the client itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import HfApi, close_session

from hf_ext.embedded_hub import connections
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.embedded_hub.transport import Response
from tests.hub_testing import run_python

DOWNLOAD = """
import huggingface_hub as hub
print(hub.hf_hub_download("me/model", "weights.bin"))
"""
SIZE, CUT = 36 << 20, 25 << 20

# huggingface_hub 2.4 itself sends large files with an argument that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")


def test_a_download_that_is_cut_off_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(SIZE)
    offsets: list[int] = []
    send = connections.Connection._write_file

    def cut_the_first(connection: connections.Connection, response: Response) -> None:
        if response.length <= 1 << 20:
            return send(connection, response)
        offsets.append(response.offset)
        if len(offsets) > 1:
            return send(connection, response)
        assert response.file is not None
        connection.stream.sendall(os.pread(response.file.fileno(), CUT, 0))
        raise ConnectionError("cut by the test")

    monkeypatch.setattr(connections.Connection, "_write_file", cut_the_first)
    with EmbeddedHub(tmp_path / "hub") as hub:
        api = HfApi(endpoint=hub.url)
        api.create_repo("me/model")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        api.upload_file(path_or_fileobj=data, path_in_repo="weights.bin", repo_id="me/model")
        close_session()
        path = run_python(DOWNLOAD, hub.url, tmp_path / "home").strip()
    assert Path(path).read_bytes() == data
    # The client keeps whole pieces of 10 MiB: of 25 received ones, 20.
    assert offsets == [0, 20 << 20]
