"""What is drawn: curves, kernels, keys, merges, grids of samples."""

import os
from importlib.util import find_spec

# A notebook names its own backend to all that it starts, also to an `hf-ext` of another environment, where importing
# matplotlib then fails. Nothing here is shown in a window: any backend will do.
_BACKEND = os.environ.get("MPLBACKEND", "").removeprefix("module://").partition(".")[0]
if os.environ.get("MPLBACKEND", "").startswith("module://") and find_spec(_BACKEND) is None:
    os.environ["MPLBACKEND"] = "agg"
