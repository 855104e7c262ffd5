"""The command line in the process of the test: `run("merge", config, out, code=2)`."""

from typing import Any

from click.testing import CliRunner, Result

from hf_ext_cli.main import main


def run(*words: object, code: int | None = 0, given: str | bytes | None = None, **options: Any) -> Result:
    """The result of `hf-ext words...`, which must end with `code` if that is not `None`; `given` is the input."""
    result = CliRunner().invoke(main, [str(word) for word in words], input=given, **options)
    assert code is None or result.exit_code == code, result.output
    return result
