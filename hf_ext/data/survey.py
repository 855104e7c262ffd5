"""Survey of the user's data: kind, sizes, classes, and the held-out share."""

import re
import shlex
import tarfile
import zipfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pandas as pd

from ..errors import DataError
from ..terminal import count_of
from .about import METADATA, find_part, find_table, has_class_train, sort_files
from .camera_pictures import CAMERA_SUFFIXES, IMAGE_SUFFIXES, find_camera_pictures, tell_twins
from .cells import are_values, check_classes, is_number, to_seconds
from .files import AUDIO_SUFFIXES, describe_sound, first_files, is_broken_sound, is_seen, list_files, open_bytes
from .found import (
    CLASSES,
    Survey,
    is_numeric,
    keep_back,
    list_columns,
    look_at_lists,
    look_at_series,
    refuse_free_texts,
    rename,
    span,
    tell_unlabelled,
)
from .opening import MODULES, find_files, find_pairs, find_splits, find_usual, open_source
from .roles import PERSONS, Hints, is_prose
from .sequence_files import ARRAYS, SUFFIXES
from .source import DataSource
from .splits import SPLIT_WORDS, find_paths, read_labels, split_of
from .survey_pictures import (
    EXAMPLES,
    choose,
    look_at_columns,
    look_at_pairs,
    measure_pictures,
    refuse_hidden_pairs,
    refuse_mixed_pairs,
    tell_broken,
)
from .tables import LABEL, option, read_table, shorten

# Number of members of archives to inspect.
_MEMBERS = 10_000
# Files that people have, and no training reads.
_FOREIGN = {
    ".3gp", ".7z", ".amr", ".arff", ".db", ".dta", ".feather", ".h5", ".mat", ".mov", ".mp4", ".numbers", ".ods",
    ".pickle", ".pkl", ".pt", ".rar", ".sav", ".sqlite", ".webm", ".wma", ".xls", ".xlsx", ".zst",
}  # fmt: skip
# Files of texts and tables beside pictures and sounds.
_BESIDE = {".csv", ".json", ".jsonl", ".tsv", ".txt", ".xml"}
# Places of a label in a line of text: fastText's mark, before or behind a separator, a number at the start.
_LABELS_IN_LINES = (
    r"__label__(\S+)\s", r"(\S{1,30}?)\s*(?:[\t,;|]|::?\s)", r".*(?:[\t,;|]|\s::?)\s*([^\s,]{1,30})$",
    r"([-+]?\d{1,3})\s",
)  # fmt: skip
# Names of files that list those of a split.
_LISTS = re.compile(rf"(lists?[\W_])?({'|'.join(SPLIT_WORDS)})([\W_]?(lists?|files?|splits?))?[\W_\d]*", re.IGNORECASE)
_TABLES = (
    "Series of numbers are CSV, TSV, parquet or NumPy files, or lists in JSON lines. Unpack archives and .gz files; "
    "pandas turns other JSON lines into a table: read_json(..., lines=True).to_csv(...)."
)


def look_at(path: str, hints: Hints | None = None, restores: bool = True) -> Survey:
    """
    Looks at a folder, a file or a pattern of this machine, for pairs of pictures where a method `restores`; refuses
    what no training reads, and what may mean several things, with the flag that decides.
    """
    # One bar is enough of a training; here none is. Where the environment hides them already, datasets warns of each
    # call that would show them again.
    hidden, hints = datasets.are_progress_bars_disabled(), hints or Hints()
    if not hidden:
        datasets.disable_progress_bars()
    try:
        found = find_files(path)
        named = first_files(*found)
        survey = _look_at_files(path, found, named, hints, restores)
    finally:
        if not hidden:
            datasets.enable_progress_bars()
    # Of series that are rows or files, none has a name; of classes without numbers, none is a value.
    unused = {
        "series": ("series",) * ("series" not in survey.train),
        "texts": ("time", "series", "values"),
        "pairs": ("time", "series", "inputs", "label", "values"),
    }.get(survey.kind, ("time", "series", "inputs", "values"))
    kind = {"series": "series in rows or files"}.get(survey.kind, survey.kind)
    given = [name for name in unused if getattr(hints, name)]
    given = [name for name in given if name != "inputs" or survey.columns != [*hints.inputs]]
    survey.left_out += [f"--{name}, of which {kind} have none" for name in given]
    camera, twins = find_camera_pictures(named)
    if camera and survey.kind in ("pictures", "pairs"):
        kinds = ", ".join(sorted({file.suffix.lower() for file in camera}))
        count = count_of(len(camera) - len(twins), "picture")
        survey.notes.append(f"{count} of {kinds} with 8 bits, decoded once into the cache of datasets")
        survey.left_out += [tell_twins(twins)] if twins else []
    return survey


def _look_at_files(path: str, found: list[str], named: list[Path], hints: Hints, restores: bool) -> Survey:
    """Pairs, series, or what a training reads as examples."""
    if not found:
        advice = "For a data set of the Hub, set data.train.path of a recipe of `hf-ext recipes`."
        raise DataError(f"no data at {path}: give a local folder or file. {advice}")
    places = [Path(one) for one in found]
    parts = find_part(places[0], "train", list_files(places[0])).places if places[0].is_dir() else places
    notes = list[str]()
    if places[0].is_dir() and has_class_train(places[0], named):
        why = "the folder train is read as the split, and none beside it: rename it, as to trains, if it is a class"
        notes.append(f"WARNING: {why}")
    for place in dict.fromkeys([*(parts if len(parts) == 1 else []), places[0]]):
        names = find_pairs(place, hints.pairs)
        # Folders a and b are classes as well: only a restorer takes them for pairs.
        if names and (restores or tuple(map(str.lower, names)) != ("a", "b")):
            return look_at_pairs(place, names)
        _refuse_masks(place)
        notes += refuse_hidden_pairs(place) if restores and not hints.pairs else []
    # A table that says what is known of the others is none of them.
    told = [file for file in named if file.name not in METADATA] or named
    endings = Counter(file.suffix.lower() for file in told)
    if not endings:
        raise DataError(f"{path} is empty: add pictures, sounds, texts or tables.")
    if all(file.stat().st_size == 0 for file in named):
        raise DataError(f"{path} holds nothing: {count_of(len(named), 'file is', 'files are')} empty.")
    most = find_usual(told)
    if most in _FOREIGN:
        advice = "save sheets as CSV, tables as parquet, arrays with numpy.savez, sounds as FLAC, and unpack archives."
        raise DataError(f"{path} holds {count_of(endings[most], f'{most} file')}, which no training reads: {advice}")
    for file in named:
        _refuse_folders_in(file)
    series = look_at_series(path, places, most, hints) if most in SUFFIXES and not hints.pairs else None
    survey = series or _look_at_examples(path, hints, restores)
    survey.notes += notes
    if survey.kind in ("texts", "series"):
        _tell_unread(survey, places[0], most)
    if series is not None:
        return series
    if most in {"texts": IMAGE_SUFFIXES | AUDIO_SUFFIXES, "sounds": IMAGE_SUFFIXES}.get(survey.kind, ()):
        advice = f"but its {survey.kind} would be read: give a folder of one kind."
        raise DataError(f"{path} holds {count_of(endings[most], f'{most} file')}, {advice}")
    if most == ".txt" and survey.kind == "texts" and len(named) > 1:
        apart = [file for file in named if {"label", "labels"} & {*re.split(r"[\W_]", file.stem.lower())}]
        # Beside folders of classes it is a note.
        if apart := [file for file in apart if not survey.classes or file.parent.name in survey.classes]:
            advice = "holds the labels of another file: put both into a table with the columns text and label"
            raise DataError(f"{path}: {apart[0].name} {advice}; of plain texts, give the other files alone.")
        if not survey.classes:
            survey.notes.append("each line is a text; files in a folder for each class would have classes")
    if most in (".csv", ".tsv"):
        tables = (read_table(file) for file in named if file.suffix.lower() == most)
        survey.notes += dict.fromkeys(note for table in tables for note in table.notes)
    survey.left_out += [
        f"{count_of(count, 'file')} of {ending}, which a training does not read"
        for ending, count in endings.items()
        if (ending in _FOREIGN and survey.kind != "texts") or (survey.kind == "sounds" and ending in IMAGE_SUFFIXES)
    ]
    return survey


def _refuse_masks(folder: Path) -> None:
    """Refuses pictures and their masks in two folders: as folders of classes they would be learned."""
    names = {path.name.casefold() for path in folder.glob("*") if path.is_dir()}
    masks = {"mask", "masks", "label", "labels", "annotation", "annotations", "segmentation", "segmentations"}
    if len(names) == 2 and names & {"image", "images", "img", "imgs"} and names & masks:
        told = "no training learns masks or boxes: give the folder of the pictures."
        raise DataError(f"{folder} has the folders {' and '.join(sorted(names))}: {told}")


def _refuse_folders_in(archive: Path) -> None:
    """Refuses an archive of several folders, which may be classes or splits: a training would not see them."""
    if archive.suffix.lower() == ".zip" and zipfile.is_zipfile(archive):
        tool, members = "zipfile", zipfile.ZipFile(archive).namelist()
    elif archive.name.lower().endswith((".tar", ".tar.gz", ".tgz")) and tarfile.is_tarfile(archive):
        with tarfile.open(archive) as opened:
            tool, members = "tarfile", [member.name for member in islice(opened, _MEMBERS) if member.isfile()]
    else:
        return
    files = [name for name in members if not name.endswith("/") and "__MACOSX" not in name]
    unread = {Path(name).suffix.lower() for name in files} & (CAMERA_SUFFIXES | AUDIO_SUFFIXES)
    several = len({name.rpartition("/")[0] for name in files}) > 1
    if several or unread:
        held = "several folders" if several else f"{', '.join(sorted(unread))}, which are not read in an archive"
        command = shlex.join(["python", "-m", tool, "-e", str(archive), archive.name.partition(".")[0]])
        raise DataError(f"{archive} holds {held}: unpack it first, and give the folder: {command}.")


def _refuse_nested(path: str, data: Any) -> Any:
    """Refuses one example that holds the examples, as of JSON with a version and data."""
    inner = {name: getattr(kind, "feature", None) for name, kind in data.features.items() if len(data) == 1}
    if nested := [name for name, kind in inner.items() if isinstance(kind, dict) and len(data[0][name] or ()) > 1]:
        told = f"one example, whose {nested[0]!r} is a list of {len(data[0][nested[0]]):,}: save this list alone."
        raise DataError(f"{path} holds {told}")
    return data


def _look_at_examples(path: str, hints: Hints, restores: bool) -> Survey:
    """Pictures, sounds, texts and lists of numbers, as a training reads them."""
    train = {"path": path, "split": "train", **rename(hints.label)}
    data = _refuse_nested(path, open_source(DataSource(**train)))
    # Names of members and of their tar are no texts.
    data = data.select_columns([name for name in data.column_names if not name.startswith("__")])
    if not len(data):
        raise DataError(f"{path} holds no example: add rows or files.")
    labels = [*filter(LABEL.fullmatch, data.column_names)]
    if "label" not in labels and len(labels) == 1:
        train |= rename(labels[0])
        data = data.rename_columns({labels[0]: "label"})
    features = data.features
    pictures = [name for name, kind in features.items() if isinstance(kind, datasets.Image) and kind.decode]
    sounds = [name for name, kind in features.items() if isinstance(kind, datasets.Image | datasets.Audio)]
    texts = [name for name, kind in features.items() if isinstance(kind, datasets.Value) and "string" in kind.dtype]
    words = [name for name in texts if name != "label"]
    if hints.pairs or (restores and len(pictures) > 1 and not {*hints.inputs} & {*pictures}):
        return look_at_columns(path, train, data, pictures, hints)
    chosen, lists = choose(len(data)), list_columns(data)
    if lists and not sounds and not {*hints.inputs} & {*words}:
        _refuse_texts_beside(path, data.select(chosen), [] if hints.inputs else words, lists)
        return look_at_lists(train, data, hints)
    if restores and pictures and "label" in features and all(label is None for label in read_labels(data)):
        # As of train_images beside val_images: no label is needed.
        data = data.remove_columns("label")
    survey = Survey("", **keep_back(train, data), about="")
    survey.classes = _find_classes(path, data, hints.values)
    if survey.classes:
        tell_unlabelled(survey, data.with_format(None)["label"][:])
        if survey.broken == 1:
            told = "sort files as train/first/1.png, or add a metadata.csv with the columns file_name and label."
            raise DataError(f"{path}: no example has a label: folders {shorten(survey.classes)} are splits: {told}")
    survey.named = isinstance(data.features.get("label"), datasets.ClassLabel)
    if survey.classes and not (restores and pictures) and not _are_folders(survey, data):
        told = f"the label is the column {DataSource(**train).column_of('label')}"
        told += "" if sounds else ", without which texts train a language model"
        refuse_free_texts(path, told, read_labels(data), hints)
    if pictures:
        column = next((name for name in pictures if name in hints.inputs), pictures[0])
        measure_pictures(survey, data, column, chosen)
        refuse_mixed_pairs(path, (find_paths(data.select_columns([column])) or []) if restores else [])
        survey.left_out += [f"{name} (no input)" for name in pictures if name != column]
        _find_captions(survey, texts, words)
    elif sounds:
        _measure_sounds(survey, data, sounds[0], chosen)
    elif words := _find_words(data, words, hints):
        _refuse_numbers(path, data, words, hints)
        if [*features] == ["text"] and not hints.inputs:
            _refuse_labelled(path, [data[index]["text"] for index in chosen])
        _measure_texts(survey, data, words, chosen, hints)
    else:
        raise DataError(f"{path} has the columns {shorten(list(features))}: no picture, sound or text. {_TABLES}")
    if sounds:
        _tell_folders(survey, data, Path(path), IMAGE_SUFFIXES | CAMERA_SUFFIXES if pictures else AUDIO_SUFFIXES)
    if others := [name for name in words if 1 < len({*data[name]}) <= max(2, CLASSES * len(data))]:
        survey.advice = f"; or say {option('label', others[0])}"
    if survey.captions is not None:
        survey.roles = [f"{', '.join(survey.columns)}; captions in {survey.captions}"]
    return survey


def _are_folders(survey: Survey, data: Any) -> bool:
    """True for classes that folders name, which a table beside the files does not."""
    above = {file.parent.name for file in find_paths(data) or []}
    return survey.named and (not above or above >= {*survey.classes})


def _find_captions(survey: Survey, texts: list[str], words: list[str]) -> None:
    """The captions of pictures, which classes replace."""
    usual = ("text", "caption", "captions", "prompt", "description")
    captions = [name for name in usual if name in texts] or (words if len(words) == 1 else [])
    survey.captions = captions[0] if captions and not survey.classes else None
    if {*captions} & {*usual} and survey.classes:
        told = "no input beside classes: captions are learned where neither folders nor a column name classes"
        survey.left_out.append(f"the captions in {captions[0]} ({told})")


def _refuse_texts_beside(path: str, rows: Any, words: list[str], lists: list[str]) -> None:
    """Refuses texts beside lists of numbers, as one of them would be left out."""
    if prose := [name for name in words if _is_text(name, rows[name][:])]:
        told = f"say which to read, {option('inputs', prose[0])} or {option('inputs', lists[0])}."
        raise DataError(f"{path} has texts in {shorten(prose)} and lists of numbers in {shorten(lists)}: {told}")


def _find_classes(path: str, data: Any, wanted: bool | None) -> list[str]:
    kind = data.features.get("label")
    if isinstance(kind, datasets.ClassLabel):
        check_classes(path, kind.names)
        are_values(kind.names, wanted)
        return list(kind.names)
    if not isinstance(kind, datasets.Value | None):
        told = "holds lists, or texts and numbers: a class is one of them; another column is chosen by --label NAME."
        raise DataError(f"{path}: the column label {told}")
    return [] if kind is None else check_classes(path, data["label"][:], wanted)


def _tell_folders(survey: Survey, data: Any, folder: Path, endings: set[str]) -> None:
    """Says which files are read in no part, and which folders name no class."""
    read = find_paths(data)
    # Larger folders are not searched.
    if read is None or not folder.is_dir() or len(read) > 100_000:
        return
    if survey.eval is not None and "hold_out" not in survey.eval:
        read += find_paths(open_source(DataSource(**survey.eval))) or []
    # Links may lead elsewhere, and a decoded picture lies in the cache.
    files = {file.resolve(): file for file in list_files(folder) if file.suffix.lower() in endings}
    known = {file.resolve() for file in [*read, *find_camera_pictures(files.values())[1]]}
    unread = sorted(file for place, file in files.items() if place not in known)
    _tell_files(survey, [] if any(file.suffix.lower() in CAMERA_SUFFIXES for file in unread) else unread, folder)
    if {*data.features} <= {*survey.columns, "label"} and {file.parent.name for file in read} >= {*survey.classes}:
        # No text beside a file is read, and at most one table.
        table, _ = find_table(find_part(folder, "train", files.values()).places[0], files.values())
        beside = sorted(file for file in list_files(folder) if file.suffix.lower() in _BESIDE and file != table)
        beside = [file for file in beside if file.name not in METADATA]
        lists = [file for file in beside if _LISTS.fullmatch(file.stem)]
        if lists and not sort_files(folder, files.values()) and (survey.eval is None or "hold_out" in survey.eval):
            why = "may list the files of a split, and is not read: move them into train/, validation/ and test/"
            raise DataError(f"{folder}: {lists[0].relative_to(folder)} {why}, or move it away to hold out others.")
        _tell_files(survey, beside, folder)
    if not survey.named and len({len(file.parts) for file in read}) > 1:
        loose = min(read, key=lambda file: len(file.parts))
        told = files[loose.resolve()].relative_to(folder) if loose.resolve() in files else loose.name
        survey.advice = f"; the files lie at different depths, such as {told}"
    outer = {path.parent.parent for path in read if path.parent.name in survey.classes}
    above = {place.name for place in outer if not SPLIT_WORDS.keys() & {*re.split(r"[\W_]", place.name.lower())}}
    places = (place for parent in outer for place in parent.iterdir() if place.is_dir() and is_seen(place.name))
    holding = {parent for file in read for parent in file.parents}
    if empty := sorted(place.name for place in places if place not in holding):
        survey.left_out.append(f"the folder{'s' if len(empty) > 1 else ''} {shorten(empty)}, without such a file")
    if survey.named and len(above) > 1:
        told = f"{shorten(sorted(above))} above them are not; to turn it, add {METADATA[0]} with file_name and label"
        survey.notes.append(f"WARNING: the inner folders are the classes, and {told}")


def _refuse_numbers(path: str, data: Any, texts: list[str], hints: Hints) -> None:
    """Refuses a table of numbers that is no file of tables: in an archive, in JSON lines, in lines of text."""
    head = pd.DataFrame(data.select_columns(texts)[:EXAMPLES])
    numbers = [name for name, kind in data.features.items() if name != "label" and is_numeric(kind)]
    if len(numbers) > 1 and not hints.inputs and not any(is_prose(head[name]) for name in texts):
        told = f"{_TABLES} For the texts of {texts[0]} say {option('inputs', texts[0])}."
        raise DataError(f"{path} has the columns {shorten(list(data.features))}: a table of numbers. {told}")
    cells = [re.split(r"[\s,;|]+", text.strip()) for text in head[texts[0]].dropna()]
    rows = [len(row) > 2 and sum(map(is_number, row)) >= len(row) - 1 for row in cells]
    if len(texts) == 1 and not hints.inputs and rows and sum(rows) >= 0.9 * len(rows):
        raise DataError(f"{path} holds lines of numbers. {_TABLES} For texts say {option('inputs', texts[0])}.")


def _refuse_labelled(path: str, lines: list[str]) -> None:
    """Refuses lines that hold a label beside the text: as plain texts the labels would be learned as words."""
    given = [line for line in lines if line and line.strip()]
    for place in _LABELS_IN_LINES:
        found = [match[1] for line in given if (match := re.match(place, line))]
        kinds = {*found}
        if len(found) == len(given) > 5 and 1 < len(kinds) <= max(3, CLASSES * len(given)):
            told = "save a .tsv whose first line has the names label and text; of plain texts, say --inputs text."
            raise DataError(f"{path}: each line may begin or end with a label, {shorten(sorted(kinds))}: {told}")


def _find_words(data: Any, names: list[str], hints: Hints) -> list[str]:
    """The columns of texts; dates beside numbers are none."""
    if hints.inputs and (wrong := [name for name in hints.inputs if name not in names]):
        raise DataError(f"--inputs names {shorten(wrong)}; the columns of texts are {shorten(names) or 'none'}.")
    if hints.inputs or not names:
        return [*hints.inputs]
    head = pd.DataFrame(data.select_columns(names)[:EXAMPLES])
    return [name for name in names if to_seconds(head[name].dropna()) is None]


def _measure_sounds(survey: Survey, data: Any, column: str, chosen: list[int]) -> None:
    values = [data[index][column] for index in chosen]
    found = [describe_sound(open_bytes(value)) for value in values if not is_broken_sound(value)]
    tell_broken(survey, len(values) - len(found), len(values), len(found), "sound")
    rates = Counter(about.rate for about in found)
    seconds = [about.frames / about.rate for about in found]
    survey.kind, survey.columns, survey.rate = "sounds", [column], rates.most_common(1)[0][0]
    survey.lengths = [max(1, round(survey.rate * length)) for length in seconds]
    survey.about = f"{count_of(survey.count, 'sound')} at {survey.rate} Hz, {span(seconds, '.2f')} s"
    if len(rates) > 1:
        survey.notes.append(f"sounds of {', '.join(map(str, sorted(rates)))} Hz are resampled to one rate")
    if any(about.channels > 1 for about in found):
        every = all(about.channels > 1 for about in found)
        survey.notes.append(f"{'channels' if every else 'channels of some'} are averaged to one")


def _measure_texts(survey: Survey, data: Any, columns: list[str], chosen: list[int], hints: Hints) -> None:
    rows = [data[index] for index in chosen]
    for name in columns:
        files = [Path(row[name] or "") for row in rows]
        if all(file.suffix.lower() in IMAGE_SUFFIXES | CAMERA_SUFFIXES | AUDIO_SUFFIXES for file in files):
            told = "put the table into their folder, and give the folder."
            raise DataError(f"{survey.train['path']}: the column {name} names files, such as {files[0]}: {told}")
    lengths = {name: [len((row[name] or "").encode()) for row in rows] for name in columns}
    column, read = max(columns, key=lambda name: sum(lengths[name])), list(columns)
    if not hints.inputs:
        read = [column, *(name for name in columns if name != column and _is_text(name, [row[name] for row in rows]))]
    asked = option("inputs", *[name for name in columns if name in read][:2])
    if len(read) > (2 if survey.classes and hints.inputs else 1) and (survey.classes or hints.inputs):
        asked += "" if survey.classes else " --label NAME"
        told = f"name one, {option('inputs', column)}, or the two of a pair, {asked}."
        raise DataError(f"{survey.train['path']} has texts in {shorten(read)}: {told}")
    survey.kind, survey.columns = "texts", read if hints.inputs else [column]
    cells = zip(*(data.with_format(None)[name][:] for name in survey.columns), strict=True)
    missing = sum(any(text is None or not (text or survey.classes) for text in texts) for texts in cells)
    survey.leave_out(missing, len(data), "without a text")
    what = ("pair of texts", "pairs of texts") if len(survey.columns) > 1 else ("text",)
    sizes = [length for name in survey.columns for length in lengths[name]]
    survey.lengths = [max(1, size) for size in sizes]
    survey.about = f"{count_of(survey.count, *what)} of {span(sizes)} bytes"
    unread = [name for name in data.features if name not in (*survey.columns, "label")]
    others = unread if "label" not in data.features else []
    few = [name for name in others if len({*map(str, data[name])}) <= CLASSES * len(data)]
    if few and not hints.inputs:
        both = f" {asked}" if len(read) > 1 else ""
        told = f"choose one, {option('label', few[0])}{both}, or the texts only, {option('inputs', column)}."
        raise DataError(f"{survey.train['path']}: {shorten(few)} beside {column} may contain classes: {told}")
    survey.left_out += [f"{shorten(unread)} (no input)"] if unread else []
    if others:
        survey.about += f" in the column {column}; classes would be in a column `label`, not in {shorten(others)}"


def _is_text(name: str, cells: list[Any]) -> bool:
    """True for a column of texts beside the longest; names of persons, addresses and keys of one word are none."""
    given = pd.Series(cells, dtype=object).dropna()
    words = given.map(lambda cell: re.search(r"\s|[^\x00-\x7f]", cell.strip()) is not None)
    return is_prose(given) and bool(words.mean() > 0.5) and not PERSONS.fullmatch(name)


def _tell_unread(survey: Survey, folder: Path, usual: str) -> None:
    """Names the files of a folder that no part reads, and refuses where they hold more than those that are read."""
    known = {*MODULES, *SUFFIXES}
    if not folder.is_dir() or usual not in known:
        return
    below = [file for file in list_files(folder) if file.suffix not in ("", ".md") and file.name not in METADATA]
    read, beside = {file for file in below if file.suffix.lower() == usual}, set[Path]()
    if "rows" in survey.train:
        part = find_part(folder, "train", read)
        table, _ = find_table(part.places[0], read)
        beside = {*part.rest}
        read -= beside
        read |= {file for file in below if table is not None and file.name == table.name}
    elif usual == ".txt" and survey.named:
        read = {file for file in read if file.parent.name in survey.classes}
    else:
        read = {Path(file) for part in find_splits(folder, usual).values() for file in part}
    unread = sorted(file for file in below if file not in read)
    # Those of no split, beside files that are named by splits, are no data.
    known -= {*ARRAYS} if survey.kind == "texts" else set()
    sizes = {file: file.stat().st_size for file in unread if file.suffix.lower() in known and file not in beside}
    by_splits = all(any(map(split_of, file.relative_to(folder).with_suffix("").parts)) for file in read)
    if read and not by_splits and sum(sizes.values()) > sum(file.stat().st_size for file in read):
        largest = max(sizes, key=sizes.__getitem__)
        told = f"{count_of(len(sizes), 'file')} such as {largest.relative_to(folder)} would not be read, and hold more"
        told += f" than the {len(read):,} such as {min(read).relative_to(folder)} that would"
        advice = f"give the file that is meant alone, {min(read)} or {largest}, or move the others away."
        raise DataError(f"{folder}: {told}: {advice}")
    _tell_files(survey, unread, folder)


def _tell_files(survey: Survey, unread: list[Path], folder: Path) -> None:
    """Names files that no part reads."""
    if unread:
        place = unread[0].relative_to(folder)
        survey.left_out.append(f"{count_of(len(unread), 'file')} such as {place}, which neither part reads")
