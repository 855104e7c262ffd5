"""Distances of a set of pictures to real ones, and the fit of pictures to their texts: read and summed in batches.

Means and covariances are summed, so memory does not grow with the number of pictures; the kernel distance keeps the
features of some pictures, drawn at random. Processes of `accelerate launch` share the pictures, or the tar files.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_ext.data.bad_examples import BadExamples, describe_bad
from hf_ext.data.files import UNUSABLE
from hf_ext.data.source import DataSource
from hf_ext.distributed import Ranks, require_device
from hf_ext.files import check_places
from hf_ext.metrics.distances import FeatureStatistics, FeatureSums, frechet_distance, kernel_distance_of_subsets
from hf_ext.metrics.features import ClassifierFeatures, CLIPScores, InceptionFeatures
from hf_ext.progress import progress

from ..errors import DataError, MissingColumn, UsageError
from .diffusion_data import Crops, cut_view, weights_hash
from .pictures import in_colours, require_picture
from .precompute_sources import name_unusable, open_pictures

logger = logging.getLogger(__name__)
# Pictures of a set whose features are kept for the kernel distance (82 MB, twice that while reading), and samples of
# a subset of them.
KEPT, SUBSET = 10_000, 1000


def load_network(source: str, device: str, batch_size: int) -> tuple[Any, str, tuple[str, str]]:
    """A network of features, its hash, and how the distances in them are called: a classifier's are no FID."""
    if source.partition("#")[0].partition("@")[0].endswith((".pt", ".pth")):
        inception = InceptionFeatures(source, device, batch_size)
        return inception, inception.digest, ("fid", "kid")
    classifier = ClassifierFeatures(source, device, batch_size)
    return classifier, weights_hash(classifier.model), ("feature_distance", "kernel_distance")


class Pictures:
    """Pictures of a folder, a file or a Hub id, read as `precompute` reads them; a share of bad ones is left out."""

    def __init__(self, path: str, split: str, ranks: Ranks, share: float = 0.0):
        self.path, self.ranks, self.share, self.read = path, ranks, share, 0
        self.bad = list[dict[str, str]]()
        with ranks.first_before_others():
            self.data = open_pictures(DataSource(path, split=split))
        columns = [name for name, feature in self.data.features.items() if isinstance(feature, datasets.Image)]
        if not columns:
            raise DataError(f"{path} has no column of pictures; its columns are {sorted(self.data.features)}.")
        self.column = columns[0]

    def batches(self, size: int, description: str, side: int | None = None) -> Iterator[dict[tuple[int, int], Any]]:
        """The share of this process by part and number: rows with RGB pictures; with a side, their middle squares."""
        rows, shown = dict[tuple[int, int], Any](), self.ranks.index == 0
        with progress(total=self.data.count, description=description, unit=" pictures", shown=shown) as bar:
            for key, load in self.data.share(self.ranks, self.column):
                self.read += 1
                try:
                    row = load()
                    picture: Any = in_colours(require_picture(row[self.column], self.column), "RGB")
                    if side is not None:
                        picture = cut_view(picture, (side, side), 3, Crops(), None).pixels
                    rows[key] = {**row, self.column: picture}
                except UNUSABLE as error:
                    self.bad.append(name_unusable(self.data, key[1], error))
                    self.require_few(self.bad, self.data.count, self.read * self.ranks.count)
                if len(rows) == size:
                    yield rows
                    # The other processes are as fast as this one.
                    bar.update(size * self.ranks.count)
                    rows = {}
            if rows:
                yield rows

    def require_few(self, bad: list[dict[str, str]], count: int | None, read: int) -> None:
        """Raises a DataError where more are bad than may be."""
        if len(bad) > BadExamples(self.share, count).count_allowed(read):
            told, advice = f"{self.path}: {describe_bad(bad[-1])} Restore the file or remove it", "."
            if self.share:
                advice = f"; with it {len(bad)} cannot be used, more than max_bad_examples {self.share:g} allows."
            raise DataError(told + advice)

    def join(self) -> int:
        """The number of pictures that all processes read; what they left out is what this one left out."""
        found = self.ranks.gather((self.bad, self.read))
        self.bad, read = [row for bad, _ in found for row in bad], sum(number for _, number in found)
        self.require_few(self.bad, read, read)
        for row in self.bad if self.ranks.index == 0 else ():
            logger.warning("left out of %s: %s", self.path, describe_bad(row))
        return read - len(self.bad)


def score_texts(path: str, model: str, batch_size: int, device: str, ranks: Ranks) -> float:
    """The mean CLIP score of pictures and the texts beside them."""
    pictures = Pictures(path, "train", ranks)
    # The second is what webdataset calls them.
    texts = next((name for name in ("text", "txt") if name in pictures.data.features), None)
    if texts is None:
        advice = " for pictures with texts only, such as `hf-ext sample` writes for a text model"
        raise MissingColumn.of("text", pictures.data.features, "--clip", advice)
    with ranks.first_before_others():
        network = CLIPScores(model, device)
    own = []
    for rows in pictures.batches(batch_size, "texts"):
        for (_, number), row in rows.items():
            if not isinstance(row[texts], str):
                name = row.get("__key__", number + 1)
                raise DataError(f"{path}: picture {name} has {row[texts]!r} as its text: give one, or remove it.")
        columns = ([row[name] for row in rows.values()] for name in (pictures.column, texts))
        own.append(float(network(*columns).sum()))
    total = sum(value for part in ranks.gather(own) for value in part)
    if (count := pictures.join()) < 1:
        raise DataError(f"{path} has no pictures.")
    return total / count


def choose(features: dict[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    """Some of the features, drawn at random by their places: the same, whoever read them."""
    drawn = sorted(features, key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    return {key: features[key] for key in drawn[:KEPT]}


def see(
    pictures: Pictures, network: Any, description: str, side: int | None = None
) -> tuple[FeatureStatistics, np.ndarray]:
    """Statistics of the features of pictures, or of their middle squares, and the features of some."""
    path, column, sizes = pictures.path, pictures.column, set[Any]()
    sums, features = FeatureSums(), dict[tuple[int, int], np.ndarray]()
    for rows in pictures.batches(network.batch_size, description, side):
        images = [row[column] for row in rows.values()]
        try:
            found = network(images)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error
        sizes |= {picture.size for picture in images}
        sums.add(found)
        features |= dict(zip(rows, found, strict=True))
        if len(features) > 2 * KEPT:
            features = choose(features)
    joined = FeatureSums()
    for part, kept, others in pictures.ranks.gather((sums, choose(features), sizes)):
        joined.join(part)
        features |= kept
        sizes |= others
    if (count := pictures.join()) < 2:
        raise DataError(f"{path} has {count} usable pictures; at least 2 are needed, better thousands.")
    if isinstance(network, InceptionFeatures) and len(sizes) > 1:
        # A batch has one in any case, whatever pictures happen to stand in it.
        raise DataError(f"{path} has pictures of {len(sizes)} sizes, such as {sorted(sizes)[:3]}: resize them alike.")
    # In the order of the pictures, however many processes read them.
    return joined.statistics(), np.stack([row for _, row in sorted(choose(features).items())])


def score(
    pictures: str,
    reference: str | None = None,
    network: str | None = None,
    *,
    clip: str | None = None,
    split: str = "train",
    size: int | None = None,
    max_bad_examples: float = 0.001,
    kernel: bool = False,
    keep: Path | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> dict[str, Any]:
    """Distances of pictures to real ones or to their texts by their names, and the numbers of pictures; the arguments
    are the options of `hf-ext dit score`. Statistics of `keep` know their network, and are refused with another. Of
    the pictures none may be bad, of the reference a share, which is left out and named in the log."""
    pictures, reference = str(pictures), None if reference is None else str(reference)
    if (reference is None) != (network is None) or (network is None and (clip is None or kernel or keep)):
        raise UsageError("give REFERENCE and --network together (--kernel and --keep need both), or --clip alone.")
    if (size is not None or kernel) and (reference is None or reference.endswith(".npz")):
        option = "kernel" if size is None else "size"
        raise UsageError(f"{option} needs pictures as the reference, got {reference}: give some, or leave it out.")
    if pictures.endswith(".npz"):
        raise UsageError(f"PICTURES is {pictures}, and REFERENCE alone may be statistics: give pictures.")
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
    bad: list[dict[str, str]] = []
    if reference.endswith(".npz"):
        real, of_real = FeatureStatistics.load(reference), np.zeros((0, 0))
    else:
        opened = Pictures(reference, split, ranks, max_bad_examples)
        (real, of_real), bad = see(opened, model, "reference", size), opened.bad
    if real.network not in (None, digest):
        raise DataError(f"{reference} is of network {real.network}, not {network}: use that, or pictures.")
    if keep is not None and ranks.index == 0:
        replace(real, network=digest).save(keep)
    made, of_made = see(Pictures(pictures, "train", ranks), model, "pictures")
    found: dict[str, Any] = {name: frechet_distance(made, real)}
    if kernel:
        size = min(SUBSET, len(of_made), len(of_real))
        found[kernel_name], spread = kernel_distance_of_subsets(of_made, of_real, subset_size=size)
        found[f"{kernel_name}_standard_deviation"] = spread
    found |= {"pictures": made.count, "reference_pictures": real.count}
    return {**texts, **found, **({"reference_pictures_left_out": len(bad)} if bad else {})}
