"""Attention of arguments that do not fit each other: kernels would read memory that is not theirs."""

import pytest
import torch

from hf_ext.semanir import ops_semanir as ops
from tests.semanir.attention_testing import make_case

TEMPERATURE = torch.full((2,), 10.0)
CASE = make_case((3, 4), 4, 5, 3, torch.float32)
BITS = CASE.dictionary.bits
WRONG = {
    "`dictionary.bits` has shape .1, 12, 2": {"dictionary": CASE.dictionary._replace(bits=BITS[:1])},
    "`dictionary.bits` has shape .2, 12, 1": {"dictionary": CASE.dictionary._replace(bits=BITS[..., :1])},
    "`dictionary.window` is .3, 3.; it must hold 12": {"dictionary": CASE.dictionary._replace(window=(3, 3))},
    "`table` has shape .2, 9.": {"table": CASE.table[:, :9]},
    "`key` has shape .2, 2, 6, 5.": {"key": CASE.key[:, :, :6]},
    "`value` has shape .2, 1, 12, 5.": {"value": CASE.value[:, :1]},
}


@pytest.mark.parametrize("problem", WRONG)
def test_sizes_that_do_not_fit_are_refused(problem):
    pytest.importorskip("numba")
    query, key, value, table, dictionary = CASE._replace(**WRONG[problem])
    with pytest.raises(ValueError, match=problem):
        ops.key_semantic_attention(query, key, value, TEMPERATURE, table, dictionary, "native")


def test_temperature_of_another_number_of_heads_is_refused():
    pytest.importorskip("numba")
    with pytest.raises(ValueError, match="`temperature` has shape"):
        ops.key_semantic_attention(*CASE[:3], TEMPERATURE[:1], *CASE[3:], "native")
