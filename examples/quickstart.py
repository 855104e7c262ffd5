"""The whole way in a few minutes on two cores: train, publish, pull and use small models of each method.

1. Photographs that ship inside scikit-image are written to quickstart/scikit-image-photos.
2. `accelerate launch` trains the released `denoise-color` on: with five of them and noise of σ = 75. It knew up to 55.
3. The snapshot is pushed to a Hub that runs on this machine (`hf-ext hub serve` is the same server).
4. A process that cannot import hf_ext pulls it and restores three photographs it never saw.
5. quickstart/before_after.png compares it with total-variation denoising tuned on the training photographs.
6. Three short fine-tunes of it (σ = 15, σ = 50, JPEG) are merged into one artifact that switches between them.
7. A small MRConv learns handwritten digits pixel by pixel; its branches are merged, it is pushed, pulled and used.
8. A tiny Disentangled DiT learns to draw digits of a class; pushed and pulled, it draws the same pictures.

Running it again continues where it stopped; delete the folder `quickstart` to start anew.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data
from skimage.restoration import denoise_tv_chambolle

import hf_ext
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.hub.publish import push
from hf_ext.metrics.psnr import psnr

SIGMA = 75
REPOSITORY = "quickstart/semanir-denoise"
EXAMPLES = Path(__file__).resolve().parent
TILE = 128
PHOTOS = "scikit-image-photos"


def training_photos() -> dict[str, np.ndarray]:
    """Photographs to learn from; both views of the motorcycle are one scene, so one of them is enough."""
    return {
        "coffee": data.coffee(),
        "motorcycle": data.stereo_motorcycle()[0],
        "hubble": data.hubble_deep_field(),
        "retina": data.retina()[300:1068, 300:1068],
        "immunohistochemistry": data.immunohistochemistry(),
    }


def unseen_photos() -> dict[str, np.ndarray]:
    """The middles of photographs that training never touches."""
    return {
        "astronaut": middle(data.astronaut()),
        "chelsea": middle(data.chelsea()),
        "rocket": middle(data.rocket()),
    }


def write_photos(folder: Path) -> None:
    """Training photographs in tiles, which decode faster than whole pictures, and the unseen ones."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, photo in training_photos().items():
        height, width = photo.shape[:2]
        for top in range(0, height - TILE + 1, TILE):
            for left in range(0, width - TILE + 1, TILE):
                tile = Image.fromarray(photo[top : top + TILE, left : left + TILE])
                tile.save(folder / "train" / f"{name}-{top}-{left}.png")
    for name, photo in unseen_photos().items():
        Image.fromarray(photo).save(folder / "test" / f"{name}.png")


def photo_source(folder: Path) -> dict[str, object]:
    """The data section of a training on the photographs."""
    return {"data.train.path": folder / PHOTOS, "data.eval.path": folder / PHOTOS}


def add_noise(photo: np.ndarray, seed: int, sigma: float = SIGMA) -> np.ndarray:
    """Float picture, white at 1, with Gaussian noise that is neither clipped nor rounded."""
    noise = np.random.default_rng(seed).standard_normal(photo.shape, dtype=np.float32)
    return photo.astype(np.float32) / 255 + np.float32(sigma / 255) * noise


def middle(picture: np.ndarray, side: int = 256) -> np.ndarray:
    """A square of the middle."""
    top, left = ((length - side) // 2 for length in picture.shape[:2])
    return picture[top : top + side, left : left + side]


def train(method: str, changes: dict[str, object]) -> None:
    """A training run of a method's quickstart.yaml, as anyone would start it."""
    overrides = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    # accelerate gives a process one thread where it is not told otherwise.
    options = {"num_processes": 1, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    options["num_cpu_threads_per_process"] = os.cpu_count() or 1
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    config = EXAMPLES / method / "quickstart.yaml"
    # Threads that spin while they wait lose much time on a machine that does something else as well.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **os.environ}
    run([*launcher, "-m", "hf_ext.training", str(config), *overrides], environment)


def run(command: list[str], environment: dict[str, str]) -> None:
    """A command in a process of its own; its failure ends the quickstart."""
    code = subprocess.run(command, env=environment).returncode
    if code:
        sys.exit(f"quickstart stopped: {' '.join(command[:4])} … ended with exit code {code}; its message is above.")


def push_and_use(folder: Path, hub: EmbeddedHub, model: Path, repository: str, script: str, *words: str | Path) -> str:
    """
    Pushes a model and runs a script in a process that knows the Hub's address and nothing of hf_ext; the commit. Its
    caches are its own: it has never seen the model, so the push need not load it without hf_ext as well.
    """
    commit = push(model, repository, endpoint=hub.url, check=False).oid
    print(f"pushed to {hub.url}/{repository} as commit {commit[:12]}")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder.resolve() / "hf-home")}
    run([sys.executable, str(EXAMPLES / script), repository, commit, *map(str, words)], environment)
    return commit


def push_and_restore(folder: Path, noisy: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Photographs as the pushed model restores them elsewhere."""
    files: list[Path] = []
    (folder / "restored").mkdir(exist_ok=True)
    for name, photo in noisy.items():
        np.save(folder / "restored" / f"{name}-noisy.npy", photo)
        files += [folder / "restored" / f"{name}{end}.npy" for end in ("-noisy", "")]
    with EmbeddedHub(folder / "hub") as hub:
        push_and_use(folder, hub, folder / "run" / "snapshot", REPOSITORY, "pull_and_restore.py", *files)
    return {name: np.load(folder / "restored" / f"{name}.npy") for name in noisy}


def tune_total_variation() -> float:
    """The best of 12 weights on the middles of the training photographs."""
    clean = [middle(photo) for photo in training_photos().values()]
    noisy = [add_noise(photo, 100 + index) for index, photo in enumerate(clean)]

    def mean_psnr(weight: float) -> float:
        pairs = zip(noisy, clean, strict=True)
        return float(np.mean([score(total_variation(photo, weight), target) for photo, target in pairs]))

    return max(np.geomspace(0.03, 0.3, 12).tolist(), key=mean_psnr)


def total_variation(photo: np.ndarray, weight: float) -> np.ndarray:
    """The classical method to beat."""
    return denoise_tv_chambolle(photo, weight=weight, channel_axis=-1)


def score(restored: np.ndarray, photo: np.ndarray) -> float:
    """PSNR over RGB, after rounding to 8 bits."""
    if restored.dtype == np.uint8:
        return psnr(restored, photo, channel="rgb")
    return psnr(restored, photo.astype(np.float32) / 255, channel="rgb", data_range=1.0)


def draw(rows: dict[str, dict[str, np.ndarray]], scores: dict[str, dict[str, float]], path: Path) -> None:
    """One row for each photograph: noisy, total variation, the released model, ours, clean."""
    from matplotlib import pyplot

    columns = list(next(iter(rows.values())))
    figure, axes = pyplot.subplots(len(rows), len(columns), figsize=(3.2 * len(columns), 3.4 * len(rows)))
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for axis, column in zip(line, columns, strict=True):
            picture = pictures[column]
            axis.imshow(picture if picture.dtype == np.uint8 else np.clip(picture, 0, 1))
            decibels = f", {scores[name][column]:.2f} dB" if column in scores[name] else f" ({name})"
            axis.set_title(column + decibels, fontsize=10)
            axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """All steps; the exit code says whether the trained model won."""
    started = time.monotonic()
    folder = Path("quickstart")
    write_photos(folder / PHOTOS)
    train("semanir", {**photo_source(folder), "output_dir": folder / "run"})
    seconds = json.loads((folder / "run" / "snapshot" / "training.json").read_text())["seconds"]

    photos = unseen_photos()
    noisy = {name: add_noise(photo, index) for index, (name, photo) in enumerate(photos.items())}
    restored = push_and_restore(folder, noisy)
    released = hf_ext.SemanIRForImageRestoration.from_pretrained(hf_ext.released("denoise-color")).eval()
    as_released = {name: hf_ext.restore_image(released, photo) for name, photo in noisy.items()}
    weight = tune_total_variation()
    smooth = {name: total_variation(photo, weight) for name, photo in noisy.items()}
    rows = {
        name: {
            "noisy": noisy[name],
            "total variation": smooth[name],
            "released": as_released[name],
            "trained on": restored[name],
            "clean": photo,
        }
        for name, photo in photos.items()
    }
    scores = {
        name: {column: score(picture, photos[name]) for column, picture in pictures.items() if column != "clean"}
        for name, pictures in rows.items()
    }
    draw(rows, scores, folder / "before_after.png")
    means = {column: float(np.mean([line[column] for line in scores.values()])) for column in scores["rocket"]}
    print(f"\nPSNR in dB at σ = {SIGMA}, mean over {', '.join(photos)}:")
    for column, value in means.items():
        print(f"  {column:16} {value:6.2f}")
    margin = means["trained on"] - means["total variation"]
    (folder / "result.json").write_text(json.dumps({"psnr": scores, "mean": means, "margin": margin}, indent=2) + "\n")
    print(f"Trained on for {seconds:.0f} s, it is {margin:+.2f} dB from total variation (weight {weight:.3f}).")
    print(f"picture: {folder / 'before_after.png'}")
    for script in ("emr/quickstart_merge.py", "mrconv/quickstart_digits.py", "disentangled_dit/quickstart_samples.py"):
        run([sys.executable, str(EXAMPLES / script), str(folder)], dict(os.environ))
    print(f"{time.monotonic() - started:.0f} s in all")
    if margin < 1:
        sys.exit("the trained model should be at least 1 dB better: something is wrong with this run.")


if __name__ == "__main__":
    main()
