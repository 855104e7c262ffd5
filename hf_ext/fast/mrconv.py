"""Faster operations of MRConv, registered in the tables of `hf_ext.mrconv` on import."""

from . import mrconv_gradients, mrconv_kernels

__all__ = ["mrconv_gradients", "mrconv_kernels"]
