"""Builders of `datasets` for pictures, sounds and tables, in a separate module because `datasets` patches `Path` and
`open` in the module of a builder."""

import io
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import datasets
import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.json
from datasets.builder import Key
from datasets.packaged_modules.audiofolder.audiofolder import AudioFolder
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.folder_based_builder import folder_based_builder
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.json import json as lines
from datasets.packaged_modules.webdataset.webdataset import WebDataset, base_plus_ext

from ..errors import DataError
from .files import AUDIO_SUFFIXES
from .tables import LABEL, read_table

_PATCHED = threading.RLock()
# Of a tar file, examples that its columns are learned from.
_LOOKED_AT = 20


class _Texts:
    """The module `pyarrow.json` for `datasets`, with dates as the texts that they are: times are written otherwise."""

    ReadOptions = pyarrow.json.ReadOptions

    @staticmethod
    def read_json(file: Any, read_options: Any) -> pa.Table:
        table = pyarrow.json.read_json(file, read_options)
        schema = pa.schema([field.with_type(_as_text(field.type)) for field in table.schema])
        if schema == table.schema:
            return table
        file.seek(0)
        return pyarrow.json.read_json(file, read_options, pyarrow.json.ParseOptions(explicit_schema=schema))


def _as_text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    return pa.string() if pa.types.is_temporal(kind) else kind


def _keep_texts(module: Any, tables: Iterator[Any]) -> Iterator[Any]:
    """Tables of JSON lines, from a generator of a module of `datasets`."""
    while True:
        # A later version of `datasets` may call it otherwise: then dates are times again, as there.
        with _PATCHED, patch.object(module, "paj", _Texts, create=True):
            found = next(tables, None)
        if found is None:
            return
        yield found


class LineFiles(lines.Json):
    """Builder for JSON lines, whose dates stay texts."""

    def _generate_tables(self, *args: Any, **options: Any) -> Iterator[tuple[Key, pa.Table]]:
        yield from _keep_texts(lines, super()._generate_tables(*args, **options))


class DescribedFolder(folder_based_builder.FolderBasedBuilder):
    """Builder for a folder of files, whose metadata.csv is read as `hf-ext init` reads tables."""

    def _read_metadata(self, metadata_file: str, metadata_ext: str = "") -> Iterator[pa.Table]:
        if metadata_ext != ".csv":
            yield from _keep_texts(folder_based_builder, super()._read_metadata(metadata_file, metadata_ext))
            return
        with open(metadata_file, "rb") as opened:
            yield _to_arrow(read_table(metadata_file, keep_index=True, held=opened.read()).frame)


class PictureFolder(DescribedFolder, ImageFolder):
    """Builder for a folder of pictures."""


class RecordingFolder(DescribedFolder, AudioFolder):
    """Builder for a folder of sound files, whose column contains undecoded files."""

    # The type Audio of datasets asks for torchcodec and FFmpeg even to note the name of a file. The type Image without
    # decoding keeps the same pair of bytes and path; splits, labels from the names of folders and metadata.csv are
    # the builder's. The tasks decode with soundfile.
    def _base_feature(self) -> datasets.Image:
        return datasets.Image(decode=False)

    BASE_FEATURE = datasets.Image
    EXTENSIONS = sorted({*AudioFolder.EXTENSIONS} | AUDIO_SUFFIXES)


def read_tar(members: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[tuple[str, io.BytesIO]]]]:
    """Examples of a tar file, each its key and its files: neighbours of one name."""
    named = ((base_plus_ext(name)[0], name, file) for name, file in members)
    for key, group in itertools.groupby(filter(itemgetter(0), named), itemgetter(0)):
        yield key, [(name, io.BytesIO(file.read())) for _, name, file in group]


def _read_json(content: bytes) -> str:
    """The text of a JSON file as it is: types of Arrow, and `datasets.Json`, change some numbers or refuse them."""
    json.loads(text := content.decode(json.detect_encoding(content)))
    return text


class TarFiles(WebDataset):
    """Builder for webdataset tars, whose sounds stay files, as in `RecordingFolder`, and whose JSON stays text.

    Odd examples may stand anywhere: the columns are the endings that most of the first examples have."""

    DECODERS = WebDataset.DECODERS | dict.fromkeys(("json", "jsn"), _read_json)

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        # `datasets` learns the columns from five examples, which must be whole and alike.
        with patch.object(self, "_get_pipeline_from_tar", self._usual_examples, create=True):
            splits = list(super()._split_generators(dl_manager))
        for name, kind in self.info.features.items():
            if isinstance(kind, datasets.Audio):
                self.info.features[name] = datasets.Image(decode=False)
        return splits

    @staticmethod
    def _usual_examples(path: str, members: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
        """Those of the first examples whose endings most have, without the content of files."""
        found = defaultdict[tuple[str, ...], list[Any]](list)
        for _, files in itertools.islice(read_tar(members), _LOOKED_AT):
            known = found[tuple(sorted(str(base_plus_ext(name)[1]) for name, _ in files))]
            try:
                (example,) = TarFiles._get_pipeline_from_tar(path, files)
                cut = {name: value[:0] for name, value in example.items() if isinstance(value, bytes)}
                known.append({**example, **cut})
            except Exception as error:
                known.append(error)
        usual = max(found.values(), key=len, default=[])
        whole = [example for example in usual if isinstance(example, dict)]
        if usual and not whole:
            raise usual[0]
        return iter(whole)


class TableFiles(Csv):
    """Builder for CSV and TSV files, which are read as `hf-ext init` reads them."""

    # Splits, patterns, archives, streams and the cache are the builder's, whose `names` has the column of classes. Its
    # own reader knows one encoding and one separator, takes the words None and NA for nothing, and loses the zero of a
    # class 01.
    def _generate_tables(self, base_files: list[str], files_iterables: list[Any]) -> Iterator[tuple[Key, pa.Table]]:
        first: tuple[str, pa.Schema] | None = None
        for index, (name, files) in enumerate(zip(base_files, files_iterables, strict=True)):
            for place, file in enumerate(files):
                with fsspec.open(file, "rb") as opened:
                    frame = read_table(name, held=opened.read(), label=self.config.names[0]).frame
                # Another file may hold anything in a column that has no cell here.
                table = _to_arrow(frame.astype({name: "str" for name in frame if frame[name].isna().all()}))
                # Without a row it tells no types.
                if not len(table):
                    continue
                first = first or (name, table.schema)
                yield Key(index, place), _fit(table, name, *first)


def _to_arrow(frame: pd.DataFrame) -> pa.Table:
    """A table whose classes are whole numbers where they are some, and whose texts have the usual type."""
    for name in filter(LABEL.fullmatch, frame):
        if pd.api.types.is_float_dtype(frame[name].dtype) and (frame[name].dropna() % 1 == 0).all():
            frame[name] = frame[name].astype("Int64")
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    texts = (field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field for field in table.schema)
    return table.cast(pa.schema(texts))


def _fit(table: pa.Table, name: str, first: str, schema: pa.Schema) -> pa.Table:
    if sorted(table.column_names) == sorted(schema.names):
        table = table.select(schema.names)
    if table.column_names != schema.names:
        ours, others = (f"{', '.join(names):.200}" for names in (table.column_names, schema.names))
        raise DataError(f"{name} has the columns {ours}; {first} has {others}: use the same columns in all files.")
    for place, field in enumerate(schema):
        try:
            table = table.set_column(place, field, table[place].cast(field.type))
        except pa.ArrowInvalid as error:
            raise DataError(f"{name}: column {field.name!r} is not as in {first}: {error}.") from error
    return table
