"""Fixtures of the tests of trainings that read latents and texts."""

from pathlib import Path

import pytest

from tests.disentangled_dit.pipeline_testing import make_vae, write_encoder


@pytest.fixture(scope="session")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny autoencoder."""
    folder = tmp_path_factory.mktemp("autoencoder") / "vae"
    make_vae().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text encoder and its tokenizer."""
    return write_encoder(tmp_path_factory.mktemp("texts") / "encoder")
