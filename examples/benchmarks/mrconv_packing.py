"""Packing in training: documents of unequal length one after the other, beside padded rows.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_packing.py

The documents are the topics of Python's own documentation as bytes, cut after 4,096 bytes. A step is forward and
backward pass of a causal language model on a batch of them; the forms take turns on the same batches in one process,
and times are the processor's, medians over the batches. `one group` is packed with all documents padded to the
longest for the convolution. Losses are compared: all forms train on the same tokens.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from timing import Content, markdown_table, median_ratio, run
from torch import Tensor
from transformers import DataCollatorWithFlattening

from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM, packing_mrconv

SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "kernel_size": 8, "norm": "layer"}
NORMS = ("batch", "kernel")
LONGEST = 4096


def draw_documents(batches: int, batch: int) -> list[list[Tensor]]:
    """Batches of documents as bytes, drawn from a seed."""
    texts = [torch.frombuffer(bytearray(text.encode()[:LONGEST]), dtype=torch.uint8) for text in topics.values()]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return [[texts[index].long() for index in order[first * batch :][:batch]] for first in range(batches)]


def pad(documents: list[Tensor]) -> dict[str, Tensor]:
    """A row for each document, with mask and labels."""
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-100)
    return {"input_ids": rows.clamp_min(0), "attention_mask": (rows >= 0).long(), "labels": rows}


def pack(documents: list[Tensor]) -> dict[str, Tensor]:
    """One row, by the collator of transformers."""
    batch: dict[str, Tensor] = DataCollatorWithFlattening()([{"input_ids": document} for document in documents])
    return batch


def one_group(lengths: list[int]) -> list[list[int]]:
    """All sequences in one group, the longest first."""
    return [sorted(range(len(lengths)), key=lambda index: -lengths[index])]


def step(model: MRConvForCausalLM, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Processor seconds of forward and backward pass, and the loss."""
    model.zero_grad()
    start = time.process_time()
    loss = model(**batch).loss
    loss.backward()
    return time.process_time() - start, loss.item()


def compare(branch_norm: str, batches: list[list[Tensor]]) -> dict[str, Any]:
    """Tokens a second of each form, and their ratios to padded rows."""
    torch.manual_seed(0)
    model = MRConvForCausalLM(MRConvConfig(**SIZES, max_position_embeddings=LONGEST, branch_norm=branch_norm)).train()
    by_length = packing_mrconv.group_lengths
    forms: dict[str, tuple[Callable[[list[Tensor]], dict[str, Tensor]], Callable[[list[int]], list[list[int]]]]] = {
        "padded": (pad, by_length),
        "packed": (pack, by_length),
        "packed, one group": (pack, one_group),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    step(model, pad(batches[0][:2]))
    for documents in batches:
        losses = []
        for name, (collate, grouping) in forms.items():
            packing_mrconv.group_lengths = grouping
            taken, loss = step(model, collate(documents))
            seconds[name].append(taken)
            losses.append(loss)
        if max(losses) - min(losses) > 1e-4:
            raise RuntimeError(f"The forms have the losses {losses}, which must be equal.")
    packing_mrconv.group_lengths = by_length
    tokens = [sum(map(len, documents)) for documents in batches]
    rows = {}
    for name, times in seconds.items():
        speed, ratio = median_ratio(tokens, times), median_ratio(seconds["padded"], times)
        rows[name] = {"tokens_per_second": round(speed), "times_padded": round(ratio, 2)}
    return rows


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """Both kinds of norms on the same documents."""
    batches = draw_documents(words.batches, words.batch)
    padded = sum(len(documents) * max(map(len, documents)) for documents in batches)
    tokens = sum(len(document) for documents in batches for document in documents)
    yield {
        "sizes": {**SIZES, "longest": LONGEST, "documents": words.batch},
        "share_of_tokens_in_padded_rows": round(tokens / padded, 3),
        "norms": {norm: compare(norm, batches) for norm in NORMS},
    }


def markdown(content: Content) -> str:
    """Tokens a second, and the multiple of padded rows."""
    lines = [
        [norm, name, f"{row['tokens_per_second']:,}", f"{row['times_padded']:.2f}"]
        for norm, rows in content["norms"].items()
        for name, row in rows.items()
    ]
    return markdown_table(["branch_norm", "form", "tokens/s", "times padded"], lines)


if __name__ == "__main__":
    run("mrconv_packing", __doc__, measure, markdown, batches=7, batch=16)
