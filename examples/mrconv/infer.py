"""python examples/mrconv/infer.py MODEL RECORDING.wav [--merge]

Says which class a recording belongs to; with --merge the model's branches become one kernel a layer first.
"""

import sys
import wave

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification

import hf_ext  # noqa: F401  registers MRConv with the Auto classes


def read_wave(path: str) -> tuple[np.ndarray, int]:
    """The samples of a 16-bit mono WAV file, and their rate."""
    try:
        with wave.open(path) as file:
            if file.getsampwidth() != 2 or file.getnchannels() != 1:
                sys.exit(
                    f"{path} must be 16-bit mono, it has {file.getnchannels()} channels of {file.getsampwidth()} bytes"
                )
            return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2"), file.getframerate()
    except (OSError, EOFError, wave.Error) as error:
        sys.exit(f"{path} cannot be read as a WAV file ({error or 'it ends too early'}): give a 16-bit mono one.")


def classify(model_id: str, path: str, merge: bool) -> str:
    """The name of the most likely class."""
    extractor = AutoFeatureExtractor.from_pretrained(model_id)
    model = AutoModelForAudioClassification.from_pretrained(model_id).eval()
    if merge:
        model.reparameterize()
    samples, rate = read_wave(path)
    with torch.no_grad():
        logits = model(**extractor(samples, sampling_rate=rate, return_tensors="pt")).logits
    return model.config.id2label[int(logits.argmax())]


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--merge"]):
        sys.exit(__doc__)
    print(classify(sys.argv[1], sys.argv[2], len(sys.argv) == 4))
