"""Companions of a model's weights: code, tokenizer, processor, templates, and modules with weights of their
own. All files are taken except those on a list of exclusions, since libraries have files that no list could name. And
the tokens of the rows of two vocabularies, read from the files of their tokenizers.
"""

import fnmatch
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tokenizers import Tokenizer

from ..errors import DataError
from ..files import hash_file, read_json_object, same_bytes, stays_inside
from ..hub.disclosure import find_kind
from ..hub.published_files import LICENCES, MODULES, REPORTS, is_loaded, is_tokenizer, read_modules, walk
from ..hub.readings import read_text

_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index*.json", "*.bin", "*.bin.index*.json", "*.pt", "*.pth", "*.ckpt", "*.pkl"),
    *("*.pickle", "*.h5", "*.msgpack*", "*.ot", "*.onnx", "*.onnx?data", "*.gguf", "*.ggml", "*.tflite", "*.pb"),
    *("*.mlmodel", "*.pte"),
)
# The model's own weights again, under the names of other libraries.
_SAME = re.compile(r"((pytorch|tf|flax|rust|adapter|diffusion_pytorch)_)?model[\w.-]*|consolidated[\w.-]*")
# The same model for other programs, and states and logs of a training.
_FOLDERS = (
    *("onnx/*", "openvino/*", "original/*", "coreml/*", "checkpoint-*/*", "global_step*/*"),
    *("runs/*", "logs/*", "wandb/*", "mlruns/*"),
)
_STATES = (
    *("trainer_state.json", "*_results.json", "*.lock", "*.tmp", "*.partial", "*.py[co]", "*.log", "*tfevents*"),
    *_FOLDERS,
)
# What a card shows, data, and secrets.
_OTHERS = (
    *("*.png", "*.jp*g", "*.gif", "*.webp", "*.svg", "*.mp[34]", "*.webm", "*.wav", "*.flac", "*.pdf", "*.ipynb"),
    *("*.parquet", "*.arrow", "*.zip", "*.tar", "*.tar.gz"),
    *(".*", "*/.*", "*.pem", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*"),
)
# A merge writes its own.
_OWN = ("README.md", "emr.json", "emr_loader.py", *REPORTS)
# What is not fetched from a Hub.
LEFT_OUT = (*_WEIGHTS, *_STATES, *_OTHERS, *_OWN)
CODE = "*.py"
_MODULE = "model.safetensors"
# Files of tokens that are not read, only compared as a whole.
_WHOLE = (
    *("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
    *("sentencepiece.model", "spm.model", "spm_char.model", "tiktoken.model", "qwen.tiktoken", "vocab.tiktoken"),
    *("vocab.bpe", "bpe.codes", "dict.txt", "prophetnet.tokenizer", "vocab-src.json"),
)
# Files that list tokens, the first that is there counts.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", *_WHOLE)
# Tokens that were added to those of the other files.
_ADDED = ("added_tokens.json", "tokenizer_config.json")
# Beside the rows of tokens: the identity of a file that is compared as a whole.
_FILE = -1
# Chat templates and generation settings. A single model gets those of its tasks if all tasks agree.
_SPOKEN = ("generation_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*")
# The earlier places of the same: keys of a file, and the file that goes before them.
_EARLIER = {
    "tokenizer_config.json": (("chat_template",), "chat_template.jinja"),
    "config.json": (("eos_token_id", "pad_token_id"), "generation_config.json"),
}


@dataclass(frozen=True)
class Companions:
    """The files beside the weights of a checkpoint, by their paths in its folder."""

    files: Mapping[str, Path]
    modules: Mapping[str, Path]  # weights of modules of their own, such as a dense layer of sentence-transformers
    left_out: tuple[str, ...] = ()  # what is not taken though a model may need it, with the reason

    @property
    def all(self) -> dict[str, Path]:
        return {**self.files, **self.modules}


def find_companions(folder: Path, *, own: Collection[str] = (), alone: bool = False) -> Companions:
    """Lists what belongs to a model whose weights are the files `own`. If these were given as a file, `alone`, only
    what loaders read beside it is the model's."""
    inner, files, modules = read_modules(folder), dict[str, Path](), dict[str, Path]()
    others, left_out = set[str](), list[str]()
    for name, path in walk(folder):
        place = PurePosixPath(name).parent.as_posix()
        needed = is_loaded(name) or _is(name, (CODE,)) or name in inner or place in inner
        # a module that has the weights of our form may have them in others too
        again = path.name if place in inner and (path.parent / _MODULE).is_file() and path.name != _MODULE else name
        unsaid = _is(name, (*_OWN, ".git*", ".DS_Store"))
        if name in own or unsaid or (_is(name, _WEIGHTS) and _SAME.fullmatch(again)):
            continue
        if not path.is_file() or not stays_inside(folder, path):
            if needed:
                raise DataError(f"{path} is a link that leads out of its folder, or nowhere: copy its target there.")
            left_out.append(f"{name} (a link)")
        elif place in inner and _is(name, _WEIGHTS):
            modules[name] = path
        elif place != "." and _is(name, _WEIGHTS) and not _is(name, _STATES):
            others.add(place)
        elif _is(name, LEFT_OUT) and not _is(name, (CODE,)):
            # in one word with others of its folder
            of_folder = name if place == "." else f"{place}/*{path.suffix}"
            left_out.append(f"{name.partition('/')[0]}/" if _is(name, _FOLDERS) else of_folder)
        elif not alone or is_loaded(name):
            files[name] = path
    # A folder with weights that no list of modules names is another model.
    files = {name: path for name, path in files.items() if PurePosixPath(name).parent.as_posix() not in others}
    left_out += [f"{place}/ (weights of their own, which {MODULES} does not name)" for place in sorted(others)]
    for name, path in list(files.items()):
        if not is_loaded(name) and name not in LICENCES and (kind := find_kind(read_text(path))) is not None:
            del files[name]
            left_out.append(f"{name} ({kind})")
    return Companions(files, modules, () if alone else tuple(dict.fromkeys(left_out)))


def _is(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def find_absent(root: Collection[str], task: Companions) -> tuple[str, ...]:
    """The files of the root that a task must not get: another form of tokenizer, and how another model generates."""
    spoken, tuned = any(name in task.files for name in TOKENIZERS), "config.json" in task.files
    lacking = [name for name in root if name not in task.files]
    return tuple(name for name in lacking if (spoken and is_tokenizer(name)) or (tuned and name == _SPOKEN[0]))


def same_content(first: Path, second: Path) -> bool:
    """Compares two files; JSON may be formatted differently."""
    if first.suffix != ".json":
        return same_bytes(first, second)
    ours, theirs = first.read_bytes(), second.read_bytes()
    try:
        return ours == theirs or bool(json.loads(ours) == json.loads(theirs))
    except (ValueError, RecursionError):
        return False


def find_agreed(base: Companions, tasks: Collection[Companions]) -> dict[str, dict[str, Any]]:
    """Settings of all tasks alike, not of the base, at the earlier place of a template or of ends, by file and key."""
    found = dict[str, dict[str, Any]]()
    for name, (keys, _) in _EARLIER.items():
        if all(name in own.files for own in (base, *tasks)):
            try:
                ours, first, *others = (read_json_object(own.files[name]) for own in (base, *tasks))
            except ValueError:  # as with a repeated key
                continue
            told = {key: first[key] for key in keys if key in first and first[key] != ours.get(key)}
            same = {key: value for key, value in told.items() if all(other.get(key) == value for other in others)}
            found |= {name: same} if same else {}
    return found


def join_companions(base: Companions, tasks: Mapping[str, Companions]) -> tuple[dict[str, Path], list[str], list[str]]:
    """
    The files of one model that is merged of several; weights in folders of their own, which differ and are merged by
    themselves; and, in words, what of the tasks is in neither.

    They are the base's; where it has none, and for what a model is spoken to with, those in which all tasks agree.
    Weights of a module that are in some of the models only, or are no safetensors, are refused.
    """
    ours, joined = base.all, base.all
    differing: dict[str, list[str]] = defaultdict(list)
    modules: dict[str, None] = {}
    for name in dict.fromkeys(name for own in tasks.values() for name in own.all):
        held = [own.all.get(name) for own in tasks.values()]
        first = next(path for path in held if path is not None)
        agreed = all(path is not None and same_content(first, path) for path in held)
        if agreed and (name not in ours or _is(name, _SPOKEN)):
            joined[name] = first
            continue
        for title, path in zip(tasks, held, strict=True):
            if path is None or (name in ours and same_content(ours[name], path)):
                continue
            if name not in tasks[title].modules:
                differing[title].append(name)
            elif all(name in own.modules for own in (base, *tasks.values())) and name.endswith(f"/{_MODULE}"):
                modules[name] = None
                joined.pop(name, None)
            else:
                raise DataError(
                    f"{title}: {name} contains weights of a separate module that differ from the base's, and cannot "
                    "be merged because base and tasks do not all have it as model.safetensors. Save it in this form "
                    "everywhere, or choose a method with masks, with which each task keeps its module."
                )
    # the list of modules, which the base does not have, goes with all of their files or not at all
    places = read_modules(joined[MODULES].parent) if MODULES in joined and MODULES not in ours else []
    files = [name for own in tasks.values() for name in own.all if PurePosixPath(name).parent.as_posix() in places]
    unit = {MODULES, *files} if places else set()
    if not unit <= joined.keys():
        for title, own in tasks.items():
            differing[title] += [name for name in own.all if name in unit and name not in differing[title]]
        joined = {name: path for name, path in joined.items() if name not in unit}
    told = []
    for title, names in differing.items():
        for ending, there in (("gets the base's", True), ("has none", False)):
            if some := [name for name in names if (name in ours) == there]:
                told.append(f"{title} has its own {', '.join(some)}, or some tasks lack it; the merged model {ending}")
    for name, settings in find_agreed(base, tasks.values()).items():
        if name == "tokenizer_config.json" and not any(_EARLIER[name][1] in own.files for own in tasks.values()):
            joined.pop(_EARLIER[name][1], None)
        told.append(f"{name}: the merged model gets {', '.join(settings)} of the tasks, which agree")
    return joined, [*modules], told


class UnreadableError(Exception):
    """A tokenizer whose tokens cannot be told here."""


def compare_tokens(base: Mapping[str, Path], task: Mapping[str, Path], taken: dict[int, str]) -> str:
    """The first difference in words of what the rows of two vocabularies mean, from the files of their tokenizers.

    No row may mean two tokens. One that has a token on one side only, and a tokenizer that is not there, do not count.
    `taken` has the tokens of earlier tasks in rows to which the base gives no meaning; the task's are added. Raises
    `UnreadableError` if the two share no form of tokenizer, and transformers cannot read one of them.
    """
    # of tokenizers in several forms, one that both have
    common = next((name for name in TOKENIZERS if name in base and name in task), None)
    ours, theirs = _choose(base, common), _choose(task, common)
    if not theirs:
        return ""
    # those of fine-tunes mostly have the same bytes, and to parse them takes longer
    if [path.name for path in ours] == [path.name for path in theirs] and all(map(same_bytes, ours, theirs)):
        return ""
    first, second = (_read_tokens(files, load=bool(ours) and common is None) for files in (ours, theirs))
    known = {**taken, **first}
    for row in sorted(known.keys() & second.keys()):
        if known[row] != second[row]:
            where = "the base" if row in first else "another task"
            what = "the tokenizer" if row == _FILE else f"token {row}"
            return f"{what} is {known[row]!r} in {where} and {second[row]!r} in the task"
    taken.update({row: token for row, token in second.items() if row not in first})
    return ""


def count_tokens(files: Mapping[str, Path]) -> int:
    """The rows of a vocabulary, by the files of its tokenizer; 0 if they do not tell them."""
    return 1 + max(_read_tokens(_choose(files, None), load=False), default=_FILE)


def _choose(files: Mapping[str, Path], wanted: str | None) -> list[Path]:
    listing = wanted or next((name for name in TOKENIZERS if name in files), "")
    added = () if listing in ("", "tokenizer.json") else _ADDED
    return [files[name] for name in (listing, *added) if name in files]


def _read_tokens(files: Sequence[Path], *, load: bool) -> dict[int, str]:
    """The tokens of a vocabulary by their rows, of a file that is no list as transformers loads it if `load`."""
    tokens: dict[int, str] = {}
    if load and files and files[0].name in _WHOLE:
        return _load_tokens(files[0])
    for file in files:
        try:
            tokens |= _read_file(file)
        except Exception as error:
            # that of the library of tokenizers has no class of its own
            raise DataError(f"{file}: malformed ({type(error).__name__}: {error}); fetch it again.") from error
    return tokens


def _load_tokens(file: Path) -> dict[int, str]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
        added = set(tokenizer.get_added_vocab())
        tokens = {row: token for token, row in tokenizer.get_vocab().items()}
    except Exception as error:
        # whatever the class of the tokenizer raises, such as for a library that is not installed
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableError(f"transformers does not load {file.name} here ({reason:.160})") from error
    if added >= set(tokens.values()):
        # a class that does not find its file may begin with nothing but its special tokens
        raise UnreadableError(f"transformers finds no tokens in {file.name} here")
    return tokens


def _read_file(file: Path) -> dict[int, str]:
    """The tokens of one file by their rows; its errors are those of a malformed file."""
    if file.name == "tokenizer.json":
        return {row: token for token, row in Tokenizer.from_file(str(file)).get_vocab().items()}
    if file.name not in _WHOLE:
        text = file.read_text(encoding="utf-8")
        if file.name == "vocab.txt":
            return dict(enumerate(text.removesuffix("\n").split("\n")))
        told = json.loads(text)
        if file.name == "tokenizer_config.json":
            return {int(row): item["content"] for row, item in told.get("added_tokens_decoder", {}).items()}
        # otherwise a vocabulary for each language, as of MMS, whose tokens share the rows
        if not any(isinstance(row, dict) for row in told.values()):
            return {row: token for token, row in told.items()}
    return {_FILE: f"{file.name} {hash_file(file)[:12]}"}
