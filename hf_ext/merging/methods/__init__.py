"""Merge methods, one in a file. A method is a function that gets a tensor of the base and of the tasks, and merges it.

    @merge_method("average", "the average of their weights")
    def average(tensor: Block) -> Tensor:
        return tensor.base + sum(tensor.vectors) / len(tensor.vectors)

Its keyword-only arguments are its options: `Annotated[float, Option(...)]`, `Annotated[bool, Option(...)]` or
`Annotated[Literal[...], Option(...)]` with a default; `Annotated[list[float], Option(..., default=1.0)]` has a value
for each task. YAML keys, options of the command line with their help, checks, card and report follow from that, and
the page of merge methods that `make docs` writes. A new file in this folder is found
by itself; so is a function elsewhere that is imported before a merge.

The help of the command line imports these files, so none of them imports torch or numpy before it is called.
"""

from importlib import import_module
from pkgutil import iter_modules

from .registry import METHODS, Block, Method, MethodError, Option, Tensor, merge_method, options_by_name

__all__ = ["METHODS", "Block", "Method", "MethodError", "Option", "Tensor", "merge_method", "options_by_name"]

# Each file registers its methods. Help shows the default first.
for _file in ("emr", *sorted(module.name for module in iter_modules(__path__))):
    import_module(f"{__name__}.{_file}")
