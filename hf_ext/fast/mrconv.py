"""All that makes MRConv faster: importing this enters it in the tables of `hf_ext.mrconv`."""

from . import mrconv_gradients, mrconv_grouped_sums, mrconv_kept_kernels

__all__ = ["mrconv_gradients", "mrconv_grouped_sums", "mrconv_kept_kernels"]
