"""hf-ext export: a restorer as an ONNX file."""

import click

from .semanir import load_model
from .sources import Model
from .terminal import say


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.option("--onnx", "path", metavar="FILE", required=True, type=click.Path(), help="File to write.")
@click.option("--task", metavar="NAME", help="Task of a merge.")
def export(source: str, path: str, task: str | None) -> None:
    """Export a restorer (folder or org/name[@revision]) to an ONNX file in float32.

    The file restores batches of pictures of any size above a minimum, which its metadata contain. It is written only
    after onnxruntime has restored pictures with the same result as the model. This takes minutes and needs the extra
    hf-ext[onnx].

    \b
    Examples:
      hf-ext export denoise-color --onnx denoise.onnx
      hf-ext export merged --task jpeg --onnx jpeg.onnx
    """
    model = load_model(source, "cpu", "float32", task)
    from hf_ext.restoration.export import export_onnx

    written = export_onnx(model, path)
    say(
        f"{written.path}: {written.bytes / 1e6:.1f} MB, for pictures from {written.minimum} x {written.minimum} "
        f"pixels on; onnxruntime and the model differ by at most {written.difference:.1g}"
    )
