"""Distances of a set of pictures to real ones, in the features of a network: read and summed batch by batch.

Means and covariances are summed, so memory does not grow with the number of pictures; the kernel distance keeps the
features of some pictures, drawn at random. Processes of `accelerate launch` share the pictures.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.distributed import Ranks
from hf_ext.metrics import (
    ClassifierFeatures,
    FeatureStatistics,
    FeatureSums,
    InceptionFeatures,
    frechet_distance,
    kernel_distance_of_subsets,
)
from hf_ext.progress import progress

from ..errors import DataError, UsageError
from .pictures import in_colours

# Pictures of a set whose features are kept for the kernel distance (82 MB), and samples of a subset of them.
KEPT, SUBSET = 10_000, 1000


@dataclass
class Seen:
    """Statistics of the features of a set of pictures, and the features of some."""

    statistics: FeatureStatistics
    features: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))


def load_network(source: str, device: str, batch_size: int) -> tuple[Any, tuple[str, str]]:
    """A network of features, and how the distances in them are called: a classifier's are no FID."""
    if source.partition("@")[0].endswith((".pt", ".pth")):
        return InceptionFeatures(source, device, batch_size), ("fid", "kid")
    return ClassifierFeatures(source, device, batch_size), ("feature_distance", "kernel_distance")


def see(path: str, split: str, network: Any, ranks: Ranks, description: str) -> Seen:
    """Reads pictures of a folder, a file or a Hub id; or statistics, of a file `.npz`."""
    if path.endswith(".npz"):
        return Seen(FeatureStatistics.load(path))
    with ranks.first_before_others():
        data: Any = open_source(DataSource(path, split=split), description)
    columns = [name for name, feature in (data.features or {}).items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise DataError(f"{path} has no column of pictures; it has {sorted(data.features or {})}.")
    chosen = {*np.random.default_rng(0).permutation(len(data))[:KEPT].tolist()}
    own, sums = ranks.share([*range(len(data))]), FeatureSums()
    features: dict[int, np.ndarray] = {}
    with progress(total=len(own), description=description, unit=" pictures", shown=ranks.index == 0) as bar:
        for start in range(0, len(own), network.batch_size):
            numbers = own[start : start + network.batch_size]
            found = network([in_colours(picture, "RGB") for picture in data[numbers][columns[0]]])
            sums.add(found)
            features |= {number: row for number, row in zip(numbers, found, strict=True) if number in chosen}
            bar.update(len(numbers))
    joined = FeatureSums()
    for part, rows in ranks.gather((sums, features)):
        joined.join(part)
        features |= rows
    # In the order of the pictures, however many processes read them.
    return Seen(joined.statistics(), np.stack([features[number] for number in sorted(features)]))


def score(
    pictures: str,
    reference: str,
    network: str,
    *,
    split: str = "train",
    kernel: bool = False,
    keep: Path | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> dict[str, Any]:
    """
    Compares pictures with real ones.

    Args:
        pictures (`str`): Folder, file or Hub id of the pictures.
        reference (`str`): The same of real ones; or their statistics, an `.npz` file with `mu` and `sigma`.
        network (`str`): The TorchScript file of the Inception network, or `org/name/file.pt` of the Hub: FID. Or a
            classifier of transformers, folder or Hub id: the same distance of its features.
        split (`str`, defaults to `"train"`): Of the reference.
        kernel (`bool`, defaults to `False`): Measure the kernel distance (KID) too.
        keep (`Path`, *optional*): Where the statistics of the reference are written, for the next time.
        batch_size (`int`, defaults to 64): Pictures at once.
        device (`str`, *optional*): The GPU if there is one.

    Returns:
        `dict`: The distances by their names, and how many pictures of each set they come from.
    """
    if kernel and reference.endswith(".npz"):
        raise UsageError(f"{reference} has means and covariances: a kernel distance needs the pictures themselves.")
    ranks = Ranks()
    with ranks.first_before_others():
        model, (name, kernel_name) = load_network(network, ranks.own_device(device), batch_size)
    real = see(reference, split, model, ranks, "reference")
    if keep is not None and ranks.index == 0:
        real.statistics.save(keep)
    made = see(pictures, "train", model, ranks, "pictures")
    found: dict[str, Any] = {name: frechet_distance(made.statistics, real.statistics)}
    if kernel:
        size = min(SUBSET, len(made.features), len(real.features))
        found[kernel_name], spread = kernel_distance_of_subsets(made.features, real.features, subset_size=size)
        found[f"{kernel_name}_standard_deviation"] = spread
    return {**found, "pictures": made.statistics.count, "reference_pictures": real.statistics.count}
