"""Released restorers as ONNX files: time of the export, and of a picture in onnxruntime beside torch, interleaved.

OMP_NUM_THREADS=1 python examples/benchmarks/semanir_onnx.py
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import torch
from timing import Content, apart, in_turns, markdown_table, median_ratio, run, time_of

from hf_ext import released
from hf_ext.restoration.export import export_onnx
from hf_ext.restoration.restorer import load_model

NAMES = ["denoise-color", "denoise-gray", "jpeg-color", "super-resolution-x2", "photo", "demosaick"]
NAMES += ["derain", "deblur"]


@torch.no_grad()
def time_one(name: str, size: int, rounds: int) -> Content:
    """The row of one model, by processor time with one thread each."""
    torch.set_num_threads(1)
    model = load_model(str(released(name)), device="cpu", dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        written = []
        seconds = time_of(lambda: written.append(export_onnx(model, path)))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    image = torch.rand(1, model.config.num_channels, size, size)
    calls = {
        "onnxruntime": lambda: session.run(None, {"pixel_values": image.numpy()}),
        "torch": lambda: model(pixel_values=image),
    }
    found = in_turns(list(calls), rounds + 1, lambda key: time_of(calls[key]))
    times = {key: values[1:] for key, values in found.items()}
    export = {"export_seconds": seconds, "megabytes": written[0].bytes / 1e6, "difference": written[0].difference}
    ratio = median_ratio(times["onnxruntime"], times["torch"])
    return {"name": name, **export, "size": size, "seconds": times, "onnxruntime_of_torch": ratio}


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All models."""
    rows = []
    for name in words.models:
        rows.append(apart(time_one, name, words.size, words.rounds))
        yield {"onnxruntime": onnxruntime.__version__, "rows": rows}


def draw(content: Content) -> str:
    header = ["model", "export, processor s", "MB", "largest difference", "picture in onnxruntime, of torch's time"]
    line = "{name}|{export_seconds:.0f}|{megabytes:.1f}|{difference:.1e}|{onnxruntime_of_torch:.2f} ×"
    return markdown_table(header, [line.format(**row).split("|") for row in content["rows"]])


if __name__ == "__main__":
    run("semanir_onnx", __doc__, measure, draw, models=NAMES, size=256, rounds=5)
