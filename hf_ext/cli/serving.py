"""hf-ext hub: the embedded Hub."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import click

from .groups import Group
from .library import import_without_models
from .terminal import note


@click.group(cls=Group)
def hub() -> None:
    """Run a Hub on this machine, for tests and for work without internet."""
    import_without_models()


@hub.command()
@click.option("--root", required=True, type=click.Path(file_okay=False, path_type=Path), help="Repository folder.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any address except loopback requires --token-file.",
)
@click.option("--port", default=8765, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: a free one.")
@click.option(
    "--token-file",
    "token",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=lambda context, option, path: path.read_text(encoding="utf-8").strip() if path else None,
    help="File with the token that clients need for writing, and for private repositories.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Further host name that clients may use. Repeatable.",
)
@click.option(
    "--public-url",
    metavar="URL",
    help="Address of a reverse proxy in front of this server; download links start with it.",
)
@click.option(
    "--max-connections",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Largest number of simultaneous connections.",
)
def serve(root: Path, **options: Any) -> None:
    """Serve the repositories in a folder to huggingface_hub, transformers, diffusers and datasets.

    A missing folder is created. The server runs until Ctrl-C. Clients read its address from HF_ENDPOINT when they
    start. Xet storage is not supported: `hf upload` and push_to_hub need HF_HUB_DISABLE_XET=1; hf-ext push does not.

    \b
    Examples:
      hf-ext hub serve --root hub/
      HF_ENDPOINT=http://127.0.0.1:8765 hf-ext push runs/denoise/snapshot org/name
      hf-ext hub serve --root hub/ --token-file token.txt --public-url https://hub.lab
    """
    from hf_ext.embedded_hub.server import EmbeddedHub

    def announce(server: EmbeddedHub) -> None:
        note(f"Serving {root} at {server.url}; press Ctrl-C to stop. Clients need:")
        note(f"  export HF_ENDPOINT={options['public_url'] or server.url} HF_HUB_DISABLE_XET=1")

    # A server ends by signals: Ctrl-C, or SIGTERM of a service manager. Running requests are finished.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        # The options have the names of the arguments of EmbeddedHub.
        EmbeddedHub(root, **options).serve_forever(announce)
