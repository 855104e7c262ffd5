"""Failures of the disk and of the caches of libraries, which are none of the data."""

import errno
import os
from pathlib import Path

import datasets
from huggingface_hub.constants import HF_HUB_CACHE


class CacheError(OSError):
    """The cache of the machine, not the data, cannot be used."""


def refuse_cache(error: BaseException | None) -> None:
    """Raises a [`CacheError`] where a disk or the cache of a library is the cause of an error."""
    caches = [*map(Path, (datasets.config.HF_DATASETS_CACHE, datasets.config.HF_MODULES_CACHE, HF_HUB_CACHE))]
    found = error
    while found is not None:
        if isinstance(found, OSError):
            # What is in the way of a cache may be a folder above it.
            place = Path(os.fsdecode(found.filename)) if isinstance(found.filename, str | bytes) else None
            at_cache = place and any(cache.is_relative_to(place) or place.is_relative_to(cache) for cache in caches)
            if at_cache or found.errno in (errno.ENOSPC, errno.EDQUOT) or "disk space" in str(found):
                told = "set HF_HOME or HF_DATASETS_CACHE to a folder with space where you may write"
                raise CacheError(f"the cache {caches[0]} cannot be used ({found}): {told}.") from error
        found = found.__cause__
