"""SemanIR on whole images within a budget of memory: the network's parts, each computed on strips of its input.

Shapes: maps [B, channels, height, width] with channels last in memory, tokens [B, height, width, channels].
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import capture_outputs

from hf_ext.semanir.modeling_semanir import (
    SemanIRColumn,
    SemanIRForImageRestoration,
    SemanIRModel,
    SemanIRStage,
    SemanIRUShape,
)
from hf_ext.semanir.ops_semanir import (
    Dictionary,
    Pair,
    key_regions,
    partition_windows,
    semantic_keys,
    window_and_shift,
)

# Temporary values of a layer for one token, in units of its width: below this no image needs to be cut.
_LAYER_MAPS = 16
# Temporary bytes for each thread of a processor, which its cache holds beside the weights: a photograph of a megapixel
# takes half of the time that it takes in parts of 512 MiB (`examples/benchmarks/semanir_parts.py`). On a GPU, where
# the launches of many small parts cost more, the budget alone counts.
_CACHE = 8 * 2**20


def memory_of_call(model: SemanIRModel, tokens: int, output_hidden_states: bool) -> int | None:
    """
    Bytes of temporary memory that a call must keep to, with so many pixels of the finest feature maps over the batch:
    `memory_budget`, on a processor no more than its cache; None if everything fits into it or nothing may be cut.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if torch.is_grad_enabled() or output_hidden_states or model.memory_budget is None:
        return None
    if not _is_own(model.body):
        return None
    weight = model.extractor.weight
    cache = _CACHE * torch.get_num_threads() if weight.device.type == "cpu" else model.memory_budget
    memory = min(model.memory_budget, cache)
    if tokens * _LAYER_MAPS * model.body.out_dim * weight.element_size() <= memory:
        return None
    return None if any(map(_is_observed, model.modules())) else memory


def _is_own(body: nn.Module) -> bool:
    """True if the strips can walk through a body: no adapter, compiled module or other part stands in for a stage."""
    lists = {SemanIRColumn: ["stages"], SemanIRUShape: ["down_stages", "up_stages"]}.get(type(body), [])
    stages = [stage for name in lists for stage in getattr(body, name)]
    refinement = getattr(body, "refinement", None)
    return bool(stages) and {type(stage) for stage in stages} | {type(refinement)} <= {SemanIRStage, type(None)}


def _is_observed(module: nn.Module) -> bool:
    """True if a foreign hook observes inputs or outputs of the module."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(getattr(hook, "__module__", None) != capture_outputs.__module__ for hook in hooks)


# What it does. The model of `modeling_semanir` computes each of its equations on the whole feature map. Of an image of
# 12 megapixels, the temporary tensors of one layer alone take tens of gigabytes. This runner walks through the same
# modules in the same order and computes each on some rows, or some windows, at a time. One feature map is held in full
# (in a U the skips too), and what comes out of a stage is written over what went in.
#
# Why that is exact. Keys, attention and MLP stay inside a window; norms and 1 x 1 convolutions stay in a pixel; a
# convolution of 3 x 3 reads one row above and below, which each strip gets as its halo. So no value depends on where
# the strips end, unlike tiles, which cut off what reaches further.
#
# How we know. `tests/semanir/test_whole_image_semanir.py` compares with the network at once, for every kind of body
# and head, strips of one row and images of any size, and measures the peak of a process against the budget.
class Strips:
    """
    The parts of a SemanIR model, on strips of at most `memory` bytes of temporary tensors. Its methods say the same
    as the forward of the part they are named after.
    """

    def __init__(self, memory: int):
        self.memory = memory
        self.by_rows = partial(by_rows, memory=memory)

    def extract(self, model: SemanIRModel, images: Tensor, top_k: int) -> Tensor:
        """`model.body(model.extractor(images), top_k)`."""
        body = model.body
        channels = 4 * model.config.embed_dim
        features = self.by_rows(model.extractor, images, channels=channels, halo=1)
        features = self.by_rows(body.first_norm, features, channels=channels, into=features)
        if isinstance(body, SemanIRUShape):
            return self._u_shape(body, features, top_k)
        assert isinstance(body, SemanIRColumn)
        return self._column(body, features, top_k, model.extractor, images)

    def _column(
        self, body: SemanIRColumn, features: Tensor, top_k: int, extractor: nn.Module, images: Tensor
    ) -> Tensor:
        for stage in body.stages:
            features = self._stage(stage, features, top_k)

        def close(features: Tensor, images: Tensor) -> Tensor:
            # The long skip is extracted once more instead of being kept.
            return body.convolution(body.last_norm(features)) + extractor(images)

        return self.by_rows(close, features, images, channels=8 * body.out_dim, halo=1, into=features)

    def _u_shape(self, body: SemanIRUShape, features: Tensor, top_k: int) -> Tensor:
        skips = []
        for stage, downsample in zip(body.down_stages, body.downsamples, strict=False):
            features = self._stage(stage, features, top_k)
            skips.append(features)
            rows, channels = features.shape[-2] // 2, 8 * features.shape[1]
            features = self.by_rows(downsample, features, channels=channels, rows=rows, halo=1)
        features = self._stage(body.down_stages[-1], features, top_k)
        for upsample, reduction, stage in zip(body.upsamples, body.reductions, body.up_stages, strict=True):
            features = self._join(features, skips.pop(), upsample, reduction)
            features = self._stage(stage, features, top_k)
        if body.refinement is not None:
            features = self._stage(body.refinement, features, top_k)
        return self.by_rows(body.last_norm, features, channels=4 * body.out_dim, into=features)

    def _join(self, features: Tensor, skip: Tensor, upsample: nn.Module, reduction: nn.Module) -> Tensor:
        """Features of the level below and the skip of this level. The skip is overwritten if their sum is as wide."""

        def join(features: Tensor, skip: Tensor) -> Tensor:
            return reduction(torch.cat([upsample(features), skip], dim=1))

        return self.by_rows(join, features, skip, channels=16 * features.shape[1], halo=1, into=skip)

    def _stage(self, stage: nn.Module, features: Tensor, top_k: int) -> Tensor:
        assert isinstance(stage, SemanIRStage)
        # The stage is not called, so accelerate, which may keep it on a device of its own, does not move its input.
        features = features.to(getattr(getattr(stage, "_hf_hook", None), "execution_device", None) or features.device)
        return Wave(stage, features, top_k, self.memory).run()

    def reconstruct(self, restorer: SemanIRForImageRestoration, features: Tensor) -> Tensor:
        """`restorer.reconstruction(features)`."""
        config, head = restorer.config, restorer.reconstruction
        # In rows of the features: three convolutions at their resolution or above, or one.
        halo = 1 if config.scale == 1 or config.upsampler == "direct" else 3
        factor = config.scale * config.stem_scale
        # Values of all convolutions and shuffles for one pixel of the features, were none freed.
        channels = 4 * features.shape[1] + 256 * (1 + factor**2)
        return self.by_rows(head, features, channels=channels, halo=halo)


def by_rows(
    function: Callable[..., Tensor],
    *maps: Tensor,
    memory: int,
    channels: int,
    rows: int | None = None,
    halo: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """
    `function(*maps)`, computed for some rows at a time. A row of the result must depend on the same row of the maps
    and on `halo` rows on both sides.

    Maps may have several resolutions: they are cut in units of `rows`, the rows of the coarsest of them, the result
    included (those of the first map when not given), and `halo` counts in these units too. `channels` says how many
    temporary values there are for each of the `rows` times the width of the first map, and `memory` how many bytes all
    of them may take; at least one row is computed at a time. `into`, one of the maps, is overwritten with the result
    if it has its dtype and channels: `function` may then read its rows without halo only, as the rows above hold
    results already.
    """
    first = maps[0]
    rows = first.shape[-2] if rows is None else rows
    row_bytes = first.numel() // (first.shape[1] * rows) * channels * first.element_size()
    strip = max(1, memory // row_bytes - 2 * halo)
    factors = [features.shape[-2] // rows for features in maps]
    result: Tensor | None = None
    # The rows above a strip, as they were before results were written over them.
    above: Tensor | None = None
    for start in range(0, rows, strip):
        stop = min(start + strip, rows)
        top, bottom = max(start - halo, 0), min(stop + halo, rows)
        parts = [each[:, :, top * factor : bottom * factor] for each, factor in zip(maps, factors, strict=True)]
        for index, each in enumerate(maps):
            if each is into and above is not None:
                parts[index] = torch.cat([above, each[:, :, start * factors[index] : bottom * factors[index]]], dim=2)
        part = function(*parts)
        factor = part.shape[-2] // (bottom - top)
        if result is None and into is not None and (into.dtype, into.shape[1]) == (part.dtype, part.shape[1]):
            result = into
        elif result is None:
            # Channels last in memory, as in the part.
            batch, depth, _, width = part.shape
            result = part.new_empty(batch, rows * factor, width, depth).permute(0, 3, 1, 2)
        if result is into and halo:
            # By identity: `in` would compare values.
            old = next(part for each, part in zip(maps, parts, strict=True) if each is into)
            above = old[:, :, (max(stop - halo, 0) - top) * factor : (stop - top) * factor].clone()
        result[:, :, start * factor : stop * factor] = part[:, :, (start - top) * factor : (stop - top) * factor]
    assert result is not None
    return result


# The layers of a stage alternate between windows and windows moved by half a window, down and to the right, where the
# lowest ones take the first rows in. Computed map by map they need a second map: each layer reads what the one before
# wrote, and the sum at the end what came in. Here bands of windows run down the map like a wave: a layer takes a band
# as soon as the one before has finished all of its rows, and the closing convolution follows as closely, so that only
# the rows between the first layer and the convolution are held twice. The first rows, which the last moved band takes
# in, wait for the end. Rows are kept in blocks, cut where bands of either kind begin: band j of windows is block 2j
# and 2j + 1, moved band j is block 2j + 1 and the next one, after the last the first.
class Wave:
    """A stage on one map [B, channels, height, width], which its result is written into."""

    def __init__(self, stage: SemanIRStage, features: Tensor, top_k: int, memory: int):
        self.stage, self.features, self.top_k, self.memory = stage, features, top_k, memory
        # Values of a layer for one token that live at the same time: projections and their normalised copies with
        # logits, bias and mask; or the MLP's.
        dim, config = features.shape[1], stage.config
        attending = 12 * dim + 3 * stage.num_heads * config.window_size**2
        self.channels = max(attending, 4 * dim + 2 * int(dim * config.mlp_ratio))
        self.tokens = features.permute(0, 2, 3, 1)
        self.size = self.tokens.shape[1], self.tokens.shape[2]
        self.window, self.shift = window_and_shift(self.size, config.window_size, any(stage.shifted))
        self.rows = max(1, memory // 4 // (self.tokens[:, 0].numel() * features.element_size() * self.window[0]))
        starts = range(0, self.size[0], self.rows * self.window[0])
        self.bands = len(starts)
        cuts = [cut for start in starts for cut in (start, start + self.shift[0])] if self.shift[0] else [*starts]
        self.blocks = [slice(*pair) for pair in zip(cuts, [*cuts[1:], self.size[0]], strict=True)]
        # Layers that a block has passed; its tokens, as long as they are needed; bands whose result is written.
        self.passed = [0] * len(self.blocks)
        self.held: list[Tensor | None] = [None] * len(self.blocks)
        self.written: set[int] = set()
        self.known: dict[tuple[bool, int], Dictionary] = {}
        self.result = features

    def run(self) -> Tensor:
        for band in range(self.bands):
            self._pass_layer(0, band)
        return self.result

    def _blocks_of(self, band: int, shifted: bool) -> list[int]:
        if not self.shift[0]:
            return [band]
        first = 2 * band + shifted
        return [first, (first + 1) % len(self.blocks)]

    def _pass_layer(self, number: int, band: int) -> None:
        """One layer on one band, and all that can be done then."""
        shifted = self.stage.shifted[number]
        numbers = self._blocks_of(band, shifted)
        rows = torch.cat([self._tokens_of(block) for block in numbers], dim=1)
        dictionary = self._dictionary(shifted, band, rows if number == 0 else None)
        if shifted not in self.stage.shifted[number + 1 :]:
            del self.known[shifted, band]
        rows = by_windows(self.stage.layers[number], rows, dictionary, self.memory, self.channels)
        lengths = [self.blocks[block].stop - self.blocks[block].start for block in numbers]
        for block, part in zip(numbers, rows.split(lengths, dim=1), strict=True):
            self.held[block], self.passed[block] = part, number + 1
        after = number + 1
        for other in {other % self.bands for other in range(band - 1, band + 2)}:
            if after == len(self.stage.layers):
                self._write(other)
            elif all(self.passed[block] == after for block in self._blocks_of(other, self.stage.shifted[after])):
                self._pass_layer(after, other)

    def _tokens_of(self, block: int) -> Tensor:
        held = self.held[block]
        return self.tokens[:, self.blocks[block]] if held is None else held

    def _dictionary(self, shifted: bool, band: int, rows: Tensor | None) -> Dictionary:
        """That of a band of windows, from the rows of the stage's input."""
        if (shifted, band) not in self.known:
            if rows is None:
                numbers = self._blocks_of(band, shifted)
                rows = torch.cat([self.tokens[:, self.blocks[block]] for block in numbers], dim=1)
            shift = self.shift if shifted else (0, 0)
            windows = partition_windows(rows, self.window, (0, shift[1]))
            regions, bits = None, None
            if any(shift):
                own = windows.shape[0] // rows.shape[0]
                first = band * self.rows * (self.size[1] // self.window[1])
                regions = self._regions[first : first + own]
            if regions is not None or self.top_k < windows.shape[1]:
                config = self.stage.config
                bits = semantic_keys(windows, regions, self.top_k, config.similarity, config.include_self)
            self.known[shifted, band] = Dictionary(self.window, (0, shift[1]), self.stage.config.window_size, bits)
        return self.known[shifted, band]

    @cached_property
    def _regions(self) -> Tensor:
        return key_regions(self.size, self.window, self.shift, self.features.device)

    def _write(self, band: int) -> None:
        """F_out = Conv(layers(F_in; D)) + F_in of a band, once it and its neighbours have passed all layers."""
        own = self._blocks_of(band, False)
        first, last = own[0], own[-1]
        near = range(max(first - 1, 0), min(last + 2, len(self.blocks)))
        if band in self.written or any(self.passed[block] < len(self.stage.layers) for block in near):
            return
        parts = [self._tokens_of(block) for block in near]
        above = 0 if near[0] == first else 1
        parts[0] = parts[0][:, -1:] if above else parts[0]
        parts[-1] = parts[-1] if near[-1] == last else parts[-1][:, :1]
        tokens = torch.cat(parts, dim=1).permute(0, 3, 1, 2)
        place = slice(self.blocks[first].start, self.blocks[last].stop)
        made = by_rows(self.stage.convolution, tokens, memory=self.memory, channels=4 * tokens.shape[1], halo=1)
        made = made[:, :, above : above + place.stop - place.start] + self.features[:, :, place]
        if made.dtype != self.result.dtype:
            self.result = torch.empty_like(self.features, dtype=made.dtype)
        self.result[:, :, place] = made
        self.written.add(band)
        for block in own:
            # Neighbours read the rows at its ends.
            tokens = self._tokens_of(block)
            self.held[block] = torch.cat([tokens[:, :1], tokens[:, -1:]], dim=1)
        for other in range(max(band - 1, 0), min(band + 2, self.bands)):
            if self.written.issuperset(range(max(other - 1, 0), min(other + 2, self.bands))):
                for block in self._blocks_of(other, False):
                    self.held[block] = None


def by_windows(
    function: Callable[[Tensor, Dictionary], Tensor],
    tokens: Tensor,
    dictionary: Dictionary,
    memory: int,
    channels: int,
) -> Tensor:
    """
    `function(windows, dictionary)` on a partition of tokens [B, height, width, C], put together again; some windows at
    a time, at least one. `channels` says how many temporary values there are for each token. The tokens are
    overwritten with the result if it has their dtype: a window reads no other window's.
    """
    size, window, shift = (tokens.shape[1], tokens.shape[2]), dictionary.window, dictionary.shift
    window_tokens = window[0] * window[1]
    count = tokens.numel() // (tokens.shape[-1] * window_tokens)
    chunk = max(1, memory // (window_tokens * channels * tokens.element_size()))
    source = tokens.view(-1, tokens.shape[-1])
    result = source
    for start in range(0, count, chunk):
        chosen = slice(start, min(start + chunk, count))
        places = _window_places(chosen, size, window, shift, tokens.device)
        windows = source.index_select(0, places).unflatten(0, (-1, window_tokens))
        part = function(windows, dictionary.part(chosen)).flatten(0, 1)
        if result.dtype != part.dtype:
            result = part.new_empty(source.shape)
        result.index_copy_(0, places, part)
    return result.view(tokens.shape)


def _window_places(windows: slice, size: Pair, window: Pair, shift: Pair, device: torch.device) -> Tensor:
    """Places of the tokens of some windows in the list of all tokens of the feature maps: [W * N]."""
    rows, columns = size[0] // window[0], size[1] // window[1]
    numbers = torch.arange(windows.start, windows.stop, device=device)[:, None]
    image, row, column = numbers // (rows * columns), numbers // columns % rows, numbers % columns
    vertical = (row * window[0] + torch.arange(window[0], device=device) + shift[0]) % size[0]
    horizontal = (column * window[1] + torch.arange(window[1], device=device) + shift[1]) % size[1]
    lines = image * size[0] + vertical  # [W, window height]
    return (lines[:, :, None] * size[1] + horizontal[:, None]).flatten()


def find_runner(model: SemanIRModel, maps: Tensor, output_hidden_states: bool) -> Strips | None:
    memory = memory_of_call(model, maps.numel() // maps.shape[1], output_hidden_states)
    return None if memory is None else Strips(memory)


SemanIRModel.find_runner = find_runner  # type: ignore[method-assign, assignment]
