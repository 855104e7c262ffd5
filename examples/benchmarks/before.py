"""A benchmark with two installations of hf_ext in turns: the ratio, new over old, of every number of its JSON.

    python examples/benchmarks/before.py OTHER/bin/python mrconv_layer.py [--rounds 1] [words of the benchmark]

OTHER is the environment of the other installation. Both run this checkout's script, in processes of their own, five
times; a row is the median over these pairs, with the least and the largest ratio.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timing import in_turns, markdown_table

PAIRS = 5


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Positive numbers of a JSON value by their places."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(part, f"{name}/{key}")
    elif isinstance(value, float) and value > 0:
        yield name, value


def main(other: str, script: str, words: list[str]) -> None:
    """All pairs, then the table."""
    # Not resolved: the link is what makes it the Python of an environment.
    pythons = {"new": sys.executable, "old": str(Path(other).absolute())}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        path = Path(__file__).resolve().parent / script

        def measure(name: str) -> dict[str, float]:
            command = [pythons[name], str(path), *words, "--output", str(output)]
            # In a folder without code: what lies where Python is called comes before what is installed.
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
            return dict(numbers(json.loads(output.read_text(encoding="utf-8"))))

        found = in_turns(list(pythons), PAIRS, measure)
    rows = []
    for name in found["new"][0]:
        pairs = zip(found["new"], found["old"], strict=True)
        ratios = [new[name] / old[name] for new, old in pairs if name in new and name in old]
        if ratios:
            rows.append([name, *(f"{value:.3f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))])
    print(markdown_table(["number", "new / old", "least", "largest"], rows))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
