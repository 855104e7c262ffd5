"""The site's page of merge methods, from the functions that are registered."""

import inspect

from hf_ext.merging.methods import METHODS, Method

_HEAD = """# Merge methods

Choose a method with `hf-ext merge --method NAME`, or `method: NAME` in YAML. Its options have four forms; `--weight`
and the other flags take the same YAML, such as `--weight '{a: 0.5, b: 0.2}'`:

- a number: `weight: 0.3`
- a list by layer: `weight: [0.2, 0.8]`, interpolated from the first layer to the last; tensors outside of layers get
  the first value
- a list of filters: `t: [{filter: mlp, value: [0, 1]}, {value: 0.5}]`; the first filter in the name of a tensor counts
- a mapping of tasks to any of these, where the table says *each task*: `weight: {a: 0.5, b: [0.2, 0.8]}`

A value that is missing, or fits no filter, is the default. An option of the *whole model* takes no list by layer.

**Statistics** describe the data of each task: `statistics: {a: a.safetensors}`. `hf-ext emr statistics MODEL --config
YAML --kind KIND --out FILE` measures them on the data of a training. AdaMerging is `task_arithmetic` with weights that
`hf-ext emr learn-weights` learns from examples without labels.

**Memory.** A method of *whole tensors* holds one tensor of every model at a time; the others hold blocks.

**mergekit.** Lists and filters have the same meaning there; [the table](coming_from.md#from-mergekit) names the
methods that both have.
"""


def write_reference() -> str:
    """Markdown of the page `merge_methods` of the site."""
    return "\n".join([_HEAD, *(_describe(method) for method in METHODS.values())])


def _describe(method: Method) -> str:
    told = ["no unified model"] if method.deltas else ["1-bit task masks"] if method.masks else []
    told += ["whole tensors"] if method.whole else []
    told += [f"statistics: {method.statistics}"] if method.statistics else []
    title = method.label[0].upper() + method.label[1:] + (f" ({', '.join(told)})" if told else "")
    lines = [f"## {method.name}", "", f"{title}:"]
    lines += [inspect.cleandoc(method.function.__doc__ or "").partition("\n\n")[0], ""]
    if not method.options:
        return "\n".join(lines)
    lines += ["| option | default | may be | |", "|---|---|---|---|"]
    for name, option in method.options.items():
        default = str(option.default).lower()
        each = (", each task" if option.by_task else "") + (
            "" if option.by_layer or option.choices else ", whole model"
        )
        lines.append(f"| `{name}` | `{default}` | {option.allowed_values}{each} | {option.help} |")
    return "\n".join([*lines, ""])
