"""The one place where an exception becomes a message and an exit code: of hf-ext and of `python -m hf_ext.training`.

0: done. 1: it was tried and failed (disk, network, the Hub refused, interrupted). 2: what was given cannot be used:
options, files, folders, names. A bug of ours keeps its traceback.
"""

import errno
import functools
import sys
from collections.abc import Callable
from typing import IO, Any, ClassVar, TypeVar, cast

import click

# What the system says of a path that the user chose; other numbers are of the disk or of the machine.
_OF_THE_PATH = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


class Failed(click.ClickException):
    """Something outside failed: the disk, the network, a Hub that refused."""

    exit_code: ClassVar[int] = 1


class Unusable(click.ClickException):
    """What the user gave cannot be used; click's own usage errors end with the same code."""

    exit_code: ClassVar[int] = 2


class Elsewhere(click.ClickException):
    """Another process of the launch failed, and says why. This one did not: it ends with 0 and without a word."""

    # With another number the launcher might end the other process before it has spoken.
    exit_code: ClassVar[int] = 0

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints nothing."""


def classify(error: BaseException) -> click.ClickException | None:
    """The message and the exit code of an exception; `None` where it is a bug of ours."""
    if isinstance(error, click.ClickException):
        return error
    # What was never imported was not raised.
    ranks = sys.modules.get("hf_ext.ranks")
    if ranks is not None and isinstance(error, ranks.FailedElsewhereError):
        return Elsewhere(message(error))
    if isinstance(error, OSError):
        return Unusable(message(error)) if _blames_the_path(error) else Failed(message(error))
    if isinstance(error, ImportError):
        from hf_ext.extras import explain_missing

        # Ours have no name and say what to install; one of Python's is a bug, if no extra brings the module.
        install = explain_missing(error.name)
        return Failed(install or message(error)) if install or error.name is None else None
    if isinstance(error, FloatingPointError | MemoryError):
        return Failed(message(error))
    if isinstance(error, ValueError | TypeError):
        return Unusable(message(error))
    return _classify_library(error)


def _classify_library(error: BaseException) -> click.ClickException | None:
    """Exceptions of libraries that derive from none of Python's; the libraries are imported only when this happens."""
    import httpx2
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    if isinstance(error, StrictDataclassError):
        # The configuration of a model, in a YAML file or in a config.json.
        return Unusable(str(error.__cause__ or error))
    if isinstance(error, SafetensorError):
        # A file that is none, or is damaged, is a wrong one to give; one that could not be written is not.
        return Failed(message(error)) if "I/O" in str(error) else Unusable(message(error))
    if isinstance(error, httpx2.HTTPError):
        return Failed(message(error))
    return None


Load = TypeVar("Load", bound=Callable[..., Any])


def loads(function: Load) -> Load:
    """Lets a function that loads a model say what cannot be loaded, instead of where a library stumbled."""
    # What libraries raise there is of the files, which anybody may have written: weights that do not fit the
    # configuration, a value of another kind, a class that does not exist.

    @functools.wraps(function)
    def load(source: str, *arguments: Any, **options: Any) -> Any:
        try:
            return function(source, *arguments, **options)
        except click.ClickException:
            raise
        except (RuntimeError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
            if classify(error) is not None:
                raise
            text = str(error).strip() or "no reason is given"
            raise Unusable(
                f"{source} cannot be loaded ({type(error).__name__}: {text}); fetch or save it again."
            ) from error

    return cast(Load, load)


def _blames_the_path(error: OSError) -> bool:
    """Whether there is no such file, folder, repository or revision, or it may not be used."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    found: BaseException | None = error
    # transformers wraps what huggingface_hub says.
    while found is not None:
        if isinstance(found, LocalEntryNotFoundError):
            # Not in the cache, and the Hub could not be asked.
            return False
        if isinstance(found, EntryNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
            return True
        found = found.__cause__
    if error.errno is not None:
        return error.errno in _OF_THE_PATH
    # Without a number and a cause it is the word of a library on what it was given: Pillow's of a file that is no
    # picture, transformers' of a folder without config.json. Ours, of what failed, tell the cause.
    return error.__cause__ is None and not isinstance(error, ConnectionError | TimeoutError | InterruptedError)


def message(error: BaseException) -> str:
    """What to show of an exception: its text, or its name where it has none; of a failed request the address too."""
    import httpx2

    text = str(error) or type(error).__name__
    if not isinstance(error, httpx2.RequestError):
        return text
    try:
        return f"{text} ({error.request.url})"
    except RuntimeError:
        # httpx2 raises it where the error belongs to no request.
        return text
