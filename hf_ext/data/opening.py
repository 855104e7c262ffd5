"""Sources of examples: files, folders, the Hub and mixtures of them, opened with `datasets`."""

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import httpx2
from datasets.data_files import ALL_DEFAULT_PATTERNS, DataFilesList
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import ParquetConfig
from datasets.packaged_modules.text.text import TextConfig
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from fsspec.utils import glob_translate
from huggingface_hub import HfApi

from hf_ext import __version__

from ..errors import DataError
from ..terminal import count_of
from .about import METADATA, find_part, open_described, open_text_folders, refuse_hidden_splits
from .builders import LineFiles, PictureFolder, RecordingFolder, TableFiles, TarFiles
from .caching import CacheError, refuse_cache
from .camera_pictures import CAMERA_SUFFIXES, IMAGE_SUFFIXES, decode_camera_pictures
from .files import (
    AUDIO_SUFFIXES,
    UNOPENABLE,
    find_tars,
    first_files,
    is_broken_picture,
    is_broken_sound,
    list_files,
    refuse_cut_tars,
)
from .sequence_files import ARRAYS, SUFFIXES, open_arrays, open_sequences
from .source import DataSource, SourcePart
from .splits import SPLIT_WORDS, hold_out, make_part, set_tests_apart, slice_split, split_of
from .tables import is_utf8

# What `datasets` reads files of an ending with.
MODULES = {".csv": "csv", ".tsv": "csv", ".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
MODULES |= dict.fromkeys(IMAGE_SUFFIXES, "imagefolder") | dict.fromkeys(AUDIO_SUFFIXES, "audiofolder")

# Usual names of folders and columns of pairs: inputs, targets.
PAIRS = (
    ("lq", "hq"), ("lr", "hr"), ("noisy", "clean"), ("input", "target"), ("input", "gt"), ("input", "groundtruth"),
    ("low", "high"), ("blur", "sharp"), ("blurry", "sharp"), ("blurred", "sharp"), ("rain", "clean"),
    ("hazy", "clear"), ("degraded", "clean"), ("source", "target"), ("lq", "gt"), ("lr", "gt"), ("noisy", "gt"),
    ("blur", "gt"), ("hazy", "gt"), ("rain", "gt"), ("rain", "norain"), ("a", "b"), ("real", "mean"),
)  # fmt: skip

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset


def open_source(source: DataSource, section: str = "data") -> AnyDataset:
    """Opens a data source."""
    parts = source.parts
    try:
        if parts:
            return _join([open_source(part, section) for part in parts], parts)
        # hold_out divides the training split; an existing split `validation` is ignored.
        whole = replace(source, split="train", hold_out=0.0) if source.hold_out else source
        data = _read_as_files(_load(whole, section))
        if names := source.new_names:
            known = {*(data.column_names or ())}
            if twice := {new for old, new in names.items() if old in known and new in known - names.keys()}:
                raise DataError(f"rename_columns makes a second column {min(twice)!r}: rename the first one too.")
            data = data.rename_columns(names)
        if source.hold_out:
            data, tests = set_tests_apart(data)
            if source.split == "test" and not len(tests):
                told = "no column split calls examples so; of a folder or file called test, set hold_out: 0"
                raise DataError(f"there is no split 'test': {told}.")
            if source.split == "test":
                return tests
            data = hold_out(data, source.hold_out, source.hold_out_seed, measures=source.split == "validation")
        return data
    except (SourceError, CacheError):
        raise
    # datasets raises ConnectionError, an OSError, for an unreachable Hub, and RuntimeError for scripts.
    except (datasets.exceptions.DatasetsError, StopIteration, *UNOPENABLE) as error:
        refuse_cache(error)
        here = parts or find_files(source.path)
        told = "" if here else "there is no such folder or file here, and as a data set of the Hub: "
        told += f"{_reasons(error)} {_advice(section)}"
        raise SourceError(f"cannot read data from {source.path!r} (split {source.split!r}): {told}") from error


def name_sets(data: datasets.Dataset | dict[str, datasets.Dataset] | None) -> dict[str, datasets.Dataset]:
    """Evaluation sets by name; a single one has an empty name."""
    named: dict[Any, datasets.Dataset] = data if isinstance(data, dict) else {} if data is None else {"": data}
    return {str(name): rows for name, rows in named.items()}


def describe_memory(data: datasets.Dataset) -> DataSource:
    """Name in results of a data set that was given in Python."""
    return DataSource(data.info.dataset_name or "a data set given in Python", split=str(data.split or "all"))


class SourceError(DataError):
    """Data that cannot be opened."""


def find_files(path: Any) -> list[str]:
    """The local folder or files of a path or of a pattern such as `shards/*.tar`."""
    place = Path(os.path.expanduser(path))
    if not str(path):
        return []
    return [str(place)] if place.exists() else sorted(glob.glob(str(place), recursive=True))


# What `datasets` says, of a format with four lines of file name extensions, in words for users.
_KINDS = "pictures, sounds, texts, CSV, TSV, JSON lines, parquet, NumPy, .ts"
_PLAIN = {
    r"(?:Unable to find|Couldn't find any data file at) (\S+) with any supported extension \[.*\]": (
        rf"\1 contains no supported files; supported: {_KINDS}"
    ),
    r'Unknown split ("\w+")\. Should be one of (\[.*?\])\.?': (
        r"there is no split \1, but \2: rename its folder or file, or set data.train.split"
    ),
    r"invalid literal for int\(\) with base 10: b": "a .cls file of webdataset, which holds a whole number, holds ",
    'Instruction "train" corresponds to no data!|Please pass `features` or at least one example when writing data': (
        "it holds no example"
    ),
}


def _reasons(error: BaseException | None) -> str:
    # datasets wraps the informative exception in "An error occurred".
    texts: list[str] = []
    while error is not None:
        text = " ".join(str(error).split())
        for words, plain in _PLAIN.items():
            text = re.sub(words, plain, text)
        # What guesses the module of an empty file finds no line.
        text = "it holds no example" if isinstance(error, StopIteration) else text or type(error).__name__
        if not any(text in known for known in texts):
            texts.append(text)
        error = error.__cause__
    return " ← ".join(text.rstrip(".") for text in texts) + "."


def _advice(section: str) -> str:
    if section == "data":
        return ""
    without = ", or train without an evaluation: --data.eval null" if section == "data.eval" else ""
    return f"Set --{section}.path (and --{section}.split){without}."


def _load(source: DataSource, section: str) -> AnyDataset:
    found = find_files(source.path)
    if not found:
        return _load_from_hub(source, section)
    if len(found) > 1 and (folders := [place for place in found if os.path.isdir(place)]):
        raise DataError(f"the pattern matches {folders[0]}: give one folder, or match its files: {folders[0]}/*.*.")
    refuse_cut_tars(find_tars(found))
    first = Path((found := decode_camera_pictures(found))[0])
    if first.is_dir():
        kinds = _endings_like(find_usual(first_files(first)))
        refuse_hidden_splits(first, [file for file in list_files(first) if file.suffix.lower() in kinds], source)
    else:
        _require_split(found, source.split)
    if source.rows != "examples":
        return open_sequences(found, source)
    looked_at = first_files(*found)
    sounds = any(file.suffix.lower() in AUDIO_SUFFIXES for file in looked_at)
    if (data := _open_here(first, len(found) == 1, source, sounds)) is not None:
        return data.to_iterable_dataset(num_shards=min(64, len(data))) if source.streaming else data
    if not sounds:
        # Of the files of a folder, beginnings are enough.
        _refuse_unreadable(looked_at, 0 if first.is_dir() else 64)
    # `datasets` names a data set by its folder, but "." has no name.
    folder, files = str((first if first.is_dir() else first.parent).resolve()), dict[str, Any]()
    if chained := next((place for place in (folder, *map(str, looked_at)) if "::" in place), None):
        raise DataError(f"{chained} has :: in its name, which `datasets` reads as a place in an archive: rename it.")
    # `datasets` knows no .CSV and no .Jpg, and takes the name of any other file, validation_list.txt, for a split.
    kinds = _endings_like(usual := find_usual(looked_at))
    strays = (file for file in looked_at if file.suffix not in kinds and file.name not in METADATA)
    is_plain = not first.is_dir() or (first / "README.md").is_file()
    module = MODULES.get(usual) if any(not is_plain or file.suffix.lower() in kinds for file in strays) else None
    linked = any(Path(place, name).is_symlink() for place, names, _ in os.walk(first) for name in names)
    if not first.is_dir():
        # `data_files` with the split's name makes any split work; `datasets` would read brackets as patterns.
        files = {source.split.partition("[")[0]: [glob.escape(str(Path(file).resolve())) for file in found]}
    elif linked or glob.has_magic(folder) or module or sounds:
        files = find_splits(Path(folder), ".wav" if sounds else usual)
    if sounds:
        return _build(RecordingFolder(data_files=files, base_path=folder), source)
    builder = datasets.load_dataset_builder(module or folder, source.name, data_files=files or None)
    given = dict[str, Any](dataset_name=builder.dataset_name, data_files=builder.config.data_files, base_path=folder)
    if isinstance(builder, Csv):
        builder = TableFiles(**given, hash=__version__, names=[source.column_of("label")])
    elif isinstance(builder, Json):
        kept = {name: getattr(builder.config, name) for name in ("features", "field", "encoding", "encoding_errors")}
        # A card may tell them; otherwise they are what an earlier reading guessed.
        kept |= {"features": builder.info.features} if Path(folder, "README.md").is_file() else {}
        builder = LineFiles(**given, hash=__version__, **kept)
    elif isinstance(builder, ImageFolder):
        kept = {name: getattr(builder.config, name) for name in ("drop_labels", "drop_metadata", "metadata_filenames")}
        builder = PictureFolder(**given, hash=__version__, **kept)
    elif isinstance(builder, WebDataset):
        builder = TarFiles(**given, hash=__version__)
    elif isinstance(builder.config, TextConfig):
        # What Windows writes in front is no letter.
        builder.config.encoding = "utf-8-sig"
    return _build(builder, source)


def find_usual(files: list[Path]) -> str:
    """The ending that most files have; of as many that of tables, as `datasets` chooses, and last that of notes."""
    count = Counter(file.suffix.lower() for file in [file for file in files if file.name not in METADATA] or files)
    ranks = {ending: (ending == ".arrow", count[ending], ending in SUFFIXES, ending != ".txt") for ending in count}
    return max(ranks, key=ranks.__getitem__, default="")


def _endings_like(ending: str) -> set[str]:
    return {ending, *(name for name, kind in MODULES.items() if kind == MODULES.get(ending))}


def find_splits(folder: Path, ending: str) -> dict[str, DataFilesList]:
    """The files of a kind by their splits, as `datasets` finds them in folders without links and signs of patterns."""
    kinds = _endings_like(ending)
    files = (file for file in list_files(folder) if file.name in METADATA or file.suffix.lower() in kinds)
    known = {file.relative_to(folder).as_posix(): file for file in sorted(files, key=str)}
    for splits in ALL_DEFAULT_PATTERNS:
        fits = {str(name): re.compile("|".join(map(glob_translate, words))).match for name, words in splits.items()}
        parts = {name: [file for place, file in known.items() if fit(place)] for name, fit in fits.items()}
        if any(parts.values()):
            break
    stamps = {name: [(str(file.stat().st_mtime),) for file in part] for name, part in parts.items() if part}
    return {name: DataFilesList([*map(str, parts[name])], found) for name, found in stamps.items()}


def _load_from_hub(source: DataSource, section: str) -> AnyDataset:
    name, _, revision = (path := str(source.path)).partition("@")
    is_local, known = path.startswith((".", "/", "~")) or glob.has_magic(path), True if "/" in name else None
    # `datasets` would load anything of that name from its cache, such as an earlier state of a moved folder.
    with contextlib.suppress(OSError, ValueError, httpx2.TransportError):
        known = known or (not is_local and HfApi().repo_exists(name, repo_type="dataset"))
    if is_local or not known:
        answers = {False: "confirms no data set of that name", None: "was not asked for one, or gave no answer"}
        confirmed = "" if is_local else f" (the Hub {answers[known]})"
        told = "give a folder, a data file, a pattern of files or a Hub data set id, org/name"
        raise SourceError(f"no data at {path}{confirmed}: {told}. {_advice(section)}")
    return _build(datasets.load_dataset_builder(name, source.name, revision=revision or None), source)


def _build(builder: datasets.DatasetBuilder, source: DataSource) -> AnyDataset:
    if isinstance(builder.config, ParquetConfig):
        # `datasets` reads as many rows at once as a file's first group has, and fails in an empty shard.
        builder.config.batch_size = 1000
    if source.streaming:
        return builder.as_streaming_dataset(split=source.split)
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split)


def _open_here(first: Path, alone: bool, source: DataSource, sounds: bool) -> datasets.Dataset | None:
    """Opens arrays, pairs and described files; None if there are none."""
    if alone and (arrays := _find_arrays(first, source.split)) is not None:
        return open_arrays(arrays, source.split)
    if source.pairs or ((first / "lq").is_dir() and (first / "hq").is_dir()):
        return _paired_folder(first, tuple(source.pairs or ("lq", "hq")), source)
    saved = sorted(file.parent for file in first_files(first) if file.name == "state.json")
    if saved := [folder for folder in saved if (folder / "dataset_info.json").is_file()]:
        return _open_saved(first, saved, source.split)
    if not first.is_dir():
        return None
    if sounds:
        return open_described(first, source, AUDIO_SUFFIXES, "audio", datasets.Image(decode=False))
    pictures = open_described(first, source, IMAGE_SUFFIXES, "image", datasets.Image())
    return open_text_folders(first, source) if pictures is None else pictures


def _open_saved(first: Path, saved: list[Path], split: str) -> datasets.Dataset:
    """Opens what `save_to_disk` wrote: of each folder the files that its state names, and no cache beside them."""
    if "+" in split:
        return datasets.concatenate_datasets([_open_saved(first, saved, part) for part in split.split("+")])
    word = split.partition("[")[0]
    if saved == [first]:
        whole = datasets.load_from_disk(str(first))
        # A split may be made of several, as train[:50%]+test is.
        words = {part.partition("[")[0] for part in str(whole.split or "train").split("+")}
        parts = {words.pop() if len(words) == 1 else "train": whole}
    elif {folder.parent for folder in saved} == {first}:
        parts = {folder.name: datasets.load_from_disk(str(folder)) for folder in saved}
    else:
        inner = max(saved, key=lambda folder: len(folder.parts)).parent
        raise DataError(f"{first} has data sets of save_to_disk in folders, such as {inner}: give one of them.")
    wanted = SPLIT_WORDS.get(word, word)
    names = [name for name in parts if name == word] or [name for name in parts if split_of(name) == wanted]
    names = names or [*parts] * (split == "all")
    if not names and wanted == "train":
        names = [] if any(map(split_of, parts)) else [*parts]
    if not names:
        told = f"holds the split {' and '.join(parts)} alone: set data.train.split to one of them"
        raise DataError(f"{first} has no split {word!r}, and {told}.")
    data = datasets.concatenate_datasets([parts[name] for name in names])
    return data.select(slice_split(split, len(data)))


def _find_arrays(place: Path, split: str) -> Path | None:
    """The one file of arrays of a split, or a file of arrays itself."""
    if not place.is_dir():
        return place if place.suffix.lower() in ARRAYS else None
    part = find_part(place, split, (file for file in list_files(place) if file.suffix.lower() in ARRAYS))
    return part.files[0] if part.named and len(part.files) == 1 else None


def _require_split(files: list[str], split: str) -> None:
    """Refuses a split of files without splits: the same examples would be used for training and evaluation."""
    name = split.partition("[")[0]
    wanted = SPLIT_WORDS.get(name, name)
    # Some have words of their own, as unsupervised-00000-of-00001.
    own = re.compile(rf"(.*[\W_])?{re.escape(name)}([\W_\d].*)?", re.IGNORECASE)
    said = ((Path(file).stem, Path(file).resolve().parent.name) for file in files)
    named = (
        wanted in (split_of(stem), SPLIT_WORDS.get(above.lower(), above))
        or (name not in SPLIT_WORDS and own.fullmatch(stem))
        for stem, above in said
    )
    if name != "train" and not all(named):
        told = "use split: train, a slice such as train[80%:], or hold_out: 0.1 with split: validation"
        raise DataError(f"a file has no split {name!r}: {told}")


def _refuse_unreadable(files: list[Path], megabytes: int) -> None:
    """Refuses texts and JSON lines that `datasets` would misread or crash at."""
    words = [file for file in files if file.suffix.lower() in (".txt", ".json", ".jsonl")]
    if null := next(filter(_has_null_row, words), None):
        raise DataError(f"{null} has a row that is null: remove the line, or replace it by {{}}.")
    if foreign := next((file for file in words if not is_utf8(file, megabytes)), None):
        kind = "UTF-16" if b"\0" in foreign.read_bytes()[:64] else "CP1252"
        raise DataError(f"{foreign} is not UTF-8: convert it, as with iconv -f {kind} -t UTF-8 {foreign.name}.")


def _has_null_row(file: Path) -> bool:
    """True if a row of JSON lines is null: pyarrow's reader crashes the process if a block begins with one."""
    if file.suffix.lower() not in (".json", ".jsonl"):
        return False
    with file.open("rb") as rows:
        first = next(filter(None, map(bytes.strip, rows)), b"")
        # One list, or one object over many lines, has no rows.
        return first == b"null" or (first[:1] == b"{" != first and b"null" in map(bytes.strip, rows))


def _read_as_files(data: AnyDataset) -> AnyDataset:
    """Columns of bytes, as pandas writes files to parquet, as pictures; sounds as files that the tasks decode."""
    for name, kind in (data.features or {}).items():
        if isinstance(kind, datasets.Audio):
            data = data.cast_column(name, datasets.Audio(decode=False))
        is_file = isinstance(kind, dict) and {*kind} == {"bytes", "path"}
        is_file = is_file or getattr(kind, "dtype", "") in ("binary", "large_binary")
        if is_file and isinstance(data, datasets.Dataset):
            held = next((cell for cell in data[name] if cell), None)
            value = held if isinstance(held, dict) else {"bytes": held, "path": None}
            if not is_broken_picture(value):
                data = data.cast_column(name, datasets.Image())
            elif not is_broken_sound(value):
                data = data.cast_column(name, datasets.Image(decode=False))
    return data


def _join(data: list[AnyDataset], parts: list[SourcePart]) -> AnyDataset:
    """One data set of several: one after the other, or mixed by their weights."""
    if all(part.column_names for part in data):
        shared = [name for name in data[0].column_names if all(name in part.column_names for part in data)]
        if not shared:
            told = "rename columns of a part with rename_columns"
            raise DataError(f"the parts have no column in common: {[part.column_names for part in data]}; {told}")
        data = [part.select_columns(shared) for part in data]
        for name in shared:
            data = _agree_on_classes(data, name)
        # `.txt` and `.csv` have types of their own for the same text: those of the first part count.
        data = [part.cast(data[0].features) for part in data]
    if all(part.weight is None for part in parts):
        return datasets.concatenate_datasets(data)
    shares = [1.0 if part.weight is None else part.weight for part in parts]
    # An epoch contains every example at least once, and repeats examples of a part whose weight exceeds its size.
    chances = [share / sum(shares) for share in shares]
    return datasets.interleave_datasets(data, probabilities=chances, seed=0, stopping_strategy="all_exhausted")


def _agree_on_classes(data: list[AnyDataset], name: str) -> list[AnyDataset]:
    """Parts whose classes in a column have the same numbers: those of all names, sorted, where the parts differ."""
    kinds = [part.features[name] for part in data]
    lists = [kind.names for kind in kinds if isinstance(kind, datasets.ClassLabel)]
    if all(names == lists[0] for names in lists) and len(lists) in (0, len(kinds)):
        return data
    if len(lists) < len(kinds):
        told = f"has named classes in some parts and plain values in others: {kinds!s:.300}"
        raise DataError(f"column {name!r} {told}. Use one in all parts, or rename the column with rename_columns.")
    union = sorted({word for names in lists for word in names})
    if len({word.lower() for word in union}) < len(union):
        raise DataError(f"classes of the parts differ only in case: {union!s:.300}. Use one spelling for each.")
    return [renumber_classes(part, name, union) for part in data]


def renumber_classes(data: AnyDataset, column: str, names: list[str]) -> AnyDataset:
    """The same data, whose classes in a column have the numbers of their names in a list."""
    assert data.features is not None
    numbers = [names.index(word) for word in class_names(data.features[column])]
    return relabel(data, column, numbers, datasets.ClassLabel(names=names))


def class_names(kind: Any) -> list[str]:
    """The names of a column of classes, or of lists of them; none of other columns."""
    kind = getattr(kind, "feature", kind)
    return [*kind.names] if isinstance(kind, datasets.ClassLabel) else []


def relabel(data: AnyDataset, column: str, labels: list[Any], kind: Any) -> AnyDataset:
    """The same data, with a label in place of each class of a column, in the order of their numbers."""
    assert data.features is not None
    before = class_names(data.features[column])
    kind = datasets.List(kind) if hasattr(data.features[column], "feature") else kind
    # Streams of folders give names; what has no class, None or -1, stays so.
    new: dict[Any, Any] = dict([*enumerate(labels), *zip(before, labels, strict=True)])
    kinds = datasets.Features({**data.features, column: kind})

    def change(label: Any) -> Any:
        return [*map(change, label)] if isinstance(label, list) else new.get(label, label)

    if isinstance(data, datasets.IterableDataset):
        # Not decoded on the way, where a broken picture would end the stream: who reads it decodes.
        raw = data.decode(False)
        raw_kinds = datasets.Features({**(raw.features or {}), column: kind})
        return raw.map(lambda row: {column: change(row[column])}, features=raw_kinds).cast(kinds)
    changed = [*map(change, data.with_format(None)[column][:])]
    data = data.remove_columns(column).add_column(column, changed, feature=kind)
    return data.select_columns(list(kinds))


def find_pairs(place: Path, names: tuple[str, ...] = ()) -> tuple[str, str] | None:
    """The folders of inputs and targets: the given ones, or two with usual names."""
    folders = [folder.name for folder in place.glob("*") if folder.is_dir()]
    # Beside others, lq and hq are opened as pairs all the same.
    found = name_pair(folders, names if names or len(folders) == 2 else PAIRS[0])
    # Folders of classes have names of their own.
    if found and (found == PAIRS[0] or {*_pictures(place / found[0])} & {*_pictures(place / found[1])}):
        return found
    return None


def name_pair(names: Iterable[str], wanted: tuple[str, ...] = ()) -> tuple[str, str] | None:
    """The names of inputs and targets among those of folders or columns: the wanted ones, or the usual ones."""
    exact = {name.lower(): name for name in names}
    # The column of clean.png of webdataset, and noisy_images.
    known = {re.sub(r"[\W_]*(images?|pictures?|png|jpe?g)$", "", key): name for key, name in exact.items()} | exact
    pairs = [tuple(map(str.lower, wanted))] if wanted else PAIRS
    return next(((known[one], known[other]) for one, other in pairs if one in known and other in known), None)


def _pictures(folder: Path) -> dict[str, Path]:
    endings = IMAGE_SUFFIXES | CAMERA_SUFFIXES
    return _by_name(folder, sorted(file for file in list_files(folder) if file.suffix.lower() in endings))


def _by_name(folder: Path, files: list[Path]) -> dict[str, Path]:
    names = {file: file.relative_to(folder) for file in files}
    # 1.png and 1.jpg are two pictures.
    several = Counter(name.with_suffix("") for name in names.values())
    plain = {file: name if several[name.with_suffix("")] > 1 else name.with_suffix("") for file, name in names.items()}
    return {name.as_posix(): file for file, name in plain.items()}


def _paired_folder(path: Path, folders: tuple[str, ...], source: DataSource) -> datasets.Dataset:
    """Equally named images in two folders as columns `lq` and `hq`."""
    sides = dict(zip(("lq", "hq"), folders, strict=True))
    name = source.split.partition("[")[0]
    parts = {side: find_part(path / folder, name, _pictures(path / folder).values()) for side, folder in sides.items()}
    found = {side: _by_name(path / sides[side], part.files) for side, part in parts.items()}
    names = sorted(found["lq"])
    alone = sorted(found["lq"].keys() ^ found["hq"].keys())
    if alone or not names:
        told = f"got {len(found['lq'])} and {len(found['hq'])}, unpaired: {alone[:5]}."
        raise DataError(f"{path}: {folders[0]}/ and {folders[1]}/ must contain images of the same names; {told}")
    if name not in ("train", path.name) and not all(part.named for part in parts.values()):
        told = "use a slice such as train[80%:], hold_out: 0.1 with split: validation, or another folder of pairs"
        raise DataError(f"a folder of pairs has no split {name!r}: {told}.")
    columns = {side: [str(pictures[name]) for name in names] for side, pictures in found.items()}
    data = make_part(columns, dict.fromkeys(sides, datasets.Image()), source.split)
    if not len(data):
        raise DataError(f"the split {source.split!r} of {count_of(len(names), 'pair')} is empty: take a larger part.")
    return data
