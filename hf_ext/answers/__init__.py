"""Inference with trained models: classes, values and continued texts."""
