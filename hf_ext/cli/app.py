"""hf-ext app: restore, draw, listen and merge in a browser."""

import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from .sources import Model
from .terminal import say

ABOVE_0 = click.FloatRange(0, min_open=True)
SPACE = """---
title: hf-ext
emoji: 🖼️
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: {gradio}
python_version: "3.11"
app_file: app.py
license: apache-2.0
short_description: Restore, draw, listen and merge with small models
---

Four NeurIPS 2024 methods on small models that run on a CPU; made by `hf-ext app --space`.
"""


@click.command()
@click.argument("sources", metavar="[MODEL]...", nargs=-1, type=Model())
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 accepts other machines."
)
@click.option("--port", type=click.IntRange(1, 65535), help="Port.  [default: the first free one from 7860 on]")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Further host name that browsers may use. Repeatable.",
)
@click.option("--megapixels", default=50.0, show_default=True, type=ABOVE_0, help="Largest picture accepted.")
@click.option("--gigabytes", default=8.0, show_default=True, type=ABOVE_0, help="Most memory for a request.")
@click.option("--seconds", default=600.0, show_default=True, type=ABOVE_0, help="Time limit of a request.")
@click.option(
    "--space",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the files of a Hub Space into the new FOLDER, and serve nothing.",
)
def app(sources: tuple[str, ...], host: str, port: int | None, space: Path | None, **options: Any) -> None:
    """Use the released models and each MODEL in a browser: restore, draw, listen, merge.

    MODEL is a folder or org/name[@revision]: a SemanIR model, a Disentangled DiT, an MRConv model of sounds, or an
    artifact of `hf-ext merge`. Nothing is downloaded except a MODEL on a Hub.

    \b
    Examples:
      hf-ext app
      hf-ext app runs/dit-cifar10/snapshot --port 8080 --seconds 60
      hf-ext app --space space
    """
    from hf_ext.extras import check_installed

    check_installed("gradio")
    if space is None:
        serve(sources, host, port, **options)
    elif sources or host != "127.0.0.1" or port is not None:
        raise click.UsageError(
            "--space does not combine with MODEL, --host or --port: a Space contains the released models and has its "
            "own address."
        )
    else:
        write_space(space)
        say(f"{space}: upload it to a Space of the Hub, or run it here: python {space / 'app.py'}")


def serve(
    sources: tuple[str, ...], host: str, port: int | None, allowed_hosts: tuple[str, ...], **limits: float
) -> None:
    """Serves the app until Ctrl-C."""
    from hf_ext.answers.limits import Limits
    from hf_ext.app import serve as run
    from hf_ext.app_work import find_models

    # A server ends by signals: gradio closes it at Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(find_models(sources), Limits(**limits), allowed_hosts, server_name=host, server_port=port)


def write_space(folder: Path) -> None:
    """Writes the files of a Space, all or none; its program is a copy of the app."""
    from hf_ext import app as program
    from hf_ext.files import whole_folder

    with whole_folder(folder, replace=False) as place:
        (place / "README.md").write_text(SPACE.format(gradio=version("gradio")), encoding="utf-8")
        (place / "app.py").write_bytes(Path(program.__file__).read_bytes())
        (place / "requirements.txt").write_text(f"hf-ext[app]=={version('hf-ext')}\n", encoding="utf-8")
