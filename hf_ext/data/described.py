"""Files with descriptions: a table, a text beside each file, or the folders of texts."""

from pathlib import Path
from typing import Any

import datasets
from datasets.data_files import SPLIT_KEYWORDS

from ..errors import DataError
from .about import METADATA, find_about, match_rows
from .roles import class_name
from .source import DataSource
from .splits import slice_split
from .tables import read_text


def open_described(
    folder: Path, source: DataSource, endings: set[str], column: str, kind: Any
) -> datasets.Dataset | None:
    """
    Opens a folder of files and their descriptions; None if there are none.

    Either one table lies beside them, a column of which names each file, with its ending or without; or each file has
    a `.txt` of its name beside it, its caption. A column of classes is called `label`, whatever its name; where there
    is none, folders are the classes.

    Args:
        folder (`Path`): With the files, or with a folder for each split.
        source ([`DataSource`]): Its split, and the column that is said to be the label.
        endings (`set[str]`): Those of the files, in small letters.
        column (`str`), kind (`datasets.Image`): The name of the files' column, and its type.

    Raises:
        DataError: If a table names files that are not there.
    """
    word, place = _folder_of(folder, source.split)
    files = sorted(file for file in place.rglob("*") if file.suffix.lower() in endings and file.name[0] != ".")
    table = find_about(place, files) if files else None
    # Read by `datasets` itself.
    if not files or (table is not None and table.name in METADATA):
        return None
    if table is None and not files[0].with_suffix(".txt").is_file():
        return None
    columns: dict[str, list[Any]] = {}
    if table is not None:
        found = match_rows(table, files, source.column_of("label"))
        if found is None:
            return None
        files, frame = found
        columns = {str(name): [class_name(value) for value in frame[name]] for name in frame}
    elif alone := [file for file in files if not file.with_suffix(".txt").is_file()]:
        raise DataError(
            f"{len(alone):,} of {len(files):,} files have no .txt file with their caption beside them, such as "
            f"{alone[0]}: add the texts."
        )
    else:
        columns = {"text": [file.with_suffix(".txt").read_text(encoding="utf-8").strip() for file in files]}
    if not {"label", source.column_of("label")} & columns.keys() and all(file.parent != place for file in files):
        columns["label"] = [file.parent.name for file in files]
    if place == folder and word not in SPLIT_KEYWORDS[datasets.Split.TRAIN]:
        raise DataError(f"{folder} has no folder {word!r}: create it, or give another split.")
    kept = slice_split(source.split, len(files))
    features: dict[str, Any] = {
        name: _kind(name, values, source.column_of("label")) for name, values in columns.items()
    }
    columns = {name: [values[index] for index in kept] for name, values in columns.items()}
    return datasets.Dataset.from_dict(
        {column: [str(files[index].resolve()) for index in kept], **columns},
        features=datasets.Features({column: kind, **features}),
        split=datasets.NamedSplit(word),
    )


def open_text_folders(folder: Path, source: DataSource) -> datasets.Dataset | None:
    """
    Opens texts in a folder for each class: each `.txt` is an example, the name of its folder the class.

    None where some lie in no such folder, there is one class alone, or other files are there: then `datasets` makes an
    example of each line.

    Raises:
        DataError: If a file is no text.
    """
    word, place = _folder_of(folder, source.split)
    files = sorted(file for file in place.rglob("*") if file.is_file() and file.name[0] != ".")
    names = sorted({file.parent.name for file in files})
    if len(names) < 2 or any(file.suffix.lower() != ".txt" or file.parent == place for file in files):
        return None
    if place == folder and ({*names} & {name for words in SPLIT_KEYWORDS.values() for name in words}):
        return None
    if place == folder and word not in SPLIT_KEYWORDS[datasets.Split.TRAIN]:
        raise DataError(f"{folder} has no folder {word!r}: create it, or give another split.")
    kept = [files[index] for index in slice_split(source.split, len(files))]
    if word == "train" and len(files) == len(names) and any("\n" in read_text(file) for file in files):
        raise DataError(
            f"{place} has one file in the folder of each class, such as {files[0].relative_to(place)}, and a file is "
            "an example: write each text into a file of its own, or all into a table with the columns text and label."
        )
    return datasets.Dataset.from_dict(
        {"text": [read_text(file) for file in kept], "label": [file.parent.name for file in kept]},
        features=datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}),
        split=datasets.NamedSplit(word),
    )


def _folder_of(folder: Path, split: str) -> tuple[str, Path]:
    """Name of a split without its slice, and the folder that holds it: one of its own, or all."""
    word = split.partition("[")[0]
    words = next((list(words) for words in SPLIT_KEYWORDS.values() if word in words), [word])
    return word, next((folder / name for name in words if (folder / name).is_dir()), folder)


def _kind(name: str, values: list[Any], label: str) -> Any:
    """The type of a column: of the label its classes, else texts."""
    names = sorted({value for value in values if value is not None})
    return datasets.ClassLabel(names=names) if name in (label, "label") else datasets.Value("string")
