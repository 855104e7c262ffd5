"""Conversion of exceptions for click; `hf_ext.errors` decides their exit codes and messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import click


class Failed(click.ClickException):
    """A failure outside the program: disk, network, or refusal by a Hub. The exit code is click's own, 1."""


class Unusable(click.ClickException):
    """Unusable input; click's own usage errors have the same exit code."""

    exit_code: ClassVar[int] = 2


def classify(error: BaseException) -> click.ClickException | click.exceptions.Exit | None:
    """The exception as a message with an exit code; `None` for an unexpected one, which is a bug."""
    if isinstance(error, click.ClickException):
        return error
    # Imported here because the help of hf-ext does not need it.
    from hf_ext import errors

    ending = errors.classify(error)
    if ending is None:
        return None
    if ending.exit_code == errors.DONE:
        # Another process of the launch failed and reports the error. With another code the launcher might end it
        # before it prints its message.
        return click.exceptions.Exit(errors.DONE)
    return (Unusable if ending.exit_code == errors.UNUSABLE else Failed)(ending.message)


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Turns errors of libraries while a model is loaded into a message that names it."""
    # These errors come from the files: weights that do not fit the configuration, a value of another type, a class
    # that does not exist.
    try:
        yield
    except (RuntimeError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
        if classify(error) is not None:
            raise
        text = str(error).strip() or "no reason is given"
        raise Unusable(
            f"{source} cannot be loaded ({type(error).__name__}: {text}); fetch or save it again."
        ) from error
