"""Small steps of reproduce.py.

python examples/disentangled_dit/paper/parts.py prompts DATA COLUMN COUNT SPLIT     captions, one a line
python examples/disentangled_dit/paper/parts.py drift FOLDER FOLDER...              how far pictures drift, as JSON
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.errors import DataError, run_script
from hf_ext.tasks.diffusion_texts import read_captions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from drift import content_drift

# Pictures whose drift is measured at once.
BATCH = 64


def write_prompts(data: str, column: str, count: str, split: str) -> None:
    """Prints captions of examples that are drawn at random, always the same, of each the first one."""
    source = open_source(DataSource(data, split=split), "prompts").select_columns([column])
    chosen = np.random.default_rng(0).permutation(len(source))[: int(count)]
    texts = (" ".join(read_captions(source[int(place)], column)[0].split()) for place in chosen)
    print("\n".join(text for text in texts if text))


def measure_drift(folders: list[Path]) -> None:
    """Prints the mean distances between pictures of one number, and so of equal noise and class, of all folders."""
    names = sorted(path.name for path in folders[0].glob("*.png"))
    found: list[dict[str, float]] = []
    for start in range(0, len(names), BATCH):
        part = names[start : start + BATCH]
        images = [np.stack([np.asarray(Image.open(folder / name)) for name in part]) for folder in folders]
        found += [content_drift(np.stack(images))] * len(part)
    if not found:
        raise DataError(f"{folders[0]} has no pictures: draw them by hf-ext sample.")
    print(json.dumps({name: float(np.mean([row[name] for row in found])) for name in found[0]}))


def main(words: list[str]) -> None:
    """Does one of the steps."""
    if words[:1] == ["prompts"] and len(words) == 5:
        write_prompts(*words[1:])
    elif words[:1] == ["drift"] and len(words) > 2:
        measure_drift([Path(word) for word in words[1:]])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
