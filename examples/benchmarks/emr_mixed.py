"""A batch of samples of several tasks through one EMRModel, beside the same model that is switched task by task.

    OMP_NUM_THREADS=1 python examples/benchmarks/emr_mixed.py --folder WORK

Models of random weights are merged. Then one call with `task_ids`, and a switch and a call for each task, alternate in
one process; both have to give the same. The median of the pairs' ratios of processor time is kept. `generate` takes
turns by itself, so its ratio shows what that costs beside turns by hand. Writes results/emr_mixed.json and .md.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from emr_measuring import write_task
from timing import Content, compare, markdown_table, run
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from hf_ext.emr import EMRModel
from hf_ext.merging import merge_checkpoints

BERT = BertConfig(
    **{"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6},
    **{"intermediate_size": 1536, "num_labels": 3},
)
GPT2 = GPT2Config(vocab_size=8192, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0)
# Name, class, configuration, tasks, rows of each, tokens of a row, new tokens (0: a forward pass).
CASES: tuple[tuple[str, Any, Any, int, int, int, int], ...] = (
    ("BERT 384 × 6", BertForSequenceClassification, BERT, 8, 1, 16, 0),
    ("BERT 384 × 6", BertForSequenceClassification, BERT, 8, 1, 64, 0),
    ("BERT 384 × 6", BertForSequenceClassification, BERT, 8, 4, 64, 0),
    ("GPT-2 384 × 6", GPT2LMHeadModel, GPT2, 4, 1, 16, 0),
    ("GPT-2 384 × 6", GPT2LMHeadModel, GPT2, 4, 1, 16, 16),
)


def make_artifact(folder: Path, kind: Any, config: Any, count: int) -> Path:
    """A merge of fine-tunes whose weights are moved by a uniform random number."""
    torch.manual_seed(0)
    kind(config).save_pretrained(folder / "base")
    tasks = {f"task{index}": str(folder / f"task{index}") for index in range(count)}
    for seed, place in enumerate(tasks.values(), 1):
        write_task(folder / "base", Path(place), seed)
    merge_checkpoints({"base": str(folder / "base"), "tasks": tasks}, folder / "merged", progress=False)
    return folder / "merged"


def forms(emr: EMRModel, rows: int, tokens: int, new: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One call for all tasks, and a switch and a call for each; both return the rows in the order of the batch."""
    names = [task for _ in range(rows) for task in emr.tasks]
    ids = torch.randint(1, emr.model.config.vocab_size, (len(names), tokens))
    mask, own = torch.ones_like(ids), {task: [i for i, n in enumerate(names) if n == task] for task in emr.tasks}
    how: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}

    @torch.no_grad()
    def together() -> torch.Tensor:
        if new:
            return emr.generate(ids, attention_mask=mask, task_ids=names, **how)
        return emr(input_ids=ids, attention_mask=mask, task_ids=names).logits

    @torch.no_grad()
    def in_turn() -> torch.Tensor:
        found = {}
        for task, places in own.items():
            with emr.task(task) as model:
                given = {"input_ids": ids[places], "attention_mask": mask[places]}
                output = model.generate(**given, **how) if new else model(**given).logits
            found |= dict(zip(places, output, strict=True))
        return torch.stack([found[place] for place in range(len(names))])

    return together, in_turn


def compare_case(emr: EMRModel, rows: int, tokens: int, new: int, rounds: int) -> dict[str, Any]:
    """Medians of interleaved calls, after one in which both are compared."""
    together, in_turn = forms(emr, rows, tokens, new)
    calls = {"turns": in_turn, "together": together}
    torch.testing.assert_close(calls["together"](), calls["turns"](), atol=1e-3, rtol=0)
    rows = compare(calls, rounds)
    found = {f"{name}_ms": 1e3 * row["seconds"] for name, row in rows.items()}
    return {**found, "ratio": rows["together"]["ratio"], "rounds": rounds}


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All models; artifacts are kept in the folder."""
    results = []
    for name, kind, config, count, rows, tokens, new in CASES:
        artifact = Path(words.folder) / f"{kind.__name__}-{count}" / "merged"
        if not artifact.exists():
            make_artifact(artifact.parent, kind, config, count)
        found = compare_case(EMRModel.from_pretrained(artifact), rows, tokens, new, words.rounds)
        results.append({"model": name, "tasks": count, "rows": rows, "tokens": tokens, "new_tokens": new, **found})
        yield {"results": results}


def draw(content: Content) -> str:
    """A row for each case."""
    rows = []
    for row in content["results"]:
        what = f"{row['tasks']} × {row['rows']} × {row['tokens']}"
        what += f", generate {row['new_tokens']}" if row["new_tokens"] else ""
        times = [f"{row['together_ms']:.0f}", f"{row['turns_ms']:.0f}", f"{row['ratio']:.2f}"]
        rows.append([row["model"], what, *times])
    return markdown_table(["model", "tasks × rows × tokens", "together, ms", "turns, ms", "ratio"], rows)


if __name__ == "__main__":
    run("emr_mixed", __doc__, measure, draw, folder="scratch/emr_mixed", rounds=9)
