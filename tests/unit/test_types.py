import pytest
import torch
from torch import Tensor

from specdec.law import Dense, Law, Logits, PointMass, Sparse
from specdec.types import Request, Sampling

ROWS, NODES, SIZE = 3, 4, 6


def probs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand((ROWS, NODES, SIZE), generator=generator, dtype=torch.float64) ** 3
    values[..., 2] = 0.0
    return values / values.sum(-1, keepdim=True)


def same_laws() -> dict[str, tuple[Law, Tensor]]:
    """Each law class with the dense probabilities it stands for."""
    p = probs()
    ids = torch.stack([torch.randperm(SIZE, generator=torch.Generator().manual_seed(i)) for i in range(12)])
    ids = ids.view(ROWS, NODES, SIZE)
    temperature = torch.linspace(0.5, 2.0, ROWS * NODES, dtype=torch.float64).view(ROWS, NODES, 1)
    token = p.argmax(-1)
    some = p.gather(-1, ids[..., :3])
    some = some / some.sum(-1, keepdim=True)
    partly = torch.zeros_like(p)
    for row in range(ROWS):
        for node in range(NODES):
            for c in range(3):
                partly[row, node, ids[row, node, c]] = some[row, node, c]
    point = torch.nn.functional.one_hot(token, SIZE).double()
    return {
        "dense": (Dense(p), p),
        "logits": (Logits(p.log() * 0.7 + 5.0, 0.7), p),
        "logits with a temperature per node": (Logits(p.log() * temperature, temperature), p),
        "sparse, all ids": (Sparse(ids, p.gather(-1, ids), SIZE), p),
        "sparse, three ids": (Sparse(ids[..., :3], some, SIZE), partly),
        "point": (PointMass(token, SIZE, torch.float64), point),
    }


each_law = pytest.mark.parametrize("name", list(same_laws()))


@each_law
def test_a_law_is_its_dense_probabilities(name):
    # Catches a temperature that multiplies, and candidates scattered to the wrong ids.
    law, dense = same_laws()[name]
    assert torch.allclose(law.dense(), dense)
    assert law.dense().dtype == torch.float64


@each_law
def test_at_is_the_probability_of_the_token_and_zero_below_zero(name):
    # Catches an index of -1 that wraps round.
    law, dense = same_laws()[name]
    for token in range(-2, SIZE):
        got = law.at(torch.full((ROWS, NODES), token))
        expected = dense[..., token] if token >= 0 else torch.zeros(ROWS, NODES).double()
        assert torch.allclose(got, expected)


@each_law
def test_row_is_the_law_of_one_node_per_row_or_the_zero_measure(name):
    # Catches a row index applied to the batch, and a law where nothing was proposed.
    law, dense = same_laws()[name]
    index, valid = torch.tensor([2, 0, 3]), torch.tensor([True, False, True])
    picked = law.row(index, valid)
    expected = dense[torch.arange(ROWS), index] * valid.unsqueeze(1)
    assert torch.allclose(picked.dense(), expected)
    for token in range(SIZE):
        assert torch.allclose(picked.at(torch.full((ROWS,), token)), expected[:, token])
    # An index past the end comes with valid = False at the end of a full draft.
    past = law.row(torch.tensor([NODES, -1, 1]), torch.tensor([False, False, True]))
    assert not bool(past.dense()[:2].any())
    assert torch.allclose(past.dense()[2], dense[2, 1])


@each_law
def test_narrow_keeps_the_first_nodes(name):
    law, dense = same_laws()[name]
    assert torch.allclose(law.narrow(2).dense(), dense[:, :2])
    assert law.narrow(0).dense().shape == (ROWS, 0, SIZE)


@each_law
def test_only_is_the_law_of_one_row(name):
    # Catches the law of another row, a temperature of another row, and a row that is no batch any more.
    law, dense = same_laws()[name]
    for row in range(ROWS):
        assert torch.allclose(law.only(row).dense(), dense[row : row + 1])


def test_the_zero_measure_of_a_point_mass_is_zero():
    law = PointMass(torch.tensor([[-1, 3]]), SIZE)
    assert law.dense().sum(-1).tolist() == [[0.0, 1.0]]
    assert law.at(torch.tensor([[-1, 3]])).tolist() == [[0.0, 1.0]]


def test_a_sparse_law_may_pad_its_candidates_with_mass_zero():
    # Fewer candidates than columns: the padding id carries nothing, even if it is also a candidate.
    law = Sparse(torch.tensor([[[4, 0, 0]]]), torch.tensor([[[1.0, 0.0, 0.0]]]), SIZE)
    assert law.dense().tolist() == [[[0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]]


def test_logits_are_at_and_dense_alike_where_logits_are_minus_infinity():
    law = Logits(torch.tensor([[[0.0, float("-inf"), 0.0]]]))
    assert law.at(torch.tensor([[1]])).tolist() == [[0.0]]
    assert law.dense().tolist() == [[[0.5, 0.0, 0.5]]]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": 1e-5},
        {"temperature": float("nan")},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": 0},
        {"min_new_tokens": -1},
        {"ignore_eos": 1},
        {"seed": -1},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_sampling_refuses_values_without_a_meaning(options):
    # Each would decode something that nobody asked for; the message names the option.
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        Sampling(**options)


def test_sampling_takes_the_limits_of_its_ranges():
    Sampling(temperature=1e-4, top_p=1.0, min_p=1.0, max_new_tokens=1, repetition_penalty=0.1)
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=1e-4).greedy
    assert Sampling(stop_strings="END").stop_strings == ("END",)
    assert Sampling(stop_strings=["a", "b"], stop_ids=[3, 3]).stop_strings == ("a", "b")
    assert Sampling(stop_ids=[3, 3]).stop_ids == frozenset({3})


def test_a_request_takes_tensors_of_ids():
    assert Request(prompt=torch.tensor([3, 1])).prompt == (3, 1)
