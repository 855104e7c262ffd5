"""accelerate launch examples/emr/train.py examples/emr/finetune.yaml [--field value]

Fine-tunes a text encoder on one task with the shared loop; running it again continues an interrupted run.
"""

import sys

from tasks import TweetTask

from hf_ext.training import TrainingArguments, main
from hf_ext.training.arguments import build


def make_task(arguments: TrainingArguments) -> TweetTask:
    """The task of a run."""
    return build(TweetTask, arguments.task, "task")


if __name__ == "__main__":
    sys.exit(main(make_task=make_task, usage=__doc__))
