"""Exceptions as click shows them; `hf_ext.errors` says which exit code and message each has."""

import functools
from collections.abc import Callable
from typing import IO, Any, ClassVar, TypeVar, cast

import click

from .library import import_without_models


class Failed(click.ClickException):
    """Something outside failed: the disk, the network, a Hub that refused."""

    exit_code: ClassVar[int] = 1


class Unusable(click.ClickException):
    """Input of the user that cannot be used; click's own usage errors end with the same code."""

    exit_code: ClassVar[int] = 2


class Elsewhere(click.ClickException):
    """Another process of the launch failed, and says why. This one did not: it ends with 0 and without a word."""

    # With another number the launcher might end the other process before it has spoken.
    exit_code: ClassVar[int] = 0

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints nothing."""


_KINDS = {kind.exit_code: kind for kind in (Elsewhere, Failed, Unusable)}


def classify(error: BaseException) -> click.ClickException | None:
    """The message and the exit code of an exception; `None` where it is a bug of ours."""
    if isinstance(error, click.ClickException):
        return error
    # Imported when this happens: the help of hf-ext needs no hf_ext.
    import_without_models()
    from hf_ext import errors

    ending = errors.classify(error)
    return None if ending is None else _KINDS[ending.exit_code](ending.message)


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
