"""A batch of samples of several tasks through one EMRModel, beside a resident model for each task.

    OMP_NUM_THREADS=1 python examples/benchmarks/emr_mixed.py WORK_FOLDER

GPT-2s of random weights are merged; then both take turns in one process, and medians of the pairs' ratios are kept:
N models run on the rows of their tasks, the EMRModel once on the whole batch. So does `generate` (greedy), also beside
the EMRModel switched to one task after the other. Writes results/emr_mixed.json and .md.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import installed_versions
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ext.emr import EMRModel
from hf_ext.merging import merge_checkpoints

TASKS = 4
# Width, layers, vocabulary.
SHAPES = ((384, 6, 8192), (256, 4, 50257))
# Samples, tokens of each, rounds.
BATCHES = ((4, 1, 21), (8, 16, 15), (32, 128, 7))
# Prompts, tokens of each, new tokens, rounds.
GENERATIONS = ((4, 16, 16, 9), (16, 16, 16, 7))


def make_artifact(folder: Path, width: int, layers: int, vocabulary: int) -> Path:
    """A merge of fine-tunes whose weights are moved by a uniform random number of ±0.01."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, vocab_size=vocabulary, **ends)
    base = GPT2LMHeadModel(config)
    base.save_pretrained(folder / "base")
    for task in range(TASKS):
        model, generator = copy.deepcopy(base), torch.Generator().manual_seed(task + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.rand(parameter.shape, generator=generator) * 0.02 - 0.01
        model.save_pretrained(folder / f"task{task}")
    tasks = {f"task{task}": str(folder / f"task{task}") for task in range(TASKS)}
    merge_checkpoints({"base": str(folder / "base"), "tasks": tasks}, folder / "merged", progress=False)
    return folder / "merged"


def times_in_turn(rounds: int, *forms: Callable[[], Any]) -> list[list[tuple[float, float]]]:
    """Processor and wall time of each call."""
    times: list[list[tuple[float, float]]] = [[] for _ in forms]
    for _ in range(rounds):
        for form, found in zip(forms, times, strict=True):
            processor, wall = time.process_time(), time.perf_counter()
            form()
            found.append((time.process_time() - processor, time.perf_counter() - wall))
    return times


def measure(artifact: Path) -> list[dict[str, Any]]:
    """Each kind of batch, in turns; checks that both give the same."""
    emr = EMRModel.from_pretrained(artifact)
    residents = {task: EMRModel.from_pretrained(artifact, task).model for task in emr.tasks}
    rows = []
    for samples, tokens, rounds in BATCHES:
        names = [emr.tasks[sample % TASKS] for sample in range(samples)]
        ids = torch.randint(0, emr.model.config.vocab_size, (samples, tokens))
        own = {task: ids[[row for row, name in enumerate(names) if name == task]] for task in emr.tasks}

        def mixed(ids: torch.Tensor = ids, names: list[str] = names) -> torch.Tensor:
            return emr(input_ids=ids, task_ids=names, use_cache=False).logits

        @torch.no_grad()
        def resident(own: dict[str, torch.Tensor] = own) -> list[torch.Tensor]:
            return [residents[task](input_ids=part, use_cache=False).logits for task, part in own.items()]

        found = mixed()
        for task, logits in zip(own, resident(), strict=True):
            torch.testing.assert_close(found[[name == task for name in names]], logits, atol=1e-3, rtol=0)
        one, many = times_in_turn(rounds, mixed, resident)
        pairs = list(zip(one, many, strict=True))
        rows.append(
            {
                "samples": samples,
                "tokens": tokens,
                "rounds": rounds,
                "mixed_ms": 1e3 * statistics.median(first[0] for first, _ in pairs),
                "resident_ms": 1e3 * statistics.median(second[0] for _, second in pairs),
                "ratio": statistics.median(first[0] / second[0] for first, second in pairs),
                "wall_ratio": statistics.median(first[1] / second[1] for first, second in pairs),
            }
        )
    return rows


def measure_generation(artifact: Path) -> list[dict[str, Any]]:
    """Prompts of all tasks continued together, task by task, and by a resident model for each."""
    emr = EMRModel.from_pretrained(artifact)
    residents = {task: EMRModel.from_pretrained(artifact, task).model for task in emr.tasks}
    rows = []
    for prompts, tokens, new, rounds in GENERATIONS:
        names = [emr.tasks[prompt % TASKS] for prompt in range(prompts)]
        ids = torch.randint(1, emr.model.config.vocab_size, (prompts, tokens))
        own = {task: ids[[row for row, name in enumerate(names) if name == task]] for task in emr.tasks}
        how: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}

        def resident(own: dict[str, torch.Tensor] = own, how: dict[str, Any] = how) -> list[torch.Tensor]:
            return [
                residents[task].generate(part, attention_mask=torch.ones_like(part), **how)
                for task, part in own.items()
            ]

        def in_turn(own: dict[str, torch.Tensor] = own, how: dict[str, Any] = how) -> list[torch.Tensor]:
            found = []
            for task, part in own.items():
                with emr.task(task) as model:
                    found.append(model.generate(part, attention_mask=torch.ones_like(part), **how))
            return found

        def mixed(ids: torch.Tensor = ids, names: list[str] = names, how: dict[str, Any] = how) -> Any:
            return emr.generate(ids, attention_mask=torch.ones_like(ids), task_ids=names, **how)

        found = mixed()
        for task, by_turns, alone in zip(own, in_turn(), resident(), strict=True):
            assert torch.equal(by_turns, alone) and torch.equal(found[[name == task for name in names]], alone)
        times = times_in_turn(rounds, mixed, in_turn, resident)
        processor = [[one for one, _ in found] for found in times]
        ratios = [
            statistics.median(one / other for one, other in zip(processor[0], others, strict=True))
            for others in processor[1:]
        ]
        median = [1e3 * statistics.median(found) for found in processor]
        rows.append(
            {
                "prompts": prompts,
                "tokens": tokens,
                "new_tokens": new,
                "rounds": rounds,
                "mixed_ms": median[0],
                "turns_ms": median[1],
                "resident_ms": median[2],
                "ratio_to_turns": ratios[0],
                "ratio": ratios[1],
            }
        )
    return rows


def generation_lines(results: list[dict[str, Any]]) -> list[str]:
    """The table of generation."""
    head = "| GPT-2 | prompts, new tokens | mixed, ms | turns, ms | resident, ms | of turns | of resident |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|"]
    for result in results:
        for row in result["generation"]:
            name = f"{result['width']} × {result['layers']}, {result['vocabulary']:,} tokens"
            times = [f"{row[key]:.0f}" for key in ("mixed_ms", "turns_ms", "resident_ms")]
            ratios = [f"{row[key]:.2f}" for key in ("ratio_to_turns", "ratio")]
            cells = [name, f"{row['prompts']} × {row['tokens']}, {row['new_tokens']}", *times, *ratios]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    words = parser.parse_args()
    results = []
    lines = ["| GPT-2 | batch | mixed, ms | resident, ms | ratio | of wall time |", "|---|---|---:|---:|---:|---:|"]
    for width, layers, vocabulary in SHAPES:
        folder = words.folder / f"{width}-{layers}-{vocabulary}"
        artifact = folder / "merged"
        if not artifact.exists():
            make_artifact(folder, width, layers, vocabulary)
        rows = measure(artifact)
        shape = {"width": width, "layers": layers, "vocabulary": vocabulary}
        results.append({**shape, "rows": rows, "generation": measure_generation(artifact)})
        for row in rows:
            batch = f"{row['samples']} × {row['tokens']}"
            figures = [f"{row[key]:.{digits}f}" for key, digits in (("mixed_ms", 1), ("resident_ms", 1), ("ratio", 2))]
            cells = [f"{width} × {layers}, {vocabulary:,} tokens", batch, *figures, f"{row['wall_ratio']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *generation_lines(results)]
    content = {
        "what": f"processor time of a forward pass and of generate, {TASKS} tasks, fp32, medians of interleaved runs",
        "machine": f"CPU ({platform.machine()}), {os.cpu_count()} cores, {torch.get_num_threads()} thread",
        "load_average": os.getloadavg()[0],
        "versions": installed_versions("hf-ext", "torch", "transformers", "numba"),
        "results": results,
    }
    words.out.mkdir(parents=True, exist_ok=True)
    (words.out / "emr_mixed.json").write_text(json.dumps(content, indent=2) + "\n")
    (words.out / "emr_mixed.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
