"""Which rows are forwarded together."""

import random
from itertools import pairwise

import torch

from specdec.padding import alike

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


# Catches: a row that is lost or read twice, rows padded to one that is much longer, a forward for each row.
def test_rows_of_like_length_go_together():
    assert alike([100, 3, 90, 5], CPU) == [[0, 2], [1, 3]]
    assert alike([7], CPU) == [[0]]
    assert alike([], CPU) == []
    chance = random.Random(0)
    for _ in range(50):
        lengths = [chance.randrange(1, 400) for _ in range(chance.randrange(1, 40))]
        groups = alike(lengths, CPU)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        assert all(group == sorted(group) for group in groups)
        ends = sorted((min(lengths[i] for i in group), max(lengths[i] for i in group)) for group in groups)
        assert all(longest - shortest <= 16 for shortest, longest in ends)
        assert all(above - longest > 0 for (_, longest), (above, _) in pairwise(ends))


# Catches: many small forwards where arithmetic costs nothing, a forward of no row in every step without a prompt.
def test_other_devices_take_all_rows_at_once():
    assert alike([100, 3, 90], ELSEWHERE) == [[0, 1, 2]]
    assert alike([], ELSEWHERE) == []
