"""hf_ext: NeurIPS 2024 methods as first-class Hugging Face plugins."""

__version__ = "0.1.0"

__all__ = ["__version__"]
