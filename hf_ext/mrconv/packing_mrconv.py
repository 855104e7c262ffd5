# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Packed sequences of MRConv: several sequences in a row, computed as if each had its own row.

Shapes: batch B, length L, channels D; hidden states [B, L, D].
"""

# A long convolution mixes all that lies in a row, so each sequence is taken out of its row before a convolution and
# put back after it: exact for any kernel. What works position by position stays packed; there packing saves padding.
#
# For the convolution sequences lie in groups, padded to the longest of the group. A group holds lengths within a
# factor of two, so that padding is less than half of it, in time and memory, whatever the lengths are. How we know:
# tests/mrconv/test_packing_mrconv.py compares outputs, gradients and statistics with a row for each sequence.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Group(NamedTuple):
    """Sequences that are convolved together: where each position lies, B * L where it is padding; and the lengths."""

    places: Tensor  # [sequences, longest]
    lengths: Tensor  # [sequences]


class Packing:
    """
    Places of the sequences of a packed batch.

    Args:
        starts (`torch.Tensor` of shape `(batch_size, length)`): True at the first position of each sequence.
        valid (`torch.Tensor` of shape `(batch_size, length)`, *optional*): False at positions of no sequence.
    """

    @torch.compiler.disable
    def __init__(self, starts: Tensor, valid: Tensor | None):
        self.valid, self.shape = valid, starts.shape
        places = torch.arange(starts.numel(), device=starts.device)
        # The sequence of each position; padding belongs to that before it, which is of no meaning.
        self.sequences = (starts.flatten().cumsum(0) - 1).clamp_min(0)
        firsts = places[starts.flatten()]
        members = self.sequences if valid is None else self.sequences[valid.flatten()]
        lengths = torch.bincount(members, minlength=len(firsts))
        # The one time that a GPU is waited for.
        self.lengths: list[int] = lengths.tolist()
        self.longest = max(self.lengths)
        self.groups: list[Group] = []
        # Where the outputs of each position lie, when those of all groups stand one after the other.
        self.outputs = torch.zeros_like(places)
        done = 0
        for indices in group_lengths(self.lengths):
            chosen = torch.tensor(indices, device=starts.device)
            steps = torch.arange(self.lengths[indices[0]], device=starts.device)
            inside = steps < lengths[chosen, None]
            own = firsts[chosen, None] + steps
            self.groups.append(Group(torch.where(inside, own, len(places)), lengths[chosen]))
            self.outputs[own[inside]] = done + inside.flatten().nonzero()[:, 0]
            done += inside.numel()

    def unpack(self, u: Tensor) -> list[Tensor]:
        """Inputs [B, D, L] of a convolution, group by group: [sequences, D, longest], zero where padded."""
        rows = F.pad(u.transpose(1, 2).flatten(0, 1), (0, 0, 0, 1))
        return [rows[group.places].transpose(1, 2) for group in self.groups]

    def pack(self, outputs: list[Tensor]) -> Tensor:
        """The convolved groups as [B, D, L] again."""
        rows = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
        return rows[self.outputs].unflatten(0, self.shape).transpose(1, 2)

    def drop_channels(self, hidden: Tensor, chance: float, training: bool) -> Tensor:
        """Drop whole channels of each sequence of [B, D, L], as `dropout1d` does of each sample."""
        if not training or chance == 0:
            return hidden
        kept = F.dropout(hidden.new_ones(len(self.lengths), hidden.shape[1]), chance)
        return hidden * kept[self.sequences].unflatten(0, self.shape).transpose(1, 2)


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Indices of lengths in groups, the longest first; a group's shortest has more than half of its longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or 2 * lengths[index] <= lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def find_starts(
    shape: tuple[int, int],
    valid: Tensor | None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | None:
    """Starts of the sequences of a packed batch, as booleans of its `shape` (batch_size, length); None if not given.
    Several forms of them must agree; `valid` is the attention mask as booleans."""
    found = {}
    if position_ids is not None:
        found["position_ids"] = _read_positions(position_ids, shape, valid)
    if cu_seq_lens_q is not None:
        found["cu_seq_lens_q"] = _read_bounds(cu_seq_lens_q, shape)
    if seq_idx is not None:
        numbers = _fit("seq_idx", seq_idx, shape)
        found["seq_idx"] = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
    if valid is not None:
        found = {name: starts & valid for name, starts in found.items()}
    names, all_starts = list(found), list(found.values())
    for name, starts in found.items():
        if not torch.equal(starts, all_starts[0]):
            raise ValueError(f"`{names[0]}` and `{name}` differ on where sequences begin; give one of them.")
        if valid is not None and bool((valid & ~starts & ~F.pad(valid[:, :-1], (1, 0))).any()):
            raise ValueError(
                f"`attention_mask` has padding inside of a sequence of `{name}`; padding may only follow a sequence "
                "or be one of its own. Leave the mask out if there is no padding."
            )
    if found and not bool(all_starts[0].any()):
        raise ValueError("`attention_mask` has no valid position; leave out batches without a sequence.")
    return all_starts[0] if found else None


def _read_positions(position_ids: Tensor, shape: tuple[int, int], valid: Tensor | None) -> Tensor:
    position_ids = _fit("position_ids", position_ids, shape)
    starts = position_ids == 0
    goes_on = F.pad(position_ids[:, 1:] == position_ids[:, :-1] + 1, (1, 0))
    wrong = ~(starts | goes_on) if valid is None else valid & ~(starts | goes_on)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        before = f"after {int(position_ids[row, column - 1])}" if column else "where the row begins"
        raise ValueError(
            f"`position_ids` has {int(position_ids[row, column])} {before}, at [{row}, {column}]; number the "
            "positions of each sequence 0, 1, 2, ..., from 0 again where the next one begins. No sequence goes on in "
            "another row."
        )
    return starts


def _read_bounds(cu_seq_lens: Tensor, shape: tuple[int, int]) -> Tensor:
    bounds = cu_seq_lens.tolist() if cu_seq_lens.ndim == 1 else []
    ascending = all(first < last for first, last in zip(bounds, bounds[1:], strict=False))
    rows = set(range(0, shape[0] * shape[1], shape[1]))
    if not bounds or bounds[0] != 0 or bounds[-1] != shape[0] * shape[1] or not ascending or not rows <= set(bounds):
        raise ValueError(
            f"`cu_seq_lens_q` is {bounds or tuple(cu_seq_lens.shape)}; expected the ascending bounds of the sequences "
            f"in the flattened batch, 0, ..., {shape[0] * shape[1]}, among them the beginning of each row."
        )
    starts = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=cu_seq_lens.device)
    starts[cu_seq_lens[:-1].long()] = True
    return starts.view(shape)


def _fit(name: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
    if values.ndim != 2 or values.shape[0] not in (1, shape[0]) or values.shape[1] != shape[1]:
        raise ValueError(f"`{name}` has shape {tuple(values.shape)}; expected {shape}, one number for each position.")
    return values.expand(shape)


def read_packing(hidden: Tensor, valid: Tensor | None, **given: Tensor | None) -> Packing | None:
    """The packing of hidden states [B, L, D], from what [`find_starts`] takes; None where nothing says it."""
    starts = find_starts((hidden.shape[0], hidden.shape[1]), valid, **given)
    return None if starts is None else Packing(starts, valid)
