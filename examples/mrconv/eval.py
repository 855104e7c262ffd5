"""python examples/mrconv/eval.py MODEL examples/mrconv/speech_commands.yaml [--field value]

At half the rate of the training, without training again: --task.decimation 2
"""

import json
import sys
from pathlib import Path

from hf_ext.training import evaluate_checkpoint

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, config, *overrides = sys.argv[1:]
    print(json.dumps(evaluate_checkpoint(model, Path(config), overrides), indent=2))
