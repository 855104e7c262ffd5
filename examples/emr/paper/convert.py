"""Weights that are published as pickles, as folders that hf-ext merge reads; of a pickle only tensors are read.

python examples/emr/paper/convert.py openai/clip-vit-base-patch32 converted/clip-vit-base-patch32
python examples/emr/paper/convert.py org/many converted/one --subfolder one
python examples/emr/paper/convert.py downloaded/rte/best.pt converted/ia3/rte --base converted/T0_3B
python examples/emr/paper/convert.py downloaded/beit3_base_patch16_224.pth converted/beit3/224
python examples/emr/paper/convert.py exported captioning.pth --pickle
"""

import argparse
import contextlib
import re
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from hf_ext.emr.building import model_class
from hf_ext.errors import run_script
from hf_ext.files import whole_file, whole_folder

# How the code of TIES-Merging names the vectors of (IA)³.
VECTOR = re.compile(r"((?:encoder|decoder)\..+)\.ia3_vector")


def main() -> None:
    """Converts what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or Hub id of a model of transformers, or a file of tensors (.pt, .pth)")
    parser.add_argument("out", type=Path, help="the folder that is written")
    parser.add_argument("--subfolder", default="", help="of the repository")
    parser.add_argument("--base", help="of (IA)³ vectors: the model that they belong to")
    parser.add_argument("--pickle", action="store_true", help="the other way: a folder's tensors into one file")
    given = parser.parse_args()
    if given.pickle:
        with whole_file(given.out) as file:
            torch.save({"model": load_file(Path(given.source) / "model.safetensors")}, file)
    elif Path(given.source).is_file():
        convert_tensors(Path(given.source), given.out, given.base)
    else:
        convert_model(given.source, given.out, given.subfolder)


def convert_model(source: str, out: Path, subfolder: str) -> None:
    """A model of transformers with its tokenizer and image processor."""
    config = AutoConfig.from_pretrained(source, subfolder=subfolder)
    model = model_class(config, Path(source), False).from_pretrained(source, subfolder=subfolder)
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        for reader in (AutoTokenizer, AutoImageProcessor):
            # A checkpoint has one, both or none of them.
            with contextlib.suppress(OSError, ValueError):
                reader.from_pretrained(source, subfolder=subfolder).save_pretrained(folder)


def convert_tensors(source: Path, out: Path, base: str | None) -> None:
    """A file of tensors: (IA)³ vectors of a T5 become an adapter of peft, all else a folder of the same tensors."""
    loaded = torch.load(source, map_location="cpu", weights_only=True)
    tensors = loaded["model"] if isinstance(loaded.get("model"), dict) else loaded
    vectors = {found[1]: value for name, value in tensors.items() if (found := VECTOR.search(name))}
    with whole_folder(out) as folder:
        if not vectors:
            copies = {name: value.contiguous().clone() for name, value in tensors.items()}
            save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})
            return
        if base is None:
            raise SystemExit(f"{source} holds (IA)³ vectors: name their model with --base.")
        modules = sorted({name.rpartition(".")[2] for name in vectors})
        # Each multiplies what its layer gives out, which peft does for all that are no `feedforward_modules`.
        peft.IA3Config(
            task_type="SEQ_2_SEQ_LM", base_model_name_or_path=base, target_modules=modules, feedforward_modules=[]
        ).save_pretrained(folder)
        named = {f"base_model.model.{name}.ia3_l": value.reshape(-1, 1) for name, value in vectors.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    run_script(main)
