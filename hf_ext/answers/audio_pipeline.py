"""`pipeline("audio-classification", model=...)` where hf_ext is installed: MRConv takes sounds of every kind."""
# transformers' base class annotates its hooks more narrowly than its own pipelines use them, and some not at all.
# mypy: disable-error-code="no-untyped-call,override"

import math
import os
from collections import Counter
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AudioClassificationPipeline as PlainPipeline
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import logging

from ..errors import DataError
from ..mrconv.feature_extraction_mrconv import as_array, full_scale

logger = logging.get_logger(__name__)
# Parts of a long recording that are classified at once.
_PARTS = 8


class AudioClassificationPipeline(PlainPipeline):
    """
    Classify sounds. With an [`MRConvForAudioClassification`] a sound may have any rate, channels and length, and files
    are read without ffmpeg; other models are used as transformers does.

    The channels are averaged, and a rate that is not the model's is changed. Of a recording that is longer than those
    of the training the answers to its parts are averaged, each of which begins in the middle of the one before.
    """

    feature_extractor: Any

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """
        Classify one sound or several.

        Args:
            inputs (`str`, `Path`, `bytes`, `np.ndarray`, `torch.Tensor`, `dict`, or a list, data set or generator):
                A file, an address, what is in a file, or samples at the model's rate, of shape `(samples,)` or with
                channels, of which there are fewer than samples; floats, int16 or int32. A `dict` has `raw` or `array`
                and the `sampling_rate` in Hz, or `bytes` and `path`, as undecoded sounds of `datasets`.
            top_k (`int`, *optional*): How many classes; by default all of them.
            function_to_apply (`str`, *optional*): `"softmax"`, `"sigmoid"` or `"none"`; by the model's kind of problem
                if not given. Parts are averaged after it.
            batch_size (`int`, *optional*): Changes nothing with an MRConv: each recording is classified by itself.

        Returns:
            `list[dict]`: `score` and `label` of each class, the likeliest first; a list of these for several sounds.

        Raises:
            DataError: If a sound cannot be read or fetched, or has no samples of a known type or no known rate.
        """
        if self._is_mrconv():
            kwargs["batch_size"] = 1
            inputs = str(inputs) if isinstance(inputs, Path) else inputs
        # Of none, transformers looks for the first.
        return [] if isinstance(inputs, list | tuple) and not inputs else super().__call__(inputs, **kwargs)

    def _is_mrconv(self) -> bool:
        return bool(self.model.config.model_type == "mrconv")

    def preprocess(self, inputs: Any) -> Any:
        """The parts of a sound, which are views of its samples."""
        if not self._is_mrconv():
            return super().preprocess(inputs)
        name, rate = inputs if isinstance(inputs, str) else "a recording", self.feature_extractor.sampling_rate
        if (own := self.model.config.sampling_rate) not in (None, rate):
            raise DataError(f"the model takes {own} Hz, its feature extractor {rate} Hz: give one of {own} Hz.")
        return {"parts": self._split(_read(inputs, rate), name)}

    def _split(self, samples: np.ndarray, name: str) -> list[np.ndarray]:
        longest = self.model.config.longest_input
        if longest is None or len(samples) <= longest:
            return [samples]
        starts = [*range(0, len(samples) - longest, max(1, longest // 2)), len(samples) - longest]
        rate = self.feature_extractor.sampling_rate
        logger.warning(f"{name} lasts {len(samples) / rate:.3g} s: the answers to {len(starts)} parts are averaged.")
        return [samples[start : start + longest] for start in starts]

    def _forward(self, model_inputs: Any) -> Any:
        if not self._is_mrconv():
            return super()._forward(model_inputs)
        parts, found = model_inputs["parts"], []
        options = {"sampling_rate": self.feature_extractor.sampling_rate, "return_tensors": "pt"}
        for start in range(0, len(parts), _PARTS):
            given = self.feature_extractor(parts[start : start + _PARTS], **options)
            found.append(self.model(**given.to(self.device, dtype=self.dtype)).logits)
        return SequenceClassifierOutput(logits=torch.cat(found))

    def postprocess(self, model_outputs: Any, top_k: int = 5, function_to_apply: str | None = None) -> Any:
        """The mean score of each class over all parts, the largest first."""
        if not self._is_mrconv():
            return super().postprocess(model_outputs, top_k, function_to_apply)
        rows, sums = model_outputs.logits, Counter[str]()
        for row in rows:
            one = SequenceClassifierOutput(logits=row[None])
            for item in super().postprocess(one, rows.shape[-1], function_to_apply):
                sums[item["label"]] += item["score"] / len(rows)
        return [{"score": score, "label": label} for label, score in sums.most_common(top_k)]


def _read(given: Any, rate: int) -> np.ndarray:
    """The samples of a sound at a rate, in one channel."""
    # What reads files is imported when it is needed: `import hf_ext` imports this file.
    from hf_ext.data.files import read_recording

    if hasattr(given, "get_all_samples"):
        samples = given.get_all_samples()  # of torchcodec
        given = {"array": samples.data, "sampling_rate": samples.sample_rate}
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        given = _fetch(given)
    if isinstance(given, str | os.PathLike):
        given = {"path": os.fspath(given)}
    elif isinstance(given, bytes):
        given = {"bytes": given}
    if not isinstance(given, dict):
        return _mix(given)
    raw = next((given[key] for key in ("raw", "array") if given.get(key) is not None), None)
    own: Any = given.get("sampling_rate")
    place, content = given.get("path"), given.get("bytes")
    if raw is None and (place, content) != (None, None):
        return read_recording({"path": place, "bytes": content}, rate)
    if raw is None or not isinstance(own, Real) or isinstance(own, bool) or not 0 < float(own) < math.inf:
        told = f"{sorted(given)} with the sampling_rate {own!r}"
        raise DataError(f"a dict of a sound has raw or array and a sampling_rate in Hz, or bytes or path, not {told}.")
    samples = _mix(raw)
    if own == rate:
        return samples
    from hf_ext.extras import import_extra

    return np.asarray(import_extra("soxr").resample(samples, own, rate))


def _fetch(address: str) -> bytes:
    import httpx2

    try:
        return httpx2.get(address, follow_redirects=True, timeout=60).raise_for_status().content
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise DataError(f"{address} cannot be fetched: {error}") from error


def _mix(samples: Any) -> np.ndarray:
    """Samples as floats of one channel."""
    values = as_array(samples)
    known = values.dtype.kind == "f" or values.dtype in (np.int16, np.int32)
    if values.ndim not in (1, 2) or not values.size or not known:
        told = f"{values.dtype} of shape {values.shape}"
        raise DataError(f"a sound has floats, int16 or int32 of shape (samples,), or with channels, not {told}.")
    values = full_scale(values)
    return values.mean(int(np.argmin(values.shape))) if values.ndim == 2 else values


# In place of transformers' own, which it is for all other models. No registration: that would warn, and mark the class
# as one whose code is saved beside a model.
PIPELINE_REGISTRY.supported_tasks["audio-classification"]["impl"] = AudioClassificationPipeline
