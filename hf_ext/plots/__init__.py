"""What is drawn: curves, kernels, keys, merges, grids of samples."""
