"""Conversion of exceptions for click; `hf_ext.errors` decides their exit codes and messages."""

import functools
from collections.abc import Callable
from typing import IO, Any, ClassVar, TypeVar, cast

import click

from .library import import_without_models


class Failed(click.ClickException):
    """A failure outside the program: disk, network, or refusal by a Hub. The exit code is click's own, 1."""


class Unusable(click.ClickException):
    """Unusable input; click's own usage errors have the same exit code."""

    exit_code: ClassVar[int] = 2


class Elsewhere(click.ClickException):
    """End of a process because another process of the launch failed and reports the error: exit code 0, no message."""

    # With another code the launcher might end the other process before it prints its message.
    exit_code: ClassVar[int] = 0

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints nothing."""


_KINDS = {kind.exit_code: kind for kind in (Elsewhere, Failed, Unusable)}


def classify(error: BaseException) -> click.ClickException | None:
    """The exception as a message with an exit code; `None` for an unexpected one, which is a bug."""
    if isinstance(error, click.ClickException):
        return error
    # Imported here because the help of hf-ext needs no hf_ext.
    import_without_models()
    from hf_ext import errors

    ending = errors.classify(error)
    return None if ending is None else _KINDS[ending.exit_code](ending.message)


Load = TypeVar("Load", bound=Callable[..., Any])


def loads(function: Load) -> Load:
    """Decorates a function that loads a model: errors of libraries become a message that names the model."""
    # These errors come from the files: weights that do not fit the configuration, a value of another type, a class
    # that does not exist.

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
                f"{source} cannot be loaded ({type(error).__name__}: {text}); download or save it again."
            ) from error

    return cast(Load, load)
