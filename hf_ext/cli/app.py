"""hf-ext app: restore, draw, listen and merge in a browser."""

import signal

import click

from .sources import Model

ABOVE_0 = click.FloatRange(0, min_open=True)


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
