"""Disentangled DiT beside diffusers' mmDiT and DiT, each in a process that is new in each round, by processor time.

    OMP_NUM_THREADS=1 python examples/benchmarks/disentangled_dit_processes.py

The networks, loops and pipelines are those of `disentangled_dit_sampling.py`. A process measures one contender: for
each number of tokens a call of the network alone (a picture and its null branch, or eight pictures with theirs), then
sampling with guidance. The contenders take turns, in an order that turns from round to round; processor time of one
thread counts, because the machine may be busy. A ratio is that of two processes of a round: their time over ours.
"""

import argparse
import multiprocessing
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from disentangled_dit_sampling import NETWORKS, OURS, PATCH, make_entry, make_network, prepare
from timing import describe_machine, time_of, write_result

# What is measured: network alone or sampling, tokens, pictures, timed calls. The first call is not counted.
CASES = [
    ("network", 64, 1, 5),
    ("sampling", 64, 1, 1),
    ("network", 64, 8, 2),
    ("network", 256, 1, 3),
    ("sampling", 256, 1, 1),
    ("network", 1024, 1, 2),
]


def name_of(case: tuple[str, int, int, int]) -> str:
    kind, tokens, batch, _ = case
    return f"{kind}, {tokens} tokens, batch {batch}"


def measure(connection: Connection, name: str, words: argparse.Namespace) -> None:
    """The process of a contender: median processor seconds of each case."""
    prepare()
    seconds, side, network = {}, 0, None
    for case in CASES:
        kind, tokens, batch, calls = case
        if side != PATCH * round(tokens**0.5):
            network, side = None, PATCH * round(tokens**0.5)
            network = make_network(name, words.preset, side)
        steps = words.steps if kind == "sampling" else 0
        # A step is enough to call everything once.
        make_entry(name, network, batch, side, min(steps, 1))()
        entry = make_entry(name, network, batch, side, steps)
        seconds[name_of(case)] = statistics.median(time_of(entry) for _ in range(calls))
    connection.send(seconds)


def run_process(name: str, words: argparse.Namespace) -> dict[str, float]:
    """Seconds of a contender, measured in a new process."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=measure, args=(other, name, words), daemon=True)
    process.start()
    other.close()
    seconds = connection.recv()
    process.join()
    return seconds


def summarise(rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each case: median seconds, and the ratios to ours: median, least, largest, of each round."""
    rows = []
    for kind, tokens, batch, _ in CASES:
        row: dict[str, Any] = {"kind": kind, "tokens": tokens, "batch": batch, "entries": {}}
        case = name_of((kind, tokens, batch, 0))
        for name in NETWORKS:
            ratios = [taken[name][case] / taken[OURS][case] for taken in rounds]
            row["entries"][name] = {
                "processor_seconds": statistics.median(taken[name][case] for taken in rounds),
                "times_ours": statistics.median(ratios),
                "least": min(ratios),
                "largest": max(ratios),
            }
        rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Processor seconds of ours; of the others their ratio to it, with the least and the largest of the rounds."""
    others = NETWORKS[1:]
    lines = ["| what | tokens, pictures | ours, s | " + " | ".join(others) + " |", "|---" * (3 + len(others)) + "|"]
    for row in rows:
        cells = [
            f"{entry['times_ours']:.2f} ({entry['least']:.2f} to {entry['largest']:.2f})"
            for entry in (row["entries"][name] for name in others)
        ]
        seconds = f"{row['entries'][OURS]['processor_seconds']:.3f}"
        start = [row["kind"], f"{row['tokens']}, {row['batch']}", seconds]
        lines.append("| " + " | ".join(start + cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="S")
    parser.add_argument("--steps", type=int, default=10, help="of sampling")
    parser.add_argument("--rounds", type=int, default=5)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "disentangled_dit_processes.json")
    words = parser.parse_args()
    rounds = []
    for turn in range(words.rounds):
        order = NETWORKS[turn % len(NETWORKS) :] + NETWORKS[: turn % len(NETWORKS)]
        rounds.append({name: run_process(name, words) for name in order})
        rows = summarise(rounds)
        content = {
            "results": rows,
            "rounds": rounds,
            "sizes": {"preset": words.preset, "steps": words.steps, "dtype": "float32"},
            **describe_machine("torch", "diffusers", "hf-ext"),
        }
        page = words.output.with_suffix(".md")
        # What a person wrote below the table stays.
        notes = page.read_text().partition("\n\n")[2] if page.exists() else ""
        # After each round: what was measured is kept if the rest is broken off.
        write_result(words.output, content, markdown(rows) + ("\n" + notes if notes else ""))


if __name__ == "__main__":
    main()
