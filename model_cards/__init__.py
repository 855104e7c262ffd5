"""Jinja templates of model cards: `base.md` with the sections, one per method, one for adapters and other models."""
