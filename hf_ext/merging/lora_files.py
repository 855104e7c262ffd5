"""LoRA files of diffusers and of kohya's scripts as peft would have them, for the one model that is merged.

Such a file holds the factors for several models of a pipeline. diffusers' own conversions give the names; what is not
the base's model is left out. A file is small and read whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from hf_ext.hub.safetensors_headers import TensorInfo, parse_json_object

from .adapters import PREFIX, VirtualSource
from .sources import Source
from .tensors import Names

# The ends of names: of kohya's files, of diffusers' older and newer ones.
_DOWN = ("lora_down.weight", "lora.down.weight", "_lora.down.weight", "lora_linear_layer.down.weight", "lora_A.weight")
_UP = {"lora_down.weight": "lora_up.weight", "lora.down.weight": "lora.up.weight", "lora_A.weight": "lora_B.weight"}
# Of LyCORIS and DoRA, whose weights are not base + s·B·A.
_OTHERS = ("hada_", "lokr_", "oft_", "dora_scale", "lora_magnitude_vector", "lora_mid")
_PARTS = {"diffusers": ("unet", "transformer"), "transformers": ("text_encoder", "text_encoder_2", "text_encoder_3")}


def is_lora_file(source: Source) -> bool:
    """Whether a checkpoint is a LoRA that is not in peft's form."""
    return source.library != "peft" and any(name.endswith(_DOWN) for name in source.tensors)


class LoraFile(VirtualSource):
    """What a LoRA file changes in one model, as an adapter of peft with a scale of 1."""

    def __init__(self, file: Source, base: Source) -> None:
        super().__init__(file.label, file.spec, file.checkpoint, file.place)
        self._held, self.config = _convert(file, base)
        self.library = "peft"
        self.tensors = {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.nbytes, "", 0)
            for name, tensor in self._held.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the file's tensors for this model."""
        return sum(info.nbytes for info in self.tensors.values())

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As [`Source.read_into`]."""
        out.copy_(self._held[name].view(-1)[start:stop])


def _convert(file: Source, base: Source) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The factors under peft's names, and a configuration."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    odd = next((name for name in file.tensors if any(other in name for other in _OTHERS)), None)
    if odd is not None:
        raise ValueError(
            f"{file.title}: {odd!r} is of a variant (LoHa, LoKr, OFT, DoRA) whose weights are not base + s·B·A. Fuse "
            "it into the model with the tool that it was made with, and give the model as the task."
        )
    state = _apply_alphas({name: file.read(name).float() for name in file.tensors}, file)
    try:
        # Names of SDXL's blocks in the original code are counted by the layers of a block.
        layers = SimpleNamespace(**base.config) if "layers_per_block" in base.config else None
        state = StableDiffusionLoraLoaderMixin.lora_state_dict(state, unet_config=layers)[0]
    except (ValueError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{file.title}: diffusers does not know its names ({str(error).strip()[:200]}); LoRA files of Stable "
            "Diffusion 1, 2 and XL are read, and those that name modules as diffusers does."
        ) from error
    for part in _PARTS.get(base.library, ()):
        found = _rename({name: value for name, value in state.items() if name.startswith(f"{part}.")}, part)
        if found and _fits(found, base):
            return found, _configure(found, file, part)
    parts = sorted({name.partition(".")[0] for name in state})
    raise ValueError(
        f"{file.title} is a LoRA file for {', '.join(parts)}, and none of these is {base.title}; give the folder of "
        "that model in its pipeline as base."
    )


def _apply_alphas(state: dict[str, torch.Tensor], file: Source) -> dict[str, torch.Tensor]:
    """Multiplies alpha / r into the upper factors, so that no name of an alpha has to be followed."""
    for name in [name for name in state if name.endswith(".alpha")]:
        alpha, module = state.pop(name), name.removesuffix(".alpha")
        ends = [(down, up) for down, up in _UP.items() if f"{module}.{down}" in state and f"{module}.{up}" in state]
        if not ends:
            raise ValueError(f"{file.title}: {name!r} has no factors beside it; fetch or save the file again.")
        down, up = ends[0]
        state[f"{module}.{up}"] *= float(alpha) / len(state[f"{module}.{down}"])
    return state


def _rename(state: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    from diffusers.utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    state = {name.removeprefix(f"{part}.").replace(".processor.", "."): value for name, value in state.items()}
    if state and part.startswith("text_encoder"):
        state = convert_state_dict_to_peft(convert_state_dict_to_diffusers(state))
    elif state:
        state = convert_unet_state_dict_to_peft(state)
    return {PREFIX + name: value for name, value in state.items()}


def _list_modules(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The modules that are changed, with their ranks."""
    end = ".lora_A.weight"
    return {name.removeprefix(PREFIX).removesuffix(end): len(value) for name, value in state.items() if end in name}


def _fits(state: Mapping[str, torch.Tensor], base: Source) -> bool:
    """Whether the base has a module of the file, with its sides; the rest is told by name later."""
    modules = _list_modules(state)
    names = Names(base.tensors, {f"{module}.weight" for module in modules})
    for module in modules:
        found = base.tensors.get(names.in_base(f"{module}.weight"))
        b, a = (state.get(f"{PREFIX}{module}.lora_{side}.weight") for side in "BA")
        if found is not None and a is not None and b is not None:
            return (len(b), a.shape[1]) == tuple(found.shape[:2])
    return False


def _configure(state: Mapping[str, torch.Tensor], file: Source, part: str) -> dict[str, Any]:
    """What the file says of ranks and scales, as diffusers writes it; else a scale of 1."""
    text = file.metadata.get("lora_adapter_metadata") or "{}"
    told = parse_json_object(text.encode(), f"{file.title}, lora_adapter_metadata")
    own = {key.removeprefix(f"{part}."): value for key, value in told.items() if key.startswith(f"{part}.")}
    if own:
        return {**own, "peft_type": "LORA"}
    modules = _list_modules(state)
    # the first pattern that a name ends with counts
    pattern = {module: modules[module] for module in sorted(modules, key=lambda name: (-len(name), name))}
    largest = max(modules.values(), default=1)
    return {"peft_type": "LORA", "r": largest, "lora_alpha": largest, "alpha_pattern": pattern}
