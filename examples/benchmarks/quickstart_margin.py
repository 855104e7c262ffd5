"""The quickstart's margin over total variation for several seeds of training.

python examples/benchmarks/quickstart_margin.py [SEED …]     (0, 1 and 2 when none is given; about 4 minutes each)
Restores with the snapshot in this process; push and pull are the quickstart's own business. An interrupted call
continues. Writes examples/benchmarks/results/quickstart_margin.json.
"""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import hf_ext

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import quickstart  # noqa: E402  found through the line above


def measure(seed: int, folder: Path) -> dict[str, float]:
    """PSNR of each unseen photo after training with one seed."""
    quickstart.train(
        "semanir", {**quickstart.photo_source(folder), "seed": seed, "output_dir": folder / f"seed-{seed}"}
    )
    model = hf_ext.SemanIRForImageRestoration.from_pretrained(folder / f"seed-{seed}" / "snapshot").eval()
    scores = {}
    for index, (name, photo) in enumerate(quickstart.unseen_photos().items()):
        noisy = torch.from_numpy(quickstart.add_noise(photo, index).transpose(2, 0, 1))[None]
        with torch.no_grad():
            restored = model(noisy).reconstruction[0].permute(1, 2, 0).numpy()
        scores[name] = round(quickstart.score(restored, photo), 3)
    return scores


def main(seeds: list[int]) -> None:
    """Measures all seeds and writes the table."""
    folder = ROOT / "runs" / "quickstart-margin"
    quickstart.write_photos(folder / quickstart.PHOTOS)
    weight = quickstart.tune_total_variation()
    photos = quickstart.unseen_photos()
    classical = {
        name: round(quickstart.score(quickstart.total_variation(quickstart.add_noise(photo, index), weight), photo), 3)
        for index, (name, photo) in enumerate(photos.items())
    }
    trained = {str(seed): measure(seed, folder) for seed in seeds}
    reference = float(np.mean(list(classical.values())))
    result = {
        "what": f"PSNR (RGB, dB), sigma {quickstart.SIGMA}, {', '.join(photos)}; examples/semanir/quickstart.yaml",
        "device": f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("hf-ext", "torch", "scikit-image")},
        "total_variation": {"weight": round(weight, 4), "psnr": classical, "mean": round(reference, 3)},
        "semanir": {
            seed: {"psnr": row, "mean": round(float(np.mean(list(row.values()))), 3)} for seed, row in trained.items()
        },
        "margin": {seed: round(float(np.mean(list(row.values()))) - reference, 3) for seed, row in trained.items()},
    }
    path = ROOT / "examples" / "benchmarks" / "results" / "quickstart_margin.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["margin"], indent=2))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [0, 1, 2])
