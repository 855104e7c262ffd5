"""`python -m hf_ext.training FILE.yaml`, as `accelerate launch -m` runs it."""

import sys

from .launch import main

if __name__ == "__main__":
    sys.exit(main())
