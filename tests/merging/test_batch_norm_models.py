"""A model with running statistics and integer buffers of its own, our MRConv: both are kept raw for each task."""

from pathlib import Path

import torch

from hf_ext import EMRModel, MRConvConfig, MRConvForSequenceClassification
from hf_ext.hub.checkpoints import open_checkpoint
from hf_ext.merging import merge_checkpoints
from tests.emr.emr_testing import perturb

TOKENS = torch.arange(1, 13).view(1, 12)


def tiny_mrconv(folder: Path, seed: int = 0, *, base: Path | None = None) -> Path:
    """A classifier with sparse kernels whose statistics have seen data of its own."""
    torch.manual_seed(seed)
    if base is None:
        sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 16}
        model = MRConvForSequenceClassification(
            MRConvConfig(**sizes, kernel_type="sparse", kernel_size=4, num_labels=3)
        )
    else:
        model = MRConvForSequenceClassification.from_pretrained(base)
        perturb(model, seed, 2e-3)
    with torch.no_grad():
        model.train()(input_ids=torch.randint(0, 16, (4, 12)))
    model.save_pretrained(folder)
    return folder


def test_statistics_and_positions_are_the_tasks_own(tmp_path):
    base = tiny_mrconv(tmp_path / "base")
    tasks = {name: tiny_mrconv(tmp_path / name, seed, base=base) for seed, name in enumerate("ab", 1)}
    config = {"base": str(base), "tasks": {name: str(folder) for name, folder in tasks.items()}}
    merged = merge_checkpoints(config, tmp_path / "merged", progress=False).path
    emr = EMRModel.from_pretrained(merged)
    for name, folder in tasks.items():
        emr.set_task(name)
        restored = emr.model.state_dict()
        with open_checkpoint(folder) as own:
            raw = [key for key in own if "running" in key or "positions" in key or "num_batches" in key]
            assert sum("running_mean" in key for key in raw) > 2
            assert sum("positions" in key for key in raw) == 2
            assert all(torch.equal(restored[key], own[key]) for key in raw)
        with torch.no_grad():
            found = emr.model(input_ids=TOKENS).logits
            mine = MRConvForSequenceClassification.from_pretrained(folder).eval()(input_ids=TOKENS).logits
        # The statistics are of its own weights, so that a task's model is near to its fine-tune.
        torch.testing.assert_close(found, mine, atol=0.05, rtol=0)
    # Merged into one kernel afterwards, a task's model is what it was.
    emr.model.reparameterize()
    with torch.no_grad():
        torch.testing.assert_close(emr.model(input_ids=TOKENS).logits, found, atol=1e-5, rtol=1e-5)
