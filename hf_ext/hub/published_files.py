"""Choice of the files of a folder to publish: by name, never by pattern alone, never through a link that leaves it.

The names are those that transformers, diffusers, peft and their tokenizers write. Whatever else lies in a folder
(notes, credentials, states of a training) stays behind, and [`Listing`] says so before anything is uploaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..errors import NotPublished
from ..files import copy_into, read_json, stays_inside
from ..terminal import count_of

# Configurations of models, adapters and processors.
_CONFIGURATIONS = """
adapter_config.json audio_tokenizer_config.json config.json generation_config.json preprocessor_config.json
processor_config.json video_preprocessor_config.json
"""
# What tokenizers of transformers write or have written, in all of its families.
_OF_TOKENIZERS = """
added_tokens.json chat_template.jinja chat_template.json special_tokens_map.json tokenizer.json tokenizer_config.json
bpe.codes byte_maps.json dict.txt emoji.json encoder.json entity_vocab.json merges.txt normalizer.json
prophetnet.tokenizer qwen.tiktoken sentencepiece.bpe.model sentencepiece.model source.spm spiece.model spm.model
spm_char.model target.spm target_vocab.json tekken.json tiktoken.model tokenizer.model tokenizer.model.v3
vocab-src.json vocab-tgt.json vocab.bpe vocab.json vocab.tiktoken vocab.txt word_pronunciation.json word_shape.json
"""
CONFIGURATIONS, _TOKENIZERS = frozenset(_CONFIGURATIONS.split()), frozenset(_OF_TOKENIZERS.split())
# Of every place that such files lie in: more chat templates, and further tokenizers and processors of one processor.
_TEMPLATE = re.compile(r"additional_chat_templates/[\w\-]+\.jinja")
_PART = re.compile(r"\w+_(?:tokenizer|image_processor|video_processor|feature_extractor)/([\w.\-]+)")
# The weights, whole or in shards, with the name of a variant (`fp16`) in the places where the libraries write it.
_WEIGHTS = re.compile(
    r"(?:model|adapter_model|diffusion_pytorch_model)"
    r"(?:(?:\.\w+)?(?:-\d{5}-of-\d{5})?(?:\.\w+)?\.safetensors|(?:\.\w+)?\.safetensors\.index(?:\.\w+)?\.json)"
)
# The modules of sentence-transformers: their list, and configurations of its own beside it.
MODULES = "modules.json"
_OF_MODULES = re.compile(r"modules\.json|config_sentence_transformers\.json|sentence_[\w\-]+_config\.json")
_VARIANT = re.compile(r"(?:diffusion_pytorch_)?model\.(?:(\w+)\.)?safetensors(?:\.index(?:\.(\w+))?\.json)?")
LICENCES = frozenset(
    name + kind for name in ("LICENSE", "LICENCE", "NOTICE", "COPYING") for kind in ("", ".txt", ".md", ".rst")
)
# What describes a run or a merge and its results; the card is made from it.
REPORTS = ("eval.json", "training.json", "report.json", "report.png")
# What the model does, for its card; a training writes none: whose pictures may be shown, its owner decides.
PICTURE = "before_after.png"
# What is said of those that are published in part.
_CUT = {
    ".png": "without the notes in it (texts, EXIF)",
    ".json": "without folders of this machine, and users, passwords and queries of addresses",
}
# Folders of version control and the like; nobody means to publish them, so they are not listed either.
UNLISTED = frozenset((".git", ".cache", "__pycache__"))


def is_loaded(name: str) -> bool:
    """True if a loader of transformers, diffusers or peft reads a file of this name."""
    if part := _PART.fullmatch(name):
        return part[1] in CONFIGURATIONS | _TOKENIZERS
    kinds = (_WEIGHTS, _TEMPLATE, _OF_MODULES)
    return name in CONFIGURATIONS | _TOKENIZERS or any(kind.fullmatch(name) for kind in kinds)


def read_modules(folder: Path) -> list[str]:
    """Sub-folders of the modules of a sentence-transformers model."""
    told = read_json(folder / MODULES) if (folder / MODULES).is_file() else []
    paths = [item.get("path") for item in told if isinstance(item, dict)] if isinstance(told, list) else []
    named = [path for path in paths if isinstance(path, str) and ".." not in path.split("/")]
    return [place for path in named if (place := PurePosixPath(path).as_posix()) != "."]


def loaded_of(folder: Path) -> Callable[[str], bool]:
    """[`is_loaded`] for the files of a folder, which may have modules in folders of their own."""
    places = read_modules(folder)

    def reads(name: str) -> bool:
        place, _, file = name.rpartition("/")
        return is_loaded(name) or (place in places and (is_loaded(file) or file.endswith("_config.json")))

    return reads


def find_variant(folder: Path) -> str | None:
    """The variant (`fp16`) that a folder has the weights of, where it has no others."""
    found = {match[1] or match[2] for path in folder.iterdir() if (match := _VARIANT.fullmatch(path.name))}
    return found.pop() if len(found) == 1 else None


def is_tokenizer(name: str) -> bool:
    return name in _TOKENIZERS or bool(_TEMPLATE.fullmatch(name))


def is_described(name: str) -> bool:
    """True if a file of this name describes a model: card, picture, licence, or a report of hf-ext."""
    return name in ("README.md", PICTURE) or name in LICENCES or name in REPORTS


def walk(folder: Path, skipped: frozenset[str] = UNLISTED) -> Iterator[tuple[str, Path]]:
    """All files of a folder, and links to other folders, which are not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped)
        linked = [name for name in folders if Path(place, name).is_symlink()]
        for name in sorted([*files, *linked]):
            path = Path(place, name)
            yield path.relative_to(folder).as_posix(), path


def copy_files(folder: Path, out: Path, chosen: Callable[[str], bool]) -> None:
    """Copies the chosen files of a model that `refuse_links` has seen, but for links that leave its folder."""
    files = ((name, path) for name, path in walk(folder) if chosen(name) and path.is_file())
    copy_into({name: path for name, path in files if stays_inside(folder, path)}, out)


def copy_license(source: Path, out: Path, link: object) -> None:
    """Copies the file that the card of a folder names as its licence; refuses a name that leads nowhere."""
    if not isinstance(link, str) or not re.fullmatch(r"[^\s:]+", link):
        return
    text = source / link
    # a text, so that no metadata can publish code or credentials
    readable = re.fullmatch(r"(?:[\w\-][\w.\-]*/)*[\w\-]+(?:\.(?:txt|md|rst|html|pdf))?", link)
    if readable and (out / link).is_file():
        return
    if not readable or not text.is_file() or not stays_inside(source, text):
        told = "put a text of this name there (.txt, .md, .rst, .html, .pdf or no ending), or give its address"
        raise NotPublished(f"README.md: license_link names {link!r}, which is not published: {told}")
    copy_into({link: text}, out)


def refuse_links(folder: Path, reads: Callable[[str], bool]) -> None:
    """Refuses a folder of which a loader would read what lies elsewhere."""
    # What only describes the model stays behind where it is such a link; what is loaded cannot: without it the model
    # would be published broken.
    for name, path in walk(folder):
        if reads(name) and not stays_inside(folder, path):
            told = "which is not published; copy its target into the folder, or remove the link"
            raise NotPublished(f"{path}: a link that leaves the folder, {told}")


@dataclass(frozen=True)
class Listing:
    """Files that a push uploads, and files that it leaves behind."""

    files: dict[str, int]  # bytes of every file, by its path in the repository
    stays_behind: dict[str, str] = field(default_factory=dict)  # why, of every file or whole folder
    notes: tuple[str, ...] = ()  # what the owner should look at, such as a path of this machine in a card
    deleted: tuple[str, ...] = ()  # files of an earlier model in the repository; known where the Hub was asked


def list_files(folder: Path, staged: Path, notes: tuple[str, ...] = ()) -> Listing:
    """Compares a folder with what was staged of it."""
    files = {name: path.stat().st_size for name, path in walk(staged) if path.is_file()}
    behind: dict[str, str] = {}
    kept = {name.partition("/")[0] for name in files if "/" in name}
    inner: dict[str, list[str]] = {}
    for name, path in walk(folder):
        top, nested, _ = name.partition("/")
        if nested and top not in kept:
            inner.setdefault(top, []).append(path.name)
        elif name not in files or not stays_inside(folder, path):
            behind[name] = _reason(folder, name, path)
    for top, names in inner.items():
        weights = any(map(_WEIGHTS.fullmatch, names))
        what = "weights that lie in a folder of their own" if weights else "no files of a model"
        behind[f"{top}/"] = f"{count_of(len(names), 'file')}, {what}"
    notes += tuple(
        f"{name}: is uploaded {_CUT['.png' if name.endswith('.png') else '.json']}"
        for name in files
        if name in (*REPORTS, PICTURE) and (folder / name).read_bytes() != (staged / name).read_bytes()
    )
    return Listing(files, dict(sorted(behind.items())), notes)


def _reason(folder: Path, name: str, path: Path) -> str:
    if not stays_inside(folder, path):
        return "a link that leaves the folder"
    if name.endswith(".py"):
        return "code; the files of the installed package are published instead"
    if _WEIGHTS.fullmatch(path.name):
        return "weights of a variant; the model is uploaded once, under the default names"
    return "not a file of a model"
