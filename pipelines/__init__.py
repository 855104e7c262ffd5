"""Diffusers pipelines; importing this package registers their names with diffusers."""
