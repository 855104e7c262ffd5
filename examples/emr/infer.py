"""python examples/emr/infer.py MERGED TASK TEXT [TEXT …]"""

import sys

import torch
from transformers import AutoTokenizer

from hf_ext import EMRModel


def classify(merged: str, task: str, texts: list[str]) -> list[str]:
    """Labels that a task's model gives to texts."""
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = EMRModel.from_pretrained(merged, task=task).model
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    return [model.config.id2label[index] for index in logits.argmax(-1).tolist()]


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    print("\n".join(classify(sys.argv[1], sys.argv[2], sys.argv[3:])))
