"""Options that are made from the fields of a dataclass."""

from dataclasses import dataclass, field
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from hf_ext_cli.options import options_of, split_names


@dataclass
class Settings:
    """
    Some settings.

    Args:
        base (`str`): The `base`.
        tasks (`dict[str, str]`): The tasks.
        kind (`str`, defaults to `"a"`): One of two.
        share (`float`, defaults to 0.5): A number.
        small (`bool`, defaults to `False`): A flag.
        masks (`bool`, *optional*): Another.
        names (`list[str]`): Several.
        hidden (`int`, defaults to 1): Not for the command line.
    """

    base: str
    tasks: dict[str, str]
    kind: Literal["a", "b"] = "a"
    share: float = 0.5
    small: bool = False
    masks: bool | None = None
    names: list[str] = field(default_factory=list)
    hidden: int = 1


def run(*words: str):
    got = {}
    options = options_of(Settings, flags={"tasks": "--task"}, but=("hidden",))
    result = CliRunner().invoke(
        click.Command("x", params=options, callback=lambda **values: got.update(values)), words
    )
    return result, got


def test_nothing_given_is_none_for_each_field():
    result, got = run()
    assert result.exit_code == 0 and got == dict.fromkeys(
        ("base", "tasks", "kind", "share", "small", "masks", "names")
    )


def test_values_have_the_types_of_the_fields():
    words = "--base x --task a=b=c --task d=e --kind b --share 0.25 --no-small --masks --names p --names q"
    result, got = run(*words.split())
    assert result.exit_code == 0 and got == {
        "base": "x",
        "tasks": {"a": "b=c", "d": "e"},
        "kind": "b",
        "share": 0.25,
        "small": False,
        "masks": True,
        "names": ["p", "q"],
    }


@pytest.mark.parametrize(
    "words", ["--task a", "--task a=b --task a=c", "--task =b", "--kind c", "--share x", "--hidden 2"]
)
def test_what_a_field_cannot_be_ends_with_2(words):
    assert run(*words.split())[0].exit_code == 2


def test_the_help_is_that_of_the_docstring_with_the_default():
    text = " ".join(run("--help")[0].output.split())
    for told in ("The base.", "One of two. [default: a]", "A number. [default: 0.5]", "A flag. [default: no-small]"):
        assert told in text
    assert "Another. --" in text and "Several. Repeatable. --" in text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b", ["a", "b"]),
        (" a , b c ", ["a", "b c"]),
        ('"tench, Tinca tinca",hen', ["tench, Tinca tinca", "hen"]),
        ('hen, "a, b"', ["hen", "a, b"]),
        ("what's,it", ["what's", "it"]),
        # As `$(cat names.txt)` gives them.
        ("a\nb, c\r\n", ["a", "b", "c"]),
        ('"a\nb",c', ["a\nb", "c"]),
        (None, []),
    ],
)
def test_names_stand_between_commas_and_in_quotes(text, names):
    assert split_names(text) == names


@pytest.mark.parametrize("text", ["", " ", ",", '""', "\n"])
def test_an_option_without_a_name_is_refused(text):
    with pytest.raises(click.UsageError):
        split_names(text)
