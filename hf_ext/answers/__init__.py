"""Answers of trained models to what is given to them: classes, values, continued texts."""
