"""Diffusers pipelines of hf-ext; importing this package registers their names with diffusers. There is none yet."""
