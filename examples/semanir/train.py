"""accelerate launch examples/semanir/train.py examples/semanir/denoise_color.yaml [--field value]"""

import sys

from hf_ext.training import main

if __name__ == "__main__":
    sys.exit(main())
