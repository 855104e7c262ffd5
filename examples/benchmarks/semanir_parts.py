"""Time of a restored megapixel of `denoise-color` in parts of so many MiB of temporary memory, on one thread."""

import argparse
from collections.abc import Iterator

import torch
from timing import Content, compare, markdown_table, run

import hf_ext
from hf_ext.fast import semanir_strips
from hf_ext.semanir import SemanIRForImageRestoration


@torch.no_grad()
def measure(words: argparse.Namespace) -> Iterator[Content]:
    model = SemanIRForImageRestoration.from_pretrained(hf_ext.released("denoise-color")).eval()
    picture = torch.rand(1, 3, words.side, words.side)

    def restore(size: int) -> None:
        semanir_strips._CACHE = size * 2**20
        model(picture)

    yield {"results": compare({str(size): lambda size=size: restore(size) for size in words.mebibytes}, words.rounds)}


def _draw(content: Content) -> str:
    rows = [[size, f"{row['seconds']:.2f}", f"{row['ratio']:.2f}"] for size, row in content["results"].items()]
    return markdown_table(["MiB", "core seconds", "times the first"], rows)


if __name__ == "__main__":
    run("semanir_parts", __doc__, measure, _draw, mebibytes=[512, 64, 16, 8, 4, 2], side=1024, rounds=3)
