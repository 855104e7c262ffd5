"""hf-ext hub: the embedded Hub."""

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hf_ext.embedded_hub.server import EmbeddedHub


@click.group()
def hub() -> None:
    """A Hub of your own: for tests, for machines without internet, and for the quickstart."""


@hub.command()
@click.option(
    "--root", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of repositories."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; other than loopback needs a token.")
@click.option(
    "--port", default=8765, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one."
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that clients must send.",
)
def serve(root: Path, host: str, port: int, token_file: Path | None) -> None:
    """Serve the repositories in a folder to huggingface_hub, transformers, diffusers and datasets.

    It makes the folder if there is none, and runs until Ctrl-C. Clients read its address from HF_ENDPOINT when they
    start. It has no Xet storage: `hf upload` and push_to_hub need HF_HUB_DISABLE_XET=1, hf-ext push does not.

    \b
    Examples:
      hf-ext hub serve --root hub/
      HF_ENDPOINT=http://127.0.0.1:8765 hf-ext push runs/denoise/snapshot org/name
    """
    from hf_ext.embedded_hub.server import serve as run

    def announce(server: "EmbeddedHub") -> None:
        click.echo(f"Serving {root} at {server.url}; Ctrl-C stops it. Set this for clients:")
        click.echo(f"  export HF_ENDPOINT={server.url} HF_HUB_DISABLE_XET=1")

    token = token_file.read_text(encoding="utf-8").strip() if token_file else None
    # A service manager stops a process with SIGTERM: let requests end, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        run(root, host, port, token, announce)
