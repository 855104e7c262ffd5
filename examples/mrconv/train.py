"""accelerate launch examples/mrconv/train.py examples/mrconv/speech_commands.yaml [--field value]"""

import sys

from hf_ext.training import main

if __name__ == "__main__":
    sys.exit(main())
