"""The Hub: read checkpoints (`checkpoints`), publish (`publish`, `load_check`, `cards`)."""
