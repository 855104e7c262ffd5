"""Tiny models and data under the ids of the paper's recipes. Each maker returns the score that each model must get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import jinja2
import jinja2.meta
import numpy as np
import torch
import yaml
from PIL import Image
from tokenizers import processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_ext.tasks.texts import byte_tokenizer
from tests.emr.emr_testing import perturb

# Of the four samples of each set the last has a wrong label.
SAMPLES = 4
Push = Callable[..., None]
Scores = dict[str, float]


def save_as_pickle(model: Any, folder: Path) -> Path:
    """A folder as transformers wrote it before safetensors."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def mislabel(found: list[int], count: int) -> list[int]:
    """What a model says, but for the last sample."""
    return [*found[:-1], (found[-1] + 1) % count]


def write_set(folder: Path, configs: Mapping[str | None, Mapping[str, dict[str, list]]], images: bool = False) -> Path:
    """A data set as parquet files, with the configurations and splits that its card names."""
    told = []
    for name, splits in configs.items():
        files = []
        for split, columns in splits.items():
            data = datasets.Dataset.from_dict(columns)
            if images:
                data = data.cast_column("image", datasets.Image())
            path = f"{name or 'data'}/{split}.parquet"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            data.to_parquet(folder / path)
            files.append({"split": split, "path": path})
        told.append({"config_name": name or "default", "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': told})}---\n")
    return folder


def draw_pictures(seed: int, size: int = 16) -> list[Image.Image]:
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(SAMPLES)]


def make_clips(place: Path, recipe: dict[str, Any], push: Push) -> Scores:
    """Encoders of pictures, and the CLIP that they are from, as a pickle."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(77)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**size, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config={**size, "image_size": 16, "patch_size": 8}, projection_dim=12)
    clip = CLIPModel(config).eval()
    perturb(clip, 0, 0.2)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    base = place / "clip"
    save_as_pickle(clip, base)
    tokenizer.save_pretrained(base)
    processor.save_pretrained(base)
    push("openai/clip-vit-base-patch32", base)
    for number, (name, entry) in enumerate(recipe["tasks"].items(), 1):
        clip.save_pretrained(place / "clip-whole")
        encoder = CLIPVisionModel.from_pretrained(place / "clip-whole").eval()
        perturb(encoder, number, 0.05)
        encoder.save_pretrained(place / name)
        push(f"tanganke/clip-vit-base-patch32_{name}", place / name)
        pictures = draw_pictures(number)

        def encode(words: str, templates: list[str] = entry["task"]["templates"]) -> torch.Tensor:
            """The mean of the unit vectors of what the templates make of a class."""
            texts = [tokenizer(text.format(words), truncation=True, return_tensors="pt") for text in templates]
            rows = [clip.text_projection(clip.text_model(**tokens).pooler_output)[0] for tokens in texts]
            return torch.nn.functional.normalize(torch.stack([row / row.norm() for row in rows]).mean(0), dim=0)

        with torch.no_grad():
            head = torch.stack([encode(words) for words in entry["task"]["class_names"]])
            pixels = processor(pictures, return_tensors="pt")["pixel_values"]
            features = clip.visual_projection(encoder(pixel_values=pixels).pooler_output)
            found = (features @ head.T).argmax(-1).tolist()
        columns = {"image": pictures, "label": mislabel(found, len(head))}
        source = entry["data"]
        sets = {source.get("name"): {source["split"]: columns}}
        push(source["path"], write_set(place / f"{name}-data", sets, images=True), repo_type="dataset")
    return dict.fromkeys(recipe["tasks"], 0.75)


def make_sentences(seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["a" + "".join(generator.choice(list("abcd "), int(generator.integers(5, 20)))) for _ in range(SAMPLES)]


def make_gpt2s(place: Path, recipe: dict[str, Any], push: Push) -> Scores:
    """Classifiers without a padding token in their tokenizers, and GLUE with their labels."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(64)
    tokenizer.pad_token = None
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, **ends)
    GPT2LMHeadModel(config).save_pretrained(place / "gpt2")
    tokenizer.save_pretrained(place / "gpt2")
    push("openai-community/gpt2", place / "gpt2")
    sets: dict[str | None, Any] = {}
    for number, (name, entry) in enumerate(recipe["tasks"].items(), 1):
        torch.manual_seed(number)
        count = 3 if name == "mnli" else 2
        model = GPT2ForSequenceClassification.from_pretrained(place / "gpt2", num_labels=count).eval()
        perturb(model, number, 0.3)
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        push(f"tanganke/gpt2_{name}", place / name)
        texts = {column: make_sentences(100 * number + len(column)) for column in entry["task"]["text_columns"]}
        found = []
        for row in zip(*texts.values(), strict=True):
            tokens = tokenizer(*row, truncation=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits[0]
            found.append(int(logits.argmax()))
        sets[name] = {entry["data"]["split"]: {**texts, "label": mislabel(found, count)}}
    push("nyu-mll/glue", write_set(place / "glue", sets), repo_type="dataset")
    return dict.fromkeys(recipe["tasks"], 0.75)


# Columns that hold no texts.
OTHERS: dict[str, Any] = {
    "endings": [["a b", "b a", "c c", "d a"]] * SAMPLES,
    "question": ["cause", "effect"] * (SAMPLES // 2),
}


def find_columns(task: dict[str, Any]) -> list[str]:
    """Names that the prompts and the choices of a task use."""
    texts = map(jinja2.Environment().parse, [*task["prompts"], *task["choices"]])
    return sorted(set().union(*map(jinja2.meta.find_undeclared_variables, texts)))


def make_t0s(place: Path, recipe: dict[str, Any], push: Push) -> Scores:
    """(IA)³ vectors as TIES' authors publish them; the labels are those of the base with these vectors."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(512)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    base = T5ForConditionalGeneration(config).eval()
    perturb(base, 0, 0.3)
    base.save_pretrained(place / "t0")
    tokenizer.save_pretrained(place / "t0")
    push("bigscience/T0_3B", place / "t0")
    sets: dict[str, dict[str | None, Any]] = {}
    scores = {}
    for number, (name, entry) in enumerate(recipe["tasks"].items(), 1):
        model = T5ForConditionalGeneration.from_pretrained(place / "t0").eval()
        generator, vectors = torch.Generator().manual_seed(number), {}
        for path, layer in model.named_modules():
            if path.rpartition(".")[2] in ("k", "v", "wi_1"):
                vector = 1 + torch.rand(layer.out_features, generator=generator) - 0.5
                vectors[f"transformer.{path}.ia3_vector"] = vector
                layer.weight.data *= vector[:, None]
        file = place / "downloaded" / name / "best.pt"
        file.parent.mkdir(parents=True)
        torch.save(vectors, file)
        task = entry["task"]
        texts = {key: make_sentences(10 * number + len(key)) for key in find_columns(task)}
        columns = {key: OTHERS.get(key) or [text.strip() for text in value] for key, value in texts.items()}
        known = task.get("labels") or list(range(len(task["choices"])))
        found = np.array([choose(model, tokenizer, columns, prompt, task["choices"]) for prompt in task["prompts"]])
        truth = np.array(mislabel(found[0].tolist(), len(known)))
        scores[name] = float(np.median((found == truth).mean(1)))
        labels = [known[label] for label in truth]
        columns |= {task.get("label_column", "label"): labels}
        source = entry["data"]
        if source["path"].startswith("data/"):
            file = place / source["path"]
            file.parent.mkdir(exist_ok=True)
            datasets.Dataset.from_dict(columns).to_csv(file)
        else:
            sets.setdefault(source["path"], {}).setdefault(source.get("name"), {})[source["split"]] = columns
    for number, (path, configs) in enumerate(sets.items()):
        push(path, write_set(place / f"set{number}", configs), repo_type="dataset")
    return scores


def choose(model: Any, tokenizer: Any, columns: dict[str, list], prompt: str, choices: list[str]) -> list[int]:
    """The likeliest answers to a prompt, one forward for each of them."""
    found = []
    for index in range(SAMPLES):
        example = {name: values[index] for name, values in columns.items()}
        question = jinja2.Template(prompt).render(example).strip()
        tokens = tokenizer(question, truncation=True, max_length=512, return_tensors="pt")
        scores = []
        for choice in choices:
            labels = tokenizer(jinja2.Template(choice).render(example).strip(), return_tensors="pt")["input_ids"]
            with torch.no_grad():
                out = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], labels=labels)
            scores.append(-float(out.loss) * labels.shape[1])
        found.append(int(np.argmax(scores)))
    return found


def make_beits(place: Path, recipe: dict[str, Any], push: Push) -> Scores:
    """Tensors in the layout of unilm: names, a head of each task, positions for larger pictures."""
    names = ("224", "224_in1k", "480_vqa", "480_coco_captioning", "384_coco_retrieval", "224_nlvr2")
    generator = torch.Generator().manual_seed(0)
    base = {f"beit3.encoder.layers.{layer}.fc1.A.weight": torch.randn(6, 4, generator=generator) for layer in (0, 1)}
    (place / "downloaded").mkdir()
    for name in names:
        size = int(name[:3]) // 16
        tensors = {key: value + 0.1 * torch.randn(6, 4, generator=generator) for key, value in base.items()}
        tensors["beit3.encoder.embed_positions.A.weight"] = torch.randn(size, 4, generator=generator)
        if name != "224":
            tensors[f"head_{name}.weight"] = torch.randn(2, 4, generator=generator)
        torch.save({"model": tensors}, place / "downloaded" / f"beit3_base_patch16_{name}.pth")
    return {}


TABLES = {
    "vit-b32-8": make_clips,
    "gpt2-glue": make_gpt2s,
    "t0-3b-ia3": make_t0s,
    "beit3-5": make_beits,
}
