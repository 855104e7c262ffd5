"""A fixture of MRConv's tests."""

import pytest
import torch


@pytest.fixture
def deterministic():
    """What is not deterministic is refused, and memory that is not filled yet holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
