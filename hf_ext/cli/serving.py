"""hf-ext hub: the embedded Hub."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import click

from .groups import Group
from .library import import_without_models
from .terminal import note

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def read_token(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
    """The token in a file."""
    return path.read_text(encoding="utf-8").strip() if path else None


@click.group(cls=Group)
def hub() -> None:
    """Run a Hub on this machine: for tests, without internet, and for the quickstart."""
    import_without_models()


@hub.command()
@click.option(
    "--root", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of repositories."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; any but loopback needs a token.")
@click.option(
    "--port", default=8765, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one."
)
@click.option(
    "--token-file",
    "token",
    type=FILE,
    callback=read_token,
    help="File with the token that clients must send to write.",
)
@click.option(
    "--read-token-file",
    "read_token",
    type=FILE,
    callback=read_token,
    help="File with a second token, which reads private repositories and cannot write.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Another host name for clients. Repeatable.",
)
@click.option(
    "--public-url", metavar="URL", help="Address of a proxy before this server; links to large files start with it."
)
@click.option(
    "--max-connections", default=256, show_default=True, type=click.IntRange(1), help="Connections at a time."
)
def serve(root: Path, **options: Any) -> None:
    """Serve the repositories in a folder to huggingface_hub, transformers, diffusers and datasets.

    A missing folder is created. The server runs until Ctrl-C. Clients read its address from HF_ENDPOINT when they
    start. It has no Xet storage: `hf upload` and push_to_hub need HF_HUB_DISABLE_XET=1, hf-ext push does not.

    \b
    Examples:
      hf-ext hub serve --root hub/
      HF_ENDPOINT=http://127.0.0.1:8765 hf-ext push runs/denoise/snapshot org/name
      hf-ext hub serve --root hub/ --token-file write.txt --read-token-file read.txt --public-url https://hub.lab
    """
    from hf_ext.embedded_hub.server import EmbeddedHub

    def announce(server: EmbeddedHub) -> None:
        note(f"Serving {root} at {server.url}; Ctrl-C stops it. Set this for clients:")
        note(f"  export HF_ENDPOINT={options['public_url'] or server.url} HF_HUB_DISABLE_XET=1")

    # A service manager stops a process with SIGTERM: let requests end, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        # The options are called as the arguments of EmbeddedHub.
        EmbeddedHub(root, **options).serve_forever(announce)
