"""A download whose connection breaks goes on where it stopped, by a Range request of the client itself."""

from __future__ import annotations

import os
from pathlib import Path

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.hub.unfaithful_hub import UnfaithfulHub
from tests.kit.hub import commit_large, create_repository, run_python

DOWNLOAD = """
import huggingface_hub as hub
print(hub.hf_hub_download("me/model", "weights.bin"))
"""


def test_a_download_that_is_cut_off_is_continued(hub: EmbeddedHub, tmp_path: Path) -> None:
    weights, cuts = os.urandom(22 << 20), [15 << 20]
    create_repository(hub.url, "me/model")
    commit_large(hub.url, {"weights.bin": weights})
    proxy = UnfaithfulHub(hub.url)

    def rule(method, path, body, forward):
        reply = forward(body)
        return reply._replace(sent=cuts.pop()) if len(reply.body) > 15 << 20 and cuts else reply

    proxy.rule = rule
    path = run_python(DOWNLOAD, proxy.url, tmp_path / "home").strip()
    proxy.stop()
    assert Path(path).read_bytes() == weights
    # The client keeps whole pieces of 10 MiB: of 15 received ones, 10.
    ranges = [one.range for one in proxy.asked if one.method == "GET" and one.path.endswith("/weights.bin")]
    assert len(ranges) == 2 and ranges[1].startswith(f"bytes={10 << 20}-")
