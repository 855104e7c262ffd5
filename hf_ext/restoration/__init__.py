"""Restoration of picture files: planning, restoring, writing."""
