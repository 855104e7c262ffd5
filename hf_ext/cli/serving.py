"""hf-ext hub: the embedded Hub. hf-ext app: restore, draw, listen and merge in a browser."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import click

from .groups import Group
from .options import FILE, Place, find_released, shown
from .output import note

ABOVE_0 = click.FloatRange(0, min_open=True)
_TOLD = "Further host name that clients may use. Repeatable."
ALLOWED_HOST = click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME[:PORT]", help=_TOLD)


@click.group(cls=Group)
def hub() -> None:
    """Run a Hub on this machine, for tests and for work without internet."""


@hub.command()
@click.option("--root", required=True, type=Place(file_okay=False, path_type=Path), help="Repository folder.")
@shown("--host", default="127.0.0.1", help="Address to listen on; any but loopback requires --token-file.")
@shown("--port", default=8765, type=click.IntRange(0, 65535), help="Port; 0: a free one.")
@click.option("--token-file", type=FILE, help="File with the token for writing, and for private repositories.")
@ALLOWED_HOST
@click.option("--public-url", metavar="URL", help="Address of a reverse proxy, with which download links start.")
@shown("--max-connections", default=256, type=click.IntRange(1), help="Most simultaneous connections.")
def serve(root: Path, token_file: Path | None, **options: Any) -> None:
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

    token = None if token_file is None else token_file.read_text(encoding="utf-8").strip()
    # A server ends by signals: Ctrl-C, or SIGTERM of a service manager. Running requests are finished.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        # The options have the names of the arguments of EmbeddedHub.
        EmbeddedHub(root, token=token, **options).serve_forever(announce)


@click.command()
@click.argument("sources", metavar="[MODEL]...", nargs=-1, type=find_released)
@shown("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 accepts other machines.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port.  [default: the first free one from 7860 on]")
@ALLOWED_HOST
@shown("--megapixels", default=50.0, type=ABOVE_0, help="Largest picture accepted.")
@shown("--gigabytes", default=8.0, type=ABOVE_0, help="Most memory for a request.")
@shown("--seconds", default=600.0, type=ABOVE_0, help="Time limit of a request.")
def app(
    sources: tuple[str, ...], host: str, port: int | None, allowed_hosts: tuple[str, ...], **limits: float
) -> None:
    """Use the released models and each MODEL in a browser: restore, draw, listen, merge.

    MODEL is a folder or org/name[@revision]: a SemanIR model, a Disentangled DiT, an MRConv model of sounds, or an
    artifact of `hf-ext merge`. Nothing is downloaded except a MODEL on a Hub.

    \b
    Examples:
      hf-ext app
      hf-ext app runs/dit-cifar10/snapshot --port 8080 --seconds 60
    """
    from hf_ext.extras import check_installed

    check_installed("gradio")
    from hf_ext.answers.limits import Limits
    from hf_ext.app import serve
    from hf_ext.app_work import find_models

    # A server ends by signals: gradio closes it at Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(find_models(sources), Limits(**limits), allowed_hosts, server_name=host, server_port=port)
