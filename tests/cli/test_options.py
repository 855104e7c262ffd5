"""Names that stand in one option. Options made of fields are tested by the commands that have them."""

import click
import pytest

from hf_ext_cli.options import split_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (" a , b c ", ["a", "b c"]),
        ('"tench, Tinca tinca",hen', ["tench, Tinca tinca", "hen"]),
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
