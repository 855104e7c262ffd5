"""Pictures of confusions."""

import numpy as np

from hf_ext.tasks.sequences import draw_confusion


def test_confusions_are_darker_where_there_are_more():
    confusion = np.diag([8, 8, 8])
    confusion[2, 0] = 8
    picture = np.asarray(draw_confusion(confusion, ["a", "b", "c"]).convert("L"), dtype=float)
    empty = np.asarray(draw_confusion(np.zeros((3, 3), dtype=int), []).convert("L"), dtype=float)
    assert picture.mean() < empty.mean() - 10
    assert draw_confusion(np.eye(50, dtype=int), []).size[0] > 500
