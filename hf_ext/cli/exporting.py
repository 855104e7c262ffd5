"""hf-ext export: a restorer for programs without torch."""

from pathlib import Path
from typing import Any

import click

from .sources import Model


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.option("--onnx", "path", metavar="FILE", required=True, type=click.Path(path_type=Path), help="To write.")
@click.option("--task", metavar="NAME", help="Of a merge: the task whose model is exported.")
def export(source: str, path: Path, task: str | None) -> None:
    """Write a restorer, a folder or org/name[@revision], as an ONNX file in float32.

    It takes a batch of pictures of any size from a smallest on, which the file's metadata name, and gives the restored
    pictures. Before the file appears, onnxruntime has computed pictures with it, and they are the model's. It takes
    minutes. This needs the extra hf-ext[onnx].

    \b
    Examples:
      hf-ext export denoise-color --onnx denoise.onnx
      hf-ext export merged --task jpeg --onnx jpeg.onnx
    """
    from hf_ext.extras import check_installed
    from hf_ext.files import require_new

    # Before minutes pass.
    check_installed("onnx", "onnxscript", "onnxruntime")
    require_new(path)
    written: Any = _export(source, path, task)
    click.echo(
        f"{written.path}: {written.bytes / 1e6:.1f} MB, for pictures from {written.minimum} x {written.minimum} "
        f"pixels on; onnxruntime and the model differ by at most {written.difference:.1g}"
    )


def _export(source: str, path: Path, task: str | None) -> Any:
    from .semanir import load_model

    model = load_model(source, "cpu", "float32", task)
    from hf_ext.restoration.export import export_onnx

    return export_onnx(model, path)
