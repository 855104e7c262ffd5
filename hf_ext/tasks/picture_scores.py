"""Distances of a set of pictures to real ones, and the fit of pictures to their texts: read and summed in batches.

Means and covariances are summed, so memory does not grow with the number of pictures; the kernel distance keeps the
features of some pictures, drawn at random. Processes of `accelerate launch` share the pictures.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_ext.data.bad_examples import read_example
from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.distributed import Ranks, require_device
from hf_ext.files import check_places
from hf_ext.metrics.distances import FeatureStatistics, FeatureSums, frechet_distance, kernel_distance_of_subsets
from hf_ext.metrics.features import ClassifierFeatures, CLIPScores, InceptionFeatures
from hf_ext.progress import progress

from ..errors import DataError, MissingColumn, UsageError
from .diffusion_data import Crops, cut_view, weights_hash
from .pictures import in_colours, require_picture

# Pictures of a set whose features are kept for the kernel distance (82 MB), and samples of a subset of them.
KEPT, SUBSET = 10_000, 1000


def load_network(source: str, device: str, batch_size: int) -> tuple[Any, str, tuple[str, str]]:
    """A network of features, its hash, and how the distances in them are called: a classifier's are no FID."""
    if source.partition("#")[0].partition("@")[0].endswith((".pt", ".pth")):
        inception = InceptionFeatures(source, device, batch_size)
        return inception, inception.digest, ("fid", "kid")
    classifier = ClassifierFeatures(source, device, batch_size)
    return classifier, weights_hash(classifier.model), ("feature_distance", "kernel_distance")


def open_pictures(path: str, split: str, ranks: Ranks, least: int) -> tuple[Any, str]:
    """At least so many pictures of a folder, a file or a Hub id, and their column."""
    with ranks.first_before_others():
        data: Any = open_source(DataSource(path, split=split))
    columns = [name for name, feature in (data.features or {}).items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise DataError(f"{path} has no column of pictures; its columns are {sorted(data.features or {})}.")
    if len(data) < least:
        raise DataError(f"{path} has {len(data)} pictures; at least {least} are needed, better thousands.")
    return data, columns[0]


def read_batches(
    data: Any, column: str, size: int, ranks: Ranks, description: str, side: int | None = None
) -> Iterator[tuple[list[int], Any]]:
    """The share of this process: numbers and rows, whose pictures are RGB; with a side, their middle squares."""
    own = ranks.share([*range(len(data))])
    with progress(total=len(own), description=description, unit=" pictures", shown=ranks.index == 0) as bar:
        for start in range(0, len(own), size):
            numbers = own[start : start + size]
            # One by one: an error names its file.
            try:
                examples = [read_example(data, number) for number in numbers]
            except OSError as error:
                raise DataError(str(error)) from error
            rows = {name: [example[name] for example in examples] for name in examples[0]}
            pictures: list[Any] = [in_colours(require_picture(picture, column), "RGB") for picture in rows[column]]
            if side is not None:
                pictures = [cut_view(picture, (side, side), 3, Crops(), None).pixels for picture in pictures]
            yield numbers, {**rows, column: pictures}
            bar.update(len(numbers))


def score_texts(path: str, model: str, batch_size: int, device: str, ranks: Ranks) -> float:
    """The mean CLIP score of pictures and the texts beside them."""
    data, column = open_pictures(path, "train", ranks, 1)
    # The second is what webdataset calls them.
    texts = next((name for name in ("text", "txt") if name in data.features), None)
    if texts is None:
        advice = " for pictures with texts only, such as `hf-ext sample` writes for a text model"
        raise MissingColumn.of("text", data.features, "--clip", advice)
    with ranks.first_before_others():
        network = CLIPScores(model, device)
    own = []
    for numbers, rows in read_batches(data, column, batch_size, ranks, "texts"):
        for number, text in zip(numbers, rows[texts], strict=True):
            if not isinstance(text, str):
                raise DataError(f"{path}: picture {number + 1} has {text!r} as its text: give one, or remove it.")
        own.append(float(network(rows[column], rows[texts]).sum()))
    return sum(value for part in ranks.gather(own) for value in part) / len(data)


def see(
    path: str, split: str, network: Any, ranks: Ranks, description: str, side: int | None = None
) -> tuple[FeatureStatistics, np.ndarray]:
    """Statistics of the features of pictures, or of their middle squares, and the features of some."""
    data, column = open_pictures(path, split, ranks, 2)
    chosen = {*np.random.default_rng(0).permutation(len(data))[:KEPT].tolist()}
    sums, features, sizes = FeatureSums(), dict[int, np.ndarray](), set[tuple[int, int]]()
    for numbers, rows in read_batches(data, column, network.batch_size, ranks, description, side):
        try:
            found = network(rows[column])
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error
        sizes |= {picture.size for picture in rows[column]}
        sums.add(found)
        features |= {number: row for number, row in zip(numbers, found, strict=True) if number in chosen}
    joined = FeatureSums()
    for part, kept, others in ranks.gather((sums, features, sizes)):
        joined.join(part)
        features |= kept
        sizes |= others
    if isinstance(network, InceptionFeatures) and len(sizes) > 1:
        # A batch has one in any case, whatever pictures happen to stand in it.
        raise DataError(f"{path} has pictures of {len(sizes)} sizes, such as {sorted(sizes)[:3]}: resize them alike.")
    # In the order of the pictures, however many processes read them.
    return joined.statistics(), np.stack([features[number] for number in sorted(features)])


def score(
    pictures: str,
    reference: str | None = None,
    network: str | None = None,
    *,
    clip: str | None = None,
    split: str = "train",
    size: int | None = None,
    kernel: bool = False,
    keep: Path | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> dict[str, Any]:
    """Distances of pictures to real ones or to their texts by their names, and the numbers of pictures; the arguments
    are the options of `hf-ext dit score`. Statistics of `keep` know their network, and are refused with another."""
    pictures, reference = str(pictures), None if reference is None else str(reference)
    if (reference is None) != (network is None) or (network is None and (clip is None or kernel or keep)):
        raise UsageError("give REFERENCE and --network together (--kernel and --keep need both), or --clip alone.")
    if (size is not None or kernel) and (reference is None or reference.endswith(".npz")):
        option = "kernel" if size is None else "size"
        raise UsageError(f"{option} needs pictures as the reference, got {reference}: give some, or leave it out.")
    if keep is not None:
        if Path(keep).suffix != ".npz":
            raise UsageError(f"keep is {keep}, which must end with .npz: it could not be given as REFERENCE.")
        check_places([keep], [reference, pictures])
    ranks = Ranks()
    place, texts = require_device(ranks.own_device(device)), {}
    if clip is not None:
        texts["clip_score"] = score_texts(pictures, clip, batch_size, place, ranks)
    if reference is None or network is None:
        return texts
    with ranks.first_before_others():
        model, digest, (name, kernel_name) = load_network(network, place, batch_size)
    if reference.endswith(".npz"):
        real, of_real = FeatureStatistics.load(reference), np.zeros((0, 0))
    else:
        real, of_real = see(reference, split, model, ranks, "reference", size)
    if real.network not in (None, digest):
        raise DataError(f"{reference} is of network {real.network}, not {network}: use that, or pictures.")
    if keep is not None and ranks.index == 0:
        replace(real, network=digest).save(keep)
    made, of_made = see(pictures, "train", model, ranks, "pictures")
    found: dict[str, Any] = {name: frechet_distance(made, real)}
    if kernel:
        size = min(SUBSET, len(of_made), len(of_real))
        found[kernel_name], spread = kernel_distance_of_subsets(of_made, of_real, subset_size=size)
        found[f"{kernel_name}_standard_deviation"] = spread
    return {**texts, **found, "pictures": made.count, "reference_pictures": real.count}
