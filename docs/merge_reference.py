"""The site's page of merge methods, from the functions that are registered."""

import inspect

from hf_ext.merging.methods import METHODS, Method

_HEAD = """# Merge methods

`hf-ext merge --method NAME`, or `method: NAME` in YAML.

An option is one number, `weight: 0.3`; or by layer, `weight: [0.2, 0.8]`, from the first layer to the last with the
values between them (outside of layers it is the first); or by a text in the names of tensors, the first that fits,
`t: [{filter: mlp, value: [0, 1]}, {value: 0.5}]`. Where the table says *each task*, it may also be a mapping of tasks
to any of these: `weight: {a: 0.5, b: [0.2, 0.8]}`. The command line takes the same: `--weight '{a: 0.5, b: 0.2}'`.
What is not given, or fits no filter, has its default. A share of the whole model has no value by layer.

A mergekit file is taken over where both have the method: linear (`average`), slerp, task_arithmetic, ties
(`ties_by_tensor`) and model_stock (with `away`). Its lists and filters mean the same there.
The result has the base's tokenizer (`tokenizer_source: base`); unions of tokens and layers of several models are
mergekit's alone.

Statistics are what a method knows of each task's data, `statistics: {a: a.safetensors}`; `hf-ext emr statistics MODEL
--config YAML --kind KIND --out FILE` measures them on the data of a training. AdaMerging is task_arithmetic whose
weights `hf-ext emr learn-weights` learns from examples without labels.

Methods of whole tensors hold one tensor of every model in memory at a time; the others hold blocks.
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
