"""Stand-ins of the networks that score pictures: of Inception's file, and of a CLIP model."""

import json
import warnings
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer


class NotInception(torch.nn.Module):
    """Takes and returns what NVIDIA's file does; 2048 numbers are made of means over rows and columns."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, images: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        values = self.scale * images.to(torch.float32) / 255
        features = torch.cat([values.mean(2).flatten(1), values.mean(3).flatten(1)], 1).repeat(1, 2048)[:, :2048]
        return features if return_features else features[:, :1008]


def write_inception(path: Path, scale: float = 1.0) -> str:
    with warnings.catch_warnings():
        # A DeprecationWarning up to torch 2.14, a FutureWarning since then.
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        torch.jit.script(NotInception(scale)).save(str(path))
    return str(path)


def write_clip(folder: Path) -> str:
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    letters = [chr(97 + index) for index in range(26)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=12)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 54, "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return str(folder)
