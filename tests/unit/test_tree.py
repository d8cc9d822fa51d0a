import pytest
import torch

from specdec.tree import ancestors, deepest, depths, positions, span_parents, topological, visible


def forests(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Random trees with one root in column 0, parents before children."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((rows, columns), -1)
    for column in range(1, columns):
        parents[:, column] = torch.randint(0, column, (rows,), generator=generator)
    return parents


def path(parents: list[int], column: int) -> list[int]:
    """A column and all above it."""
    found = [column]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


CHAIN = torch.arange(-1, 5).repeat(3, 1)
STAR = torch.tensor([-1, 0, 0, 0, 0, 0]).repeat(3, 1)
TREES = [CHAIN, STAR, *(forests(seed, 3, 6) for seed in range(6)), torch.full((3, 1), -1), torch.full((3, 4), -1)]


@pytest.mark.parametrize("parents", TREES)
def test_ancestors_are_the_column_and_all_above_it(parents):
    # Catches ancestors that stop at the parent, and rows mixed up.
    seen = ancestors(parents)
    for row, line in enumerate(parents.tolist()):
        for column in range(len(line)):
            assert seen[row, column].nonzero().flatten().tolist() == sorted(path(line, column))
            assert depths(seen)[row, column] == len(path(line, column)) - 1


def test_span_parents_shift_draft_nodes_behind_the_root():
    # Catches an off-by-one between nodes and columns.
    assert span_parents(torch.tensor([[-1, -1, 0, 1]])).tolist() == [[-1, 0, 0, 1, 2]]
    assert span_parents(torch.zeros((2, 0), dtype=torch.int64)).tolist() == [[-1], [-1]]


def test_topological_wants_parents_before_children():
    parents = torch.tensor([[-1, 0, 1], [-1, 1, 0], [-1, 2, 0], [-1, -2, 0], [0, 0, 0]])
    assert topological(parents).all(-1).tolist() == [True, False, False, False, False]
    assert topological(parents)[3].tolist() == [True, False, True]


def test_the_deepest_path_is_counted_in_nodes_that_count():
    # Catches the number of nodes taken for the depth, and padding that is deeper than the draft.
    parents = torch.tensor([[-1, -1, 1, 0], [-1, 0, 1, 2], [-1, 0, 1, 2], [-1, -1, -1, -1]])
    assert deepest(parents, torch.tensor([4, 4, 2, 0])).tolist() == [2, 4, 2, 0]


@pytest.mark.parametrize("parents", [None, *TREES])
def test_positions_are_the_start_plus_the_depth_and_zero_for_padding(parents):
    # Siblings share a position; catches the column number as position, and padding beyond a learned position table.
    starts, width = torch.tensor([0, 4, 9]), 6 if parents is None else parents.shape[1]
    sizes = torch.tensor([width, max(width - 2, 1), 1])
    got = positions(starts, sizes, width, None if parents is None else ancestors(parents))
    for row in range(3):
        for column in range(width):
            depth = column if parents is None else len(path(parents[row].tolist(), column)) - 1
            expected = int(starts[row]) + depth if column < sizes[row] else 0
            assert got[row, column] == expected


@pytest.mark.parametrize("parents", [None, *TREES])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 100])
def test_a_column_sees_committed_cells_and_its_ancestors_within_the_window(parents, window):
    # Naive loop per row, column and cell. Catches siblings that see each other, a window over cells instead of
    # positions in a tree, a window that is off by one, and starts mixed up between rows.
    starts, width = torch.tensor([0, 4, 9]), 6 if parents is None else parents.shape[1]
    end = 9 + width
    got = visible(starts, width, end, None if parents is None else ancestors(parents), window)
    assert got.shape == (3, 1, width, end)
    for row, start in enumerate(starts.tolist()):
        line = list(range(-1, width - 1)) if parents is None else parents[row].tolist()
        for column in range(width):
            up = path(line, column)
            here = start + len(up) - 1
            seen = set()
            for cell in range(end):
                if cell < start:
                    position = cell
                elif cell - start in up:
                    position = start + len(path(line, cell - start)) - 1
                else:
                    continue
                if window is None or here - position < window:
                    seen.add(cell)
            assert seen, "a column sees at least itself"
            assert set(got[row, 0, column].nonzero().flatten().tolist()) == seen


def test_a_chain_without_a_tensor_is_a_chain_of_parents():
    starts = torch.tensor([2, 0, 5])
    for window in (None, 2, 4):
        assert torch.equal(visible(starts, 6, 11, None, window), visible(starts, 6, 11, ancestors(CHAIN), window))


def test_every_column_sees_a_cell_even_when_it_lies_past_the_end():
    # Padding columns beyond `end`, in a window that has left all cells; an empty row of the mask makes NaN.
    for seen in (None, ancestors(CHAIN)):
        for window in (None, 1, 2):
            mask = visible(torch.tensor([0, 3, 1]), 6, 4, seen, window)
            assert bool(mask.any(-1).all())
