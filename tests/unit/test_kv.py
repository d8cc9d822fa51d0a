import pytest
import torch
from torch import Tensor

from specdec.errors import RequestError
from specdec_plugins.kv.slab import Slab

LAYERS, HEADS, DIM = 2, 2, 3


class Lists:
    """The same cache as lists of numbers, one per committed cell."""

    def __init__(self, rows: int) -> None:
        self.cells: list[list[float]] = [[] for _ in range(rows)]

    def commit(self, slot: int, staged: list[float], offsets: list[int]) -> None:
        self.cells[slot] += [staged[offset] for offset in offsets]


def forward(kv: Slab, slots: tuple[int, ...], numbers: list[list[float]], offset: int = 0) -> list[list[list[float]]]:
    """Stage one forward with ragged rows; return what each row sees, per layer."""
    width = max(len(row) for row in numbers)
    staged = kv.stage(slots, [len(row) for row in numbers], width, offset)
    seen = []
    for layer in range(LAYERS):
        padded = torch.tensor([row + [-7.0] * (width - len(row)) for row in numbers]) + layer / 10
        keys = padded.view(len(numbers), 1, width, 1).expand(-1, HEADS, -1, DIM).clone()
        k, v = staged.update(keys, -keys, layer, {"cache_position": None})
        assert torch.equal(v, -k)
        assert k.shape == (len(slots), HEADS, staged.where.end, DIM)
        seen.append((k[:, 0, :, 0] - layer / 10).round(decimals=3).tolist())
        assert bool((k == k[:, :1, :, :1]).all())
    assert staged.get_seq_length() == staged.where.end - width
    return seen


def contents(kv: Slab, slot: int) -> list[float]:
    """Committed cells of a row; the same in both layers, keys and values."""
    length = kv.lengths[slot]
    found = []
    for layer in range(LAYERS):
        keys, values = kv._keys[layer][slot, :, :length], kv._values[layer][slot, :, :length]
        assert torch.equal(values, -keys)
        assert bool((keys == keys[:1, :, :1]).all())
        found.append((keys[0, :, 0] - layer / 10).round(decimals=3).tolist())
    assert found[0] == found[1]
    return found[0]


def offsets(*rows: list[int]) -> tuple[Tensor, list[int]]:
    widest = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (widest - len(row)) for row in rows], dtype=torch.int64).reshape(
        len(rows), widest
    ), [len(row) for row in rows]


def taken(rows: int, tokens: int) -> Slab:
    kv = Slab(rows=rows, tokens=tokens)
    for slot in range(rows):
        assert kv.acquire() == slot
    return kv


def test_staged_cells_are_seen_after_the_committed_ones():
    # Catches a write below the length, and rows that see each other's cells.
    kv = taken(2, 10)
    forward(kv, (0, 1), [[1, 2, 3], [4]])
    kv.commit((0, 1), *offsets([0, 1, 2], [0]), chain=True)
    seen = forward(kv, (0, 1), [[5, 6], [7, 8]])
    for layer in seen:
        assert layer[0][:5] == [1, 2, 3, 5, 6]
        assert layer[1][:3] == [4, 7, 8]


def test_what_is_not_committed_never_happened():
    # Rollback: the next forward overwrites; catches a length that counts staged cells.
    kv = taken(1, 10)
    forward(kv, (0,), [[1, 2]])
    kv.commit((0,), *offsets([0, 1]), chain=True)
    forward(kv, (0,), [[3, 4, 5]])
    assert kv.lengths == [2]
    kv.commit((0,), *offsets([0]), chain=True)
    assert contents(kv, 0) == [1, 2, 3]
    assert forward(kv, (0,), [[9]])[0][0] == [1, 2, 3, 9]


def test_a_path_of_a_tree_is_made_contiguous_in_order():
    # Catches a move that overwrites a cell before it is read, and a move in one layer only.
    kv = taken(2, 12)
    forward(kv, (0, 1), [[1, 2], [3]])
    kv.commit((0, 1), *offsets([0, 1], [0]), chain=True)
    forward(kv, (0, 1), [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    kv.commit((0, 1), *offsets([0, 2, 3, 4], [0, 4]), chain=False)
    assert contents(kv, 0) == [1, 2, 10, 12, 13, 14]
    assert contents(kv, 1) == [3, 20, 24]


def test_forwards_at_growing_offsets_stage_behind_each_other():
    # Self-drafting: nothing committed in between; the later forward sees the earlier one's cells.
    kv = taken(1, 10)
    forward(kv, (0,), [[1]])
    kv.commit((0,), *offsets([0]), chain=True)
    forward(kv, (0,), [[2]])
    assert forward(kv, (0,), [[3]], offset=1)[0][0] == [1, 2, 3]
    kv.commit((0,), *offsets([0, 1]), chain=True)
    assert contents(kv, 0) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_equal_lists(seed):
    # Ragged rows, holes between slots, trees, truncation, reused rows, against plain lists. Catches padding that
    # overwrites a cell, a slice where rows are not level, a view where slots are not neighbours.
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    rows, tokens = 5, 14
    kv, model, number = taken(rows, tokens), Lists(rows), 0
    for _ in range(40):
        slots = tuple(slot for slot in range(rows) if draw(0, 2) and len(model.cells[slot]) < tokens)
        if slots:
            numbers = []
            for slot in slots:
                size = draw(1, min(5, tokens - len(model.cells[slot])))
                numbers.append([float(number := number + 1) for _ in range(size)])
            for layer in forward(kv, slots, numbers):
                for index, slot in enumerate(slots):
                    known = model.cells[slot] + numbers[index]
                    assert layer[index][: len(known)] == known
            if draw(0, 1):
                kept = [list(range(draw(0, len(row)))) for row in numbers]
                kv.commit(slots, *offsets(*kept), chain=True)
            else:
                kept = [sorted({0, *(draw(0, len(row) - 1) for _ in range(3))}) for row in numbers]
                kv.commit(slots, *offsets(*kept), chain=False)
            for slot, row, chosen in zip(slots, numbers, kept, strict=True):
                model.commit(slot, row, chosen)
        action, slot = draw(0, 5), draw(0, rows - 1)
        if action == 0:
            length = draw(0, tokens)
            kv.truncate((slot,), (length,))
            model.cells[slot] = model.cells[slot][:length]
        elif action == 1:
            kv.release((slot,), clear=bool(draw(0, 1)))
            assert kv.acquire() == slot
            model.cells[slot] = []
        assert kv.lengths == [len(cells) for cells in model.cells]
        if number:
            assert [contents(kv, slot) for slot in range(rows)] == model.cells


def test_slots_with_a_hole_are_gathered_and_counted_and_neighbours_are_views():
    # Catches a silent copy at batch 1, and the span 0..2 read for the rows 0 and 2.
    kv = taken(3, 8)
    forward(kv, (0, 1, 2), [[1], [2], [3]])
    kv.commit((0, 1, 2), *offsets([0], [0], [0]), chain=True)
    assert kv.gathers == 0
    assert forward(kv, (0, 2), [[4], [5]])[0] == [[1, 4], [3, 5]]
    assert kv.gathers == LAYERS
    staged = kv.stage((1, 2), [1, 1], 1)
    keys, _ = staged.update(torch.zeros(2, HEADS, 1, DIM), torch.zeros(2, HEADS, 1, DIM), 0)
    assert kv.gathers == LAYERS
    assert keys.data_ptr() == kv._keys[0][1].data_ptr()


def test_storage_is_made_once():
    # Memory that moves would break graphs and grow; catches a cat per step.
    kv = taken(2, 16)
    forward(kv, (0, 1), [[1], [2]])
    before = [(kv._keys[layer].data_ptr(), kv._values[layer].data_ptr()) for layer in range(LAYERS)]
    for step in range(5):
        forward(kv, (0, 1), [[step, 1], [step]])
        kv.commit((0, 1), *offsets([0, 1], [0]), chain=step % 2 == 0)
        kv.truncate((0,), (3,))
    kv.release((0,), clear=True)
    assert before == [(kv._keys[layer].data_ptr(), kv._values[layer].data_ptr()) for layer in range(LAYERS)]


def test_padding_past_the_last_cell_fits():
    # A full row beside a short one: the padding of the full row has no cells left; catches an index past the end.
    kv = taken(2, 4)
    forward(kv, (0, 1), [[1, 2, 3], [4, 5, 6]])
    kv.commit((0, 1), *offsets([0, 1, 2], [0]), chain=True)
    seen = forward(kv, (0, 1), [[7], [8, 9, 10]])
    assert seen[0][0] == [1, 2, 3, 7]
    assert seen[0][1] == [4, 8, 9, 10]
    kv.commit((0, 1), *offsets([0], [0]), chain=True)
    assert contents(kv, 0) == [1, 2, 3, 7]


def test_too_many_cells_are_refused_before_anything_is_written():
    # The message names what is needed and what there is.
    kv = taken(2, 4)
    forward(kv, (0, 1), [[1, 2, 3], [4]])
    kv.commit((0, 1), *offsets([0, 1, 2], [0]), chain=True)
    with pytest.raises(RequestError, match=r"kv\.tokens: 5 cells are needed and a row has 4"):
        kv.stage((0, 1), [2, 1], 2)
    with pytest.raises(RequestError):
        kv.stage((1,), [2], 2, offset=2)
    assert contents(kv, 0) == [1, 2, 3]
    kv.stage((0,), [1], 4)  # only columns that count need cells


def test_rows_are_taken_lowest_first_and_run_out():
    kv = Slab(rows=2, tokens=4)
    assert (kv.room, kv.acquire(), kv.acquire(), kv.room) == (2, 0, 1, 0)
    with pytest.raises(RequestError, match=r"kv\.rows: all 2 rows are taken"):
        kv.acquire()
    kv.release((0,))
    assert (kv.room, kv.acquire()) == (1, 0)


def test_occupy_takes_a_given_row_once():
    # A drafter follows the target's row numbers; occupying again must not forget what is cached.
    kv = Slab(rows=3, tokens=4)
    kv.occupy(1)
    assert (kv.room, kv.acquire(), kv.acquire()) == (2, 0, 2)
    forward(kv, (1,), [[1]])
    kv.commit((1,), *offsets([0]), chain=True)
    kv.occupy(1)
    assert kv.lengths[1] == 1


def test_clear_zeroes_the_row_and_no_other():
    # A masked NaN still poisons attention: 0 times NaN is NaN.
    kv = taken(3, 4)
    forward(kv, (0, 1, 2), [[1, 2], [9, 9], [3, 4]])
    kv.commit((0, 1, 2), *offsets([0, 1], [0, 1], [0, 1]), chain=True)
    for layer in range(LAYERS):
        kv._keys[layer][1] = float("nan")
        kv._values[layer][1] = float("inf")
    kv.release((1,), clear=True)
    for layer in range(LAYERS):
        assert not bool(kv._keys[layer][1].any())
        assert not bool(kv._values[layer][1].any())
    assert contents(kv, 0) == [1, 2]
    assert contents(kv, 2) == [3, 4]


def test_fork_shares_options_and_nothing_else():
    # A draft model's cache has the same row numbers; catches shared storage or lengths.
    kv = taken(2, 6)
    forward(kv, (0,), [[1, 2]])
    kv.commit((0,), *offsets([0, 1]), chain=True)
    other = kv.fork()
    assert (other.rows, other.tokens, other.lengths, other.room) == (2, 6, [0, 0], 2)
    assert (kv.fork(more=3).rows, kv.fork(more=3).tokens) == (2, 9)
    other.acquire()
    forward(other, (0,), [[9]])
    assert contents(kv, 0) == [1, 2]
    assert kv.lengths == [2, 0]


def test_truncate_never_lengthens():
    kv = taken(1, 6)
    forward(kv, (0,), [[1, 2, 3]])
    kv.commit((0,), *offsets([0, 1, 2]), chain=True)
    kv.truncate((0,), (5,))
    assert contents(kv, 0) == [1, 2, 3]
    kv.truncate((0,), (1,))
    assert contents(kv, 0) == [1]


def test_storage_follows_the_dtype_of_the_keys_and_outlives_inference_mode():
    kv = taken(1, 6)
    with torch.inference_mode():
        kv.stage((0,), [1], 1).update(torch.ones(1, 1, 1, 2).bfloat16(), torch.ones(1, 1, 1, 4).bfloat16(), 0)
    assert kv._keys[0].dtype == torch.bfloat16
    assert kv._values[0].shape == (1, 1, 7, 4)
    assert not kv._keys[0].is_inference()
    kv.commit((0,), *offsets([0]), chain=False)  # writes outside inference mode
