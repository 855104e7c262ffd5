"""hf-ext mrconv on real folders."""

from functools import partial

from PIL import Image

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from tests.kit import command_line

run = partial(command_line.run, "mrconv")


def test_kernels_are_drawn(tmp_path):
    config = MRConvConfig(hidden_size=4, num_hidden_layers=2, kernel_size=4, max_position_embeddings=16)
    model = MRConvForSequenceClassification(config)
    model.save_pretrained(tmp_path / "model")
    assert run("plot", tmp_path / "model", tmp_path / "kernels.png").stdout == f"{tmp_path / 'kernels.png'}\n"
    with Image.open(tmp_path / "kernels.png") as picture:
        assert picture.format == "PNG"
    model.reparameterize().save_pretrained(tmp_path / "merged")
    result = run("plot", tmp_path / "merged", tmp_path / "other.png", code=2)
    assert "the model is merged and has no branches" in result.stderr
    assert not (tmp_path / "other.png").exists()
    assert "Missing argument 'OUT.png'" in run("plot", tmp_path / "model", code=2).stderr
