"""Export of a restorer to an ONNX file, which is written only if onnxruntime and the model agree."""

import copy
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import nn

from hf_ext.errors import UsageError
from hf_ext.extras import check_installed
from hf_ext.files import check_places, require_new, whole_file
from hf_ext.semanir import ops_semanir
from hf_ext.semanir.modeling_semanir import SemanIRAttention, SemanIRForImageRestoration
from hf_ext.terminal import log_level

# Of a picture in [0, 1]: the largest difference is below a level of 8 bits, the mean below a fortieth of one. Rounding
# alone is a thousand times smaller; but where two keys are equally similar up to rounding, one program may take the
# one and another the other, and some pixels differ more.
_LARGEST, _MEAN = 1 / 255, 1e-4


class ExportedFile(NamedTuple):
    """
    An ONNX file that was written: its path, its size in bytes, the smallest height and width of the pictures that it
    takes, and the largest difference from the model that was seen, in pictures in [0, 1].
    """

    path: Path
    bytes: int
    minimum: int
    difference: float


def export_onnx(model: SemanIRForImageRestoration, path: str | os.PathLike[str]) -> ExportedFile:
    """
    Write a restorer as an ONNX file in float32. Its input `pixel_values` has the shape `(batch_size, num_channels,
    height, width)` and values in [0, 1]; its output `reconstruction` is larger by the scale, and not clipped.

    The file takes any batch and any size from `minimum` on, which its metadata contain beside the channels and the
    scale: a smaller picture has other windows, hence another graph. Mirror it and crop the result.

    Args:
        model ([`SemanIRForImageRestoration`]): The model, of any precision; it stays as it is.
        path (`str` or `Path`): The file to write; it must not exist.

    Returns:
        [`ExportedFile`]: What was written.

    Raises:
        FloatingPointError: If the outputs of onnxruntime differ from the model's; no file is written then.
        ValueError: If the path exists, or has a slash at its end.
        OSError: If nothing can be written there.
        ImportError: If onnx, onnxscript or onnxruntime is not installed.

    Example:
        >>> from hf_ext import SemanIRConfig, SemanIRForImageRestoration
        >>> from hf_ext.restoration.export import export_onnx
        >>> config = SemanIRConfig(embed_dim=8, depths=[1], num_heads=[2], window_size=4, top_k=6)
        >>> export_onnx(SemanIRForImageRestoration(config), "restorer.onnx").minimum
        5
    """
    if not os.path.basename(path):
        raise UsageError(f"{path} is a folder; give the name of a file in it, such as {path}restorer.onnx.")
    check_installed("onnx", "onnxscript", "onnxruntime")
    import onnxscript.optimizer

    path = Path(path)
    require_new(path)
    check_places([path])
    config = model.config
    minimum = config.multiple_of + 1
    # Two pictures of sizes that are neither whole windows nor equal: what is equal in the example is taken for equal.
    example = torch.zeros(2, config.num_channels, 3 * minimum, 4 * minimum + 1)
    with torch.no_grad(), _quiet(), _whole_keys():
        program = torch.onnx.export(
            _prepare(model),
            (example,),
            input_names=["pixel_values"],
            output_names=["reconstruction"],
            dynamic_shapes={"pixel_values": {0: "batch_size", 2: "height", 3: "width"}},
            dynamo=True,
            verbose=False,
            optimize=False,
        )
    assert program is not None
    # Once, and without asking for shapes: what torch does by default takes twice the time for a file as fast.
    onnxscript.optimizer.optimize(program.model, num_iterations=1, onnx_shape_inference=False)
    told = {"input_channels": config.num_channels, "output_channels": config.num_channels_out, "scale": config.scale}
    told |= {"minimum": minimum}
    program.model.metadata_props.update({name: str(value) for name, value in told.items()})
    content = program.model_proto.SerializeToString()
    difference = compare_onnx(content, model)
    with whole_file(path) as file:
        file.write(content)
    return ExportedFile(path, len(content), minimum, difference)


def compare_onnx(content: bytes, model: SemanIRForImageRestoration) -> float:
    """Largest difference between onnxruntime and the model over pictures of the smallest size, of odd sides, and two
    at once; a `FloatingPointError` if a pixel differs by a level of 8 bits, or all by a fortieth of one on average."""
    check_installed("onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    plain = _in_float32(model)
    unit, channels = model.config.multiple_of, model.config.num_channels
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for batch, height, width in ((1, unit + 1, unit + 1), (2, unit + 3, 2 * unit + 5)):
        images = torch.rand(batch, channels, height, width, generator=generator)
        with torch.no_grad():
            wanted = plain(images).reconstruction.numpy()
        found = np.asarray(session.run(None, {"pixel_values": images.numpy()})[0])
        difference = np.abs(found - wanted) if found.shape == wanted.shape else np.array(np.inf)
        # Written so that NaN does not pass.
        if not (difference.max() < _LARGEST and difference.mean() < _MEAN):
            raise FloatingPointError(
                f"onnxruntime and the model differ by up to {difference.max():.2g} on pictures of {height} x {width} "
                f"pixels, on average by {difference.mean():.2g}; allowed: {_LARGEST:.2g} and {_MEAN:.2g}. No file was "
                "written. Try other versions of torch, onnxscript and onnxruntime (constraints.txt names the tested)."
            )
        largest = max(largest, float(difference.max()))
    return largest


def _in_float32(model: SemanIRForImageRestoration) -> SemanIRForImageRestoration:
    return cast(SemanIRForImageRestoration, cast(nn.Module, copy.deepcopy(model)).cpu().float().eval())


def _prepare(model: SemanIRForImageRestoration) -> SemanIRForImageRestoration:
    """A copy in float32, in the plain steps, with all that is the same for each picture computed."""
    model = _in_float32(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, SemanIRAttention):
                # Its network of two layers has one result. Left in, half of it would be stored beside the weights.
                table = layer.position_bias(torch.zeros(1)).contiguous()
                del layer.position_bias
                vars(layer)["position_bias"] = lambda windows, table=table: table
    return model


# A dictionary has its keys as bits, which an image of megapixels needs and a graph does not: each selection would pack
# them and each layer unpack them again, a dozen steps of the graph each time, and torch's work grows with the steps.
# Both functions are each other's inverse, so that leaving out both changes nothing but the dtype between them. How we
# know: no file is written before `compare_onnx` has found the model's own pictures.
@contextmanager
def _whole_keys() -> Iterator[None]:
    """Keys as booleans in place of bits."""
    before = {name: getattr(ops_semanir, name) for name in ("pack_keys", "unpack_keys")}
    vars(ops_semanir).update(pack_keys=lambda chosen: chosen, unpack_keys=lambda bits, tokens: bits)
    try:
        yield
    finally:
        vars(ops_semanir).update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter warns itself of; what it says of our code is told."""
    # The exporter lists the operators of torchvision, which is not installed and not used.
    with log_level("torch.onnx._internal.exporter._registration", logging.ERROR), warnings.catch_warnings():
        for module in ("torch", "onnx", "onnxscript", "copyreg"):
            warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
        yield
