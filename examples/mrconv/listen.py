"""python examples/mrconv/listen.py RECORDING.wav [--model MODEL] [--output listen.png]

Says which digits are spoken while the sound comes in, 10 ms at a time, and draws how long each of these steps took.
The model is the released `spoken-digits`, merged; the recording is 16-bit mono at its rate of 8 kHz. The app
listens to a microphone.
"""

import argparse
import gc
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import hf_ext
from hf_ext.audio_stream import PAUSE, STEP, Listener


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


def cut(samples: np.ndarray, rate: int) -> Iterator[np.ndarray]:
    """Steps of a recording, and then of silence, which ends its last word."""
    sound = np.concatenate([samples / 32768, np.zeros(int(1.5 * PAUSE * rate))])
    size = int(STEP * rate)
    yield from (sound[place : place + size] for place in range(0, len(sound), size))


def draw(sound: np.ndarray, rate: int, words: list[tuple[float, int]], times: list[float], path: str) -> None:
    """The waveform with the digits where they were said, and the milliseconds of each step below it."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(np.arange(len(sound)) / rate, sound, linewidth=0.4)
    for second, digit in words:
        above.text(second, float(np.abs(sound).max()), str(digit), ha="right", va="top", fontsize=16)
    below.plot(STEP * np.arange(len(times)), times, linewidth=0, marker=".", markersize=3)
    below.axhline(1000 * STEP, color="tab:red", linewidth=0.8, label="time that a step may take")
    below.set(xlabel="seconds", ylabel="ms of a step", ylim=(0, None))
    below.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording")
    parser.add_argument("--model", default=hf_ext.released("spoken-digits"))
    parser.add_argument("--output", default="listen.png")
    words = parser.parse_args()
    path, formats = Path(words.output), sorted(Figure().canvas.get_supported_filetypes())
    if not path.parent.is_dir():
        parser.error(f"--output {path}: there is no folder {path.parent}; make it first")
    if path.suffix[1:].lower() not in formats:
        parser.error(f"--output {path}: no format of pictures; give a name that ends with one of {', '.join(formats)}")
    samples, found = read_wave(words.recording)
    torch.set_num_threads(1)
    try:
        listener = Listener(words.model)
    except (OSError, ValueError) as error:
        sys.exit(f"--model {words.model}: {error}")
    rate = listener.rate
    if found != rate:
        sys.exit(f"{words.recording} has {found} samples a second; the model hears {rate}. Convert it to that rate.")
    # What has been loaded stays: the garbage collector need not look through it in the middle of a word.
    gc.freeze()
    sound, heard, times = [], [], []
    for step in cut(samples, rate):
        sound.append(step)
        begin = time.perf_counter()
        digit = listener.hear(step)
        times.append(1000 * (time.perf_counter() - begin))
        if digit is not None:
            heard.append((len(times) * STEP, digit))
            print(f"{heard[-1][0]:.2f} s: {digit}", flush=True)
    active = np.array(times)
    print(f"a step of {1000 * STEP:.0f} ms took {active.mean():.2f} ms on average and {active.max():.2f} at most")
    draw(np.concatenate(sound), rate, heard, times, words.output)


if __name__ == "__main__":
    main()
