"""Merge methods, one in a file. A method is a function that gets a tensor of the base and of the tasks, and merges it.

    @merge_method("average", "the average of their weights")
    def average(tensor: Block) -> Tensor:
        return tensor.base + sum(tensor.vectors) / len(tensor.vectors)

Its keyword-only arguments are its options: `Annotated[float, Option(...)]` or `Annotated[Literal[...], Option(...)]`
with a default. YAML keys, options of the command line with their help, checks, card and report follow from that.
Whoever imports a file with such a function before a merge has one method more.

The help of the command line imports these files, so none of them imports torch or numpy before it is called.
"""

from importlib import import_module

from .registry import METHODS, Block, Method, Option, Tensor, merge_method, options_by_name

__all__ = ["METHODS", "Block", "Method", "Option", "Tensor", "merge_method", "options_by_name"]

# Each file registers its methods, in the order in which help shows them.
for _file in ("emr", "average", "task_arithmetic", "ties", "model_stock", "take_merged"):
    import_module(f"{__name__}.{_file}")
