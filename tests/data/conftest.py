"""Fixtures of the tests of own data: those of the trainings that read them."""

from tests.training.conftest import examples as examples
from tests.training.conftest import images as images
from tests.training.conftest import without_pause as without_pause
