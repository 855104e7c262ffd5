"""python examples/disentangled_dit/eval.py MODEL examples/disentangled_dit/cifar10.yaml --data.eval.path cifar10/

The loss of a model, a folder or org/name[@revision], at fixed timesteps and noises. Pictures are measured elsewhere.
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
