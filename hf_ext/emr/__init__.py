"""EMR-Merging (Huang et al., NeurIPS 2024): many fine-tunes of one model as one model and a 1-bit mask per task."""
