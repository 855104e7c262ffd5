"""Model card templates, one Markdown file per method."""
