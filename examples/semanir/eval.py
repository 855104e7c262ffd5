"""python examples/semanir/eval.py MODEL examples/semanir/denoise_color.yaml [--field value]

Not called evaluate.py: a script of that name hides the library evaluate from what it imports.
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
