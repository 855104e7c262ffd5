"""hf-ext push and hf-ext card."""

from pathlib import Path
from typing import Any

import click

from hf_ext.hub.published_files import Listing
from hf_ext.terminal import is_quiet

from . import register_models
from .information import read_results as read_evaluation
from .options import JSON, MODEL_FOLDER, shown
from .output import print_either, print_json, print_rows
from .signals import ended_by_signals


@click.command()
@click.argument("folder", metavar="FOLDER", type=MODEL_FOLDER)
@click.argument("repo_id", metavar="ORG/NAME")
@click.option(
    "--branch", "--revision", "revision", help="Branch, created if missing, or refs/pr/NUMBER.  [default: main]"
)
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to main.")
@click.option("--private/--public", default=None, help="Visibility of a new repository.")
@shown("--message", "commit_message", default="Upload with hf-ext", help="First line of the commit.")
@click.option("--license", help="Licence of the weights, as the Hub names it.")
@click.option("--endpoint", help="Address of the Hub.  [default: HF_ENDPOINT]")
@shown("--check/--no-check", default=True, help="Test loading, with hf_ext and without.")
@click.option("--dry-run", is_flag=True, help="Do everything except the upload, and list the files.")
@JSON
def push(folder: Path, repo_id: str, check: bool, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Publish FOLDER, the snapshot/ of a run or another model, as ORG/NAME in one commit.

    The model is one of hf-ext, transformers, diffusers or peft, as safetensors; one of another library needs a
    README.md in FOLDER, and --no-check. A clean copy is made first: weights, configuration, the code of the installed
    package, and a card. It must load from a Hub's cache, in a process with hf_ext and in one without. Only files that
    belong to a model are uploaded; links that leave FOLDER are not followed. Before the upload, the files and the
    excluded files are listed. A file with a token, key or password stops the push. Code in FOLDER is never run and
    never uploaded. After the upload, the files on the Hub are compared with the copy. The token comes from `hf auth
    login` or HF_TOKEN. SIGINT (Ctrl-C) ends it with exit code 130, SIGTERM with 143; the copy is removed.

    \b
    Examples:
      hf-ext push runs/denoise/snapshot org/name --private
      hf-ext push runs/denoise/snapshot org/name --create-pr --message "Longer training"
      hf-ext push runs/denoise/snapshot org/name --dry-run
    """
    announced: list[Listing] = []

    def announce(listing: Listing) -> None:
        announced.append(listing)
        if not is_quiet():
            print_listing(listing, to_stderr=as_json)

    result: dict[str, Any] = {"repo_id": repo_id}
    with ended_by_signals("the copy is removed. Push again.", own_folder=True):
        register_models()
        from hf_ext.hub import publish

        # The options have the names of the functions' arguments.
        if dry_run:
            listing = publish.preview(folder, repo_id, check=check, **options)
        else:
            commit = publish.push(folder, repo_id, check=check, announce=announce, **options)
            result |= {"commit": commit.oid, "url": commit.commit_url, "pull_request": commit.pr_url}
            listing = announced[0]
    if as_json:
        listed = {"files": listing.files, "stays_behind": listing.stays_behind, "notes": listing.notes}
        print_json(result | listed | ({"deleted": listing.deleted} if dry_run else {}))
    elif dry_run:
        print_listing(listing)
    else:
        print_rows([(name.replace("_", " "), value) for name, value in result.items() if value is not None])


def print_listing(listing: Listing, to_stderr: bool = False) -> None:
    """Prints the plan of an upload: files with sizes, excluded files with reasons, and warnings."""
    parts = {
        "files to upload": [(f"{size:,}", name) for name, size in listing.files.items()],
        "files left out": [(name, reason) for name, reason in listing.stays_behind.items()],
        "files to delete": [(name, "") for name in listing.deleted],
        "warnings": [(note, "") for note in listing.notes],
    }
    for title, rows in parts.items():
        if rows:
            click.echo(f"{title}:", err=to_stderr)
            print_rows(rows, to_stderr)


@click.command()
@click.argument("folder", metavar="FOLDER", type=MODEL_FOLDER)
@click.option("--repo-id", metavar="ORG/NAME", help="Repository of the card.  [default: name of the folder]")
@click.option("--license", "license_name", help="Licence of the weights, as the Hub names it.")
@click.option("--check", is_flag=True, help="Check the existing card, and write nothing.")
@JSON
@click.pass_context
def card(
    context: click.Context, folder: Path, repo_id: str | None, license_name: str | None, check: bool, as_json: bool
) -> None:
    """Write the model card, README.md, of FOLDER from its configuration, weights, eval.json and training.json.

    A card that was edited by hand is kept. `hf-ext push` writes a card in its own copy, so this command is optional.
    With --check, missing entries and entries that the Hub would refuse or ignore are printed, and the exit code is 1
    if there are any.

    \b
    Examples:
      hf-ext card runs/denoise/snapshot --repo-id org/name
      hf-ext card runs/denoise/snapshot --check
    """
    register_models()
    if check:
        problems = find_problems(folder)
        lines = problems or [f"{folder / 'README.md'}: no problems found"]
        print_either(as_json, {"card": str(folder / "README.md"), "problems": problems}, *lines)
        context.exit(1 if problems else 0)
    from hf_ext.hub import released
    from hf_ext.hub.cards import write_card

    if folder.resolve().parent == released.FOLDER.resolve():
        told = "a released model, whose card belongs to the package; copy the folder, and give the copy"
        raise click.UsageError(f"{folder} is {told} (or --check, which writes nothing).")
    if repo_id == "":
        raise click.UsageError("--repo-id is empty; give ORG/NAME, or leave the option out.")
    path = write_card(folder, repo_id=repo_id or folder.resolve().name, license=license_name)
    print_either(as_json, {"card": str(path), "text": path.read_text(encoding="utf-8")}, path)


def find_problems(folder: Path) -> list[str]:
    """Problems of a card, one line each: missing entries, and contradictions with the folder."""
    from hf_ext.hub.card_rules import check_card, read_card, read_front_matter, read_metrics
    from hf_ext.hub.cards import PLACEHOLDER, expected_task

    path = folder / "README.md"
    if not path.is_file():
        return [f"{path}: there is no card"]
    text = read_card(path)
    try:
        metadata, broken = read_front_matter(text), check_card(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    wanted = ["license", "library_name", *(["pipeline_tag"] if expected_task(folder) is not None else [])]
    problems = [f"{path}: {name} is not in the metadata" for name in wanted if metadata.get(name) is None]
    problems += [f"{path}, {problem}" for problem in broken]
    if PLACEHOLDER in text:
        problems.append(f"{path}: {PLACEHOLDER} is left in the text")
    stated = [(metric.get("type"), metric.get("value")) for metric in read_metrics(metadata)]
    return problems + [
        f"{path}: {result['metric']} of {result['value']} in eval.json is not in the metadata"
        for result in read_evaluation(folder / "eval.json")
        if (result["metric"], result["value"]) not in stated
    ]
