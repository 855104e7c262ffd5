"""Errors of the package, and the exit codes and messages of exceptions for the command line and trainings.

0: success. 1: failure (disk, network, refused by the Hub). 2: unusable input: options, files, folders, names.
Unexpected exceptions keep their traceback.
"""

import errno
import lzma
import sys
import tarfile
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

from .distributed import FailedElsewhereError
from .extras import explain_missing
from .terminal import is_verbose, show_lines

DONE, FAILED, UNUSABLE = 0, 1, 2
# Error numbers for a path that the user chose; others concern the disk or the machine.
_OF_THE_PATH = "ENOENT ENOTDIR EISDIR EEXIST ENOTEMPTY EACCES EPERM EROFS ELOOP ENAMETOOLONG"
# What Python's readers of archives raise for broken ones.
BROKEN_ARCHIVE = (EOFError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)


class UsageError(ValueError):
    """
    An option, an argument or a call that cannot be used.

    Example:
        >>> import hf_ext
        >>> from hf_ext.errors import UsageError
        >>> try:
        ...     hf_ext.released("denoise")
        ... except UsageError:
        ...     print("no such model")
        no such model
    """


class DataError(ValueError):
    """
    A file, a table, a picture or a checkpoint that cannot be used, although the request is right.

    Example:
        >>> import hf_ext
        >>> from hf_ext.errors import DataError
        >>> try:
        ...     hf_ext.open_checkpoint("no-such-folder")
        ... except DataError:
        ...     print("no checkpoint")
        no checkpoint
    """


class MissingColumn(DataError):
    """
    A column that the data does not have.

    Attributes:
        column (`str`): Its name.
        option (`str`): The setting that gave it.

    Example:
        >>> from hf_ext.errors import MissingColumn
        >>> error = MissingColumn.of("photo", ["image", "label"], "image_column")
        >>> error.column, error.option
        ('photo', 'image_column')
    """

    column = option = ""

    @classmethod
    def of(cls, column: str, columns: Iterable[str], option: str, advice: str = "") -> "MissingColumn":
        """The error for a column that is not among `columns`."""
        # Not in __init__, since an error of another process is raised again from its message alone.
        error = cls(f"the data has no column {column!r}; it has {sorted(columns)}. Set {option}{advice}.")
        error.column, error.option = column, option
        return error


class OtherRun(ValueError):
    """
    A folder with the work of other settings or other data, which must not be mixed with the present ones.

    Args:
        found (`str`): The work in the folder.
        changes (`Sequence[str]`, *optional*): A text for each difference; the attribute `changes` has all of them.
        advice (`str`, *optional*): The remedy.

    Example:
        >>> from hf_ext.errors import OtherRun
        >>> OtherRun("runs/first holds another run", ["seed: 0 → 1"], "Choose another output_dir.").changes
        ['seed: 0 → 1']
    """

    def __init__(self, found: str, changes: Sequence[str] = (), advice: str = "") -> None:
        # The first differences are enough for a folder of thousands of files.
        told = "; ".join([*changes[:8], "…"] if len(changes) > 8 else changes)
        super().__init__(f"{found} ({told}). {advice}" if changes else found)
        self.changes = list(changes)


class NotPublished(ValueError):
    """
    Files that were not uploaded, because others could not use them or should not see them.

    Example:
        >>> from pathlib import Path
        >>> from transformers import BertConfig, BertModel
        >>> from hf_ext import stage
        >>> from hf_ext.errors import NotPublished
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
        >>> BertModel(config).save_pretrained("model")
        >>> Path("model/train.py").touch()
        >>> try:
        ...     stage("model", "out")
        ... except NotPublished:
        ...     print("code is not published")
        code is not published
    """


class Ending(NamedTuple):
    """The end of a program that met an exception."""

    exit_code: int
    message: str


def classify(error: BaseException) -> Ending | None:
    """The exit code and the message of an exception; `None` for an unexpected one, which is a bug."""
    if isinstance(error, FailedElsewhereError):
        # With another code the launcher might end the failed process before it prints its message.
        return Ending(DONE, message(error))
    if isinstance(error, OSError):
        return Ending(UNUSABLE if _blames_the_path(error) else FAILED, message(error))
    if isinstance(error, ImportError):
        # Ours have no name and say what to install; one of Python's is a bug, if no extra brings the module.
        install = explain_missing(error.name)
        return Ending(FAILED, install or message(error)) if install or error.name is None else None
    if isinstance(error, FloatingPointError | MemoryError):
        return Ending(FAILED, message(error))
    if isinstance(error, (ValueError, TypeError, *BROKEN_ARCHIVE)):
        return Ending(UNUSABLE, message(error))
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        # Python's, of `Path.expanduser`.
        return Ending(UNUSABLE, "a path begins with ~ and the name of no user here: write its folder in full.")
    return _classify_library(error)


def report(error: Exception) -> int:
    """One line on standard error for an expected exception, with its traceback on request; the exit code."""
    shown = classify(error)
    if shown is None:
        raise error
    if is_verbose():
        sys.stderr.write("".join(traceback.format_exception(error)))
    if shown.exit_code != DONE:
        sys.stderr.write(f"Error: {shown.message.strip()}\n")
    return shown.exit_code


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script to its exit, where an expected exception is one line."""
    try:
        code = main()
    except Exception as error:
        code = report(error)
    sys.exit(code)


def _classify_library(error: BaseException) -> Ending | None:
    """Exceptions of libraries that derive from none of Python's; the libraries are imported only when this happens."""
    import httpx2
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    if isinstance(error, StrictDataclassError):
        # The configuration of a model, in a YAML file or in a config.json.
        return Ending(UNUSABLE, str(error.__cause__ or error))
    if isinstance(error, SafetensorError):
        # A file that is none, or is damaged, is a wrong one to give; one that could not be written is not.
        return Ending(FAILED if "I/O" in str(error) else UNUSABLE, message(error))
    if isinstance(error, httpx2.HTTPError):
        return Ending(FAILED, message(error))
    return None


def _blames_the_path(error: OSError) -> bool:
    """Tells whether the file, folder, repository or revision is not there or may not be used."""
    from huggingface_hub import errors as hub

    found: BaseException | None = error
    # transformers wraps what huggingface_hub says.
    while found is not None:
        if isinstance(found, hub.LocalEntryNotFoundError):
            # Not in the cache, and the Hub could not be asked.
            return False
        if isinstance(found, hub.EntryNotFoundError | hub.RepositoryNotFoundError | hub.RevisionNotFoundError):
            return True
        found = found.__cause__
    if error.errno is not None:
        return errno.errorcode.get(error.errno) in _OF_THE_PATH.split()
    # Without a number and a cause it is the word of a library on what it was given: Pillow's of a file that is no
    # picture, transformers' of a folder without config.json. Ours, of what failed, tell the cause.
    return error.__cause__ is None and not isinstance(error, ConnectionError | TimeoutError | InterruptedError)


def message(error: BaseException) -> str:
    """The text of an exception, or its name where it has none; of a failed request with the address."""
    import httpx2

    text = show_lines(error, str(error) or type(error).__name__)
    if not isinstance(error, httpx2.RequestError):
        return text
    try:
        return f"{text} ({error.request.url})"
    except RuntimeError:
        # httpx2 raises it where the error belongs to no request.
        return text
