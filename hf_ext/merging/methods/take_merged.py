"""A model that was merged elsewhere: only masks and scales are made for it (Table 9 of EMR-Merging)."""

from .registry import Block, Tensor, merge_method


@merge_method("given", "another program; the masks are those of EMR-Merging", masks=True, takes_merged=True)
def take_merged(tensor: Block) -> Tensor:
    """The weights of the model in `merged`."""
    assert tensor.merged is not None
    return tensor.merged
