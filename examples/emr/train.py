"""accelerate launch examples/emr/train.py examples/emr/finetune.yaml [--field value]

Fine-tunes a text encoder on one task with the shared loop; running it again continues an interrupted run.
"""

import sys

from transformers.utils import logging
from tweet_task import TweetTask

from hf_ext.training import TrainingArguments
from hf_ext.training.arguments import apply_overrides, build, read_yaml
from hf_ext.training.loop import train


def main(words: list[str]) -> None:
    """Trains what the YAML file and the flags after it describe."""
    arguments = build(TrainingArguments, apply_overrides(read_yaml(words[0]), words[1:]))
    logging.disable_progress_bar()
    train(build(TweetTask, arguments.task, "task"), arguments)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
