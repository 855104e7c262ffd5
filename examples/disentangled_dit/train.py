"""accelerate launch examples/disentangled_dit/train.py examples/disentangled_dit/cifar10.yaml [--field value]"""

import sys

from hf_ext.training import main

if __name__ == "__main__":
    sys.exit(main())
