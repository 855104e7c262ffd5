"""The site's page of the fields of a training's YAML file, from the docstrings of its classes."""

from hf_ext.training.methods import LINK, TASKS, list_sections


def write_reference() -> str:
    """Markdown of the page `options` of the site: the fields of all methods."""
    lines = ["# Fields of a training's YAML file", ""]
    sections = list(list_sections(None).values())
    for method in TASKS:
        sections += list(list_sections(method).values())[len(list_sections(None)) :]
    written: dict[str, str] = {}
    for heading, entries in sections:
        lines += [f"## {heading}", ""]
        same = written.setdefault(str(entries), heading)
        if same != heading:
            lines += [f"As of: {same}.", ""]
            continue
        for entry in entries:
            meaning = LINK.sub(r"`\2`", entry.meaning)
            lines.append(f"- **{', '.join(entry.names)}** ({entry.kind}): {meaning}")
        lines.append("")
    return "\n".join(lines)
