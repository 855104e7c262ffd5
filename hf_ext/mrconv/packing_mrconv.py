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


def find_starts(shape: tuple[int, int], valid: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """Starts of the sequences of a packed batch, as booleans of its `shape` (batch_size, length); None if there are no
    positions. `valid` is the attention mask as booleans."""
    if position_ids is None:
        return None
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, shape[0]) or position_ids.shape[1] != shape[1]:
        got = tuple(position_ids.shape)
        raise ValueError(f"`position_ids` has shape {got}; expected {shape}, one number for each position.")
    position_ids = position_ids.expand(shape)
    starts = position_ids == 0
    goes_on = F.pad(position_ids[:, 1:] == position_ids[:, :-1] + 1, (1, 0))
    wrong = ~(starts | goes_on) if valid is None else valid & ~(starts | goes_on)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        before = f"after {int(position_ids[row, column - 1])}" if column else "where the row begins"
        raise ValueError(
            f"`position_ids` has {int(position_ids[row, column])} {before}, at [{row}, {column}]; number the "
            "positions of each sequence 0, 1, 2, ..., from 0 again where the next one or another row begins."
        )
    if valid is None:
        return starts
    starts = starts & valid
    if bool((valid & ~starts & ~F.pad(valid[:, :-1], (1, 0))).any()):
        told = "`attention_mask` has padding inside of a sequence of `position_ids`; padding may only follow one"
        raise ValueError(f"{told} or be one of its own. Leave the mask out if there is no padding.")
    if not bool(starts.any()):
        raise ValueError("`attention_mask` has no valid position; leave out batches without a sequence.")
    return starts


def read_packing(hidden: Tensor, valid: Tensor | None, position_ids: Tensor | None) -> Packing | None:
    """The packing of hidden states [B, L, D]; None where no positions say it."""
    starts = find_starts((hidden.shape[0], hidden.shape[1]), valid, position_ids)
    return None if starts is None else Packing(starts, valid)
