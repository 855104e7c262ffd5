"""Tiny real checkpoints for the tests of EMR-Merging; import them as `from tests.emr.emr_testing import ...`."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from diffusers import UNet2DModel
from huggingface_hub import HfApi, constants, save_torch_state_dict
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModel, BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from hf_ext.merging.plan import Plan, make_plan
from hf_ext.merging.tensors import COMPARED, KEPT
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz")


def write_weights(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, config=None, max_shard_size=None, metadata=None
) -> Path:
    """Writes raw tensors as a checkpoint folder, in shards when `max_shard_size` is given; with `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | (metadata or {})
    if max_shard_size is None:
        copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, folder / "model.safetensors", metadata=metadata)
    else:
        save_torch_state_dict(dict(tensors), folder, max_shard_size=max_shard_size, metadata=metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def raw_family(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str], scale: float, seed: int = 0
) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a base of these shapes, and what differs from it by `scale`; all that was written."""
    generator = torch.Generator().manual_seed(seed)
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found = {"base": base}
    for task in names:
        found[task] = {n: value + scale * torch.randn(value.shape, generator=generator) for n, value in base.items()}
    for name, tensors in found.items():
        write_weights(folder / name, tensors, config={"model_type": "bert", "architectures": ["BertModel"]})
    return found


def write_tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> Path:
    """Writes a word-level tokenizer whose ids are the places of `words`."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special).save_pretrained(folder)
    return folder


def perturb(model: nn.Module, seed: int, noise: float, chosen: Callable[[str], bool] = lambda name: True) -> None:
    """Stands in for a fine-tuning: uniform noise in [-noise, noise] on the parameters whose name is `chosen`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if chosen(name):
                parameter.add_((2 * torch.rand(parameter.shape, generator=generator) - 1).to(parameter.dtype) * noise)


def family(folder: Path, make: Callable[..., Path], names: Sequence[str] = "ab", **options: Any) -> dict[str, Any]:
    """The configuration of a merge of fine-tunes of what `make` writes, all of them in a folder."""
    base = make(folder / "base")
    tasks = {name: str(make(folder / name, seed, base=base, **options)) for seed, name in enumerate(names, 1)}
    return {"base": str(base), "tasks": tasks}


def tiny_bert(
    folder: Path,
    seed: int = 0,
    *,
    base: Path | None = None,
    num_labels: int = 2,
    task_head: bool = True,
    noise: float = 2e-3,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    **sizes: Any,
) -> Path:
    """
    Without `base`: a `BertModel` to start from. With it: a fine-tune of that base, `BertForSequenceClassification`
    with its own head and label names (names in the file start with `bert.`), or a `BertModel` if not `task_head`.
    """
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24} | sizes
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **shape)
    if base is None:
        model: Any = BertModel(config)
    elif task_head:
        config.id2label = {index: f"seed{seed}-{index}" for index in range(num_labels)}
        model = BertForSequenceClassification(config)
        model.bert.load_state_dict(BertModel.from_pretrained(base).state_dict(), strict=False)
        perturb(model.bert, seed, noise)
    else:
        model = BertModel.from_pretrained(base)
        perturb(model, seed, noise)
    model = model if dtype is None else model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return write_tokenizer(folder)


def maker(build: Callable[[], Any], finish: Callable[[Path], object] = lambda folder: None) -> Callable[..., Path]:
    """A function that writes what `build` gives, or a fine-tune of `base`, with what `finish` adds to the folder."""

    def write(folder: Path, seed: int = 0, *, base: Path | None = None, noise: float = 2e-3) -> Path:
        torch.manual_seed(seed)
        model = build()
        if base is not None:
            model = type(model).from_pretrained(base)
            perturb(model, seed, noise)
        model.save_pretrained(folder)
        finish(folder)
        return folder

    return write


_GPT2 = transformers.GPT2Config(
    vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3
)
_UNET: dict[str, Any] = {
    **{"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4},
    **{"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    "attention_head_dim": 4,
}
_SEMANIR = SemanIRConfig(embed_dim=8, depths=(1,), num_heads=(2,), window_size=4, top_k=6)
# A language model whose head is tied to its embedding, a model of diffusers, and our restorer with its processor.
tiny_gpt2 = maker(lambda: transformers.GPT2LMHeadModel(copy.deepcopy(_GPT2)), write_tokenizer)
tiny_unet = maker(lambda: UNet2DModel(**_UNET))
tiny_semanir = maker(
    lambda: SemanIRForImageRestoration(copy.deepcopy(_SEMANIR)),
    lambda folder: SemanIRImageProcessor().save_pretrained(folder),
)


def tiny_adapter(folder: Path, base: Path, seed: int = 0, *, kind: str = "lora", **options: Any) -> Path:
    """
    A peft adapter with random weights for the model in `base`: `kind` is `"lora"` or `"ia3"`, and `options` go to its
    configuration. `target_modules` defaults to the attention of BERT.
    """
    torch.manual_seed(seed)
    model = AutoModel.from_pretrained(base)
    options = {"target_modules": ["query", "value"]} | options
    with warnings.catch_warnings():
        # peft 0.21 asks transformers for a property by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        if kind == "lora":
            adapted = get_peft_model(model, LoraConfig(**({"r": 2, "init_lora_weights": False} | options)))
        else:
            adapted = get_peft_model(model, IA3Config(**({"feedforward_modules": []} | options)))
            perturb(adapted, seed, 0.1, lambda name: "ia3_" in name)
        adapted.save_pretrained(folder)
    return folder


def push_folder(url: str, repo_id: str, folder: Path) -> str:
    api = HfApi(endpoint=url, token=False)
    api.create_repo(repo_id, exist_ok=True)
    # the embedded Hub has no Xet storage
    with warnings.catch_warnings(), patch.object(constants, "HF_HUB_DISABLE_XET", True):
        # huggingface_hub 2.4 sends large files with an argument that its HTTP library deprecates
        warnings.filterwarnings("ignore", "Use 'content=<...>' to upload", DeprecationWarning)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder).oid)


def raw_plan(
    folder: Path, base: Mapping[str, torch.Tensor], *tasks: Mapping[str, torch.Tensor], **options: Any
) -> Plan:
    """A plan of raw checkpoints without configurations; the tasks are called t0, t1, …"""
    write_weights(folder / "base", base)
    for index, task in enumerate(tasks):
        write_weights(folder / f"t{index}", task)
    names = {f"t{index}": str(folder / f"t{index}") for index in range(len(tasks))}
    return make_plan({"base": str(folder / "base"), "tasks": names} | options)


def reasons(plan: Plan) -> dict[tuple[int, str], str]:
    """Why tasks keep tensors: by index of the task and name."""
    return {(item.task, item.name): item.reason for item in (*plan.own_tensors(KEPT), *plan.own_tensors(COMPARED))}


def resized(folder: Path, base: Path, words: tuple[str, ...], seed: int) -> Path:
    """A fine-tune of a tiny BERT whose embedding has rows for `words`, and a tokenizer for them."""
    tiny_bert(folder, seed, base=base, task_head=False)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["embeddings.word_embeddings.weight"]
    rows = torch.cat([embedding, torch.randn(64, embedding.shape[1])])[: len(words)]
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(words)}
    write_weights(folder, weights | {"embeddings.word_embeddings.weight": rows}, config=config)
    return write_tokenizer(folder, words)


CODE = """
from transformers import PretrainedConfig, PreTrainedModel
from .own_layers import Layer

class OwnConfig(PretrainedConfig):
    model_type = "own_of_a_test"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = Layer(8)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""
LAYERS = "import torch\n\nclass Layer(torch.nn.Linear):\n    def __init__(self, n):\n        super().__init__(n, n)\n"


def write_code(folder: Path, seed: int = 0, *, base: Path | None = None) -> Path:
    """A model whose class is in no library, with its code."""
    torch.manual_seed(seed)
    config = {
        "model_type": "own_of_a_test",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"},
    }
    # slow and fast, of which a model may lack one
    config["auto_map"]["AutoTokenizer"] = ["own_model.OwnTokenizer", None]
    tensors = {"layer.weight": torch.eye(8) + seed / 100 * torch.randn(8, 8), "layer.bias": torch.zeros(8)}
    write_weights(folder, tensors, config=config)
    (folder / "own_model.py").write_text(CODE)
    (folder / "own_layers.py").write_text(LAYERS)
    return folder
