"""Tasks of a merge in lm-evaluation-harness (pip install lm_eval), all from one EMRModel.

python examples/emr/lm_harness.py merged --benchmarks hellaswag,winogrande --limit 100
python examples/emr/lm_harness.py merged --task math --benchmarks own --include my_benchmarks/
"""

import argparse
import json

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from hf_ext.emr import EMRModel


def main() -> None:
    """Prints the scores of each task of the merge on each benchmark as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("merged", help="artifact of hf-ext merge: folder or org/name, of language models")
    parser.add_argument("--task", action="append", help="of the merge; repeatable, all of them when not given")
    parser.add_argument("--benchmarks", required=True, help="names of the harness's tasks, with commas between")
    parser.add_argument("--include", help="folder with tasks of your own, as YAML files of the harness")
    parser.add_argument("--limit", type=int, help="samples of each benchmark")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    emr = EMRModel.from_pretrained(given.merged, device=given.device)
    tokenizer = AutoTokenizer.from_pretrained(emr.weights.folder)
    manager = TaskManager(include_path=given.include)
    scores = {}
    for name in given.task or emr.tasks:
        with emr.task(name) as model:
            # HFLM takes the model as it is, so every task is measured in the same memory.
            language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
            found = simple_evaluate(
                language_model,
                tasks=given.benchmarks.split(","),
                limit=given.limit,
                task_manager=manager,
                bootstrap_iters=0,
            )
        scores[name] = found["results"]
    print(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
