"""Rules made of rules."""

import pytest
import torch
from test_nucleus_bounds import V, random_laws, sequence_law, target_law

from specdec.errors import CompatibilityError
from specdec.law import Dense
from specdec.loading import byte_tokenizer
from specdec.options import build, values
from specdec.testing import chain, output_law, random_model
from specdec.types import Draft, Scores
from specdec.verifier import Place
from specdec_plugins.verifiers.any_of import AnyOf
from specdec_plugins.verifiers.gated import Gated
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical


def places(count=200, seed=0, memory=None):
    p, q = (random_laws(count, 1, seed + offset)[0][:, 0] for offset in (0, 1))
    token = torch.zeros(count, dtype=torch.int64)
    return Place(p, Dense(q), token, token, p.log(), {}, memory)


def gate(inside, outside, begin=0, end=1):
    rule = Gated(inside=inside, outside=outside, begin=begin, end=end)
    rule.prepare(None)
    return rule


# Catches: a sum or a product of acceptances, one uniform for each rule.
def test_any_of_keeps_what_one_of_its_rules_keeps():
    at, parts = places(), (Nucleus(theta=0.5), Typical(replacement="residual"))
    wanted = torch.stack([rule.acceptance(at) for rule in parts]).amax(0)
    assert torch.equal(AnyOf(rules=parts).acceptance(at), wanted)
    assert torch.equal(AnyOf(rules=parts).correct(at), Standard().correct(at))
    assert AnyOf(rules=parts).dominates_standard
    assert not AnyOf(rules=[Typical(), Typical(epsilon=0.2)]).dominates_standard


# Catches: a residual that belongs to no rule, rules told apart by their class instead of by what they draw from.
def test_any_of_refuses_rules_that_draw_from_different_laws():
    with pytest.raises(ValueError, match="Typical differs from Nucleus"):
        AnyOf(rules=[Nucleus(), Typical(replacement="target")])
    with pytest.raises(ValueError, match="Greedy differs from Standard"):
        AnyOf(rules=[Standard(), Greedy()])
    with pytest.raises(ValueError, match="at least two"):
        AnyOf(rules=[Standard()])


# Catches: a budget that is shared, forgotten or charged for another rule's acceptance.
def test_any_of_keeps_the_memory_of_each_rule_apart():
    spending, idle = Nucleus(theta=0.9, budget=0.5), Nucleus(theta=0.9, budget=0.0)
    p, q = random_laws(300, 3, 2), random_laws(300, 3, 3)
    alone = sequence_law(spending, p, q, 3, 2)
    for rules in ((spending, Standard(), idle), (idle, Standard(), spending)):
        rule = AnyOf(rules=rules)
        torch.testing.assert_close(sequence_law(rule, p, q, 3, 2), alone)
    assert rule.start((1,)) == (0.0, 0.0)


# Catches: the two sides swapped, the residual of the other side, a state that the drafted token itself changes.
def test_gated_is_one_rule_inside_and_another_outside():
    inside, outside = Nucleus(theta=0.9), Standard()
    rule = gate(inside, outside)
    for state, wanted in ((1.0, inside), (0.0, outside)):
        at = places(memory=torch.full((200, 1), state, dtype=torch.float64))
        assert torch.equal(rule.acceptance(at), wanted.acceptance(at))
        assert torch.equal(rule.correct(at), wanted.correct(at))
        assert torch.equal(rule.advance(at), at.memory)


# Catches: a state that follows drafted instead of kept tokens, a pending token that is not folded first, an end token
# that is decided outside.
@pytest.mark.parametrize(
    ("pending", "path", "relaxed"),
    [
        (2, [2, 2, 2], [False, False, False]),
        (0, [2, 2, 2], [True, True, True]),
        (2, [0, 2, 1, 2], [False, True, True, False]),
        (0, [1, 2, 0, 2], [True, False, False, True]),
    ],
)
def test_the_gate_follows_the_pending_token_and_then_the_kept_ones(pending, path, relaxed):
    rule = gate(Nucleus(theta=1.0), Standard())
    nodes = len(path)
    tokens = torch.tensor([path])
    p = torch.full((1, nodes + 1, 3), 1 / 3, dtype=torch.float64)
    q = torch.full((1, nodes, 3), 0.999, dtype=torch.float64)  # the standard rule keeps with probability 1/3
    draft = Draft(tokens, torch.tensor([nodes]), law=Dense(q))
    scores = Scores(torch.cat([torch.tensor([[pending]]), tokens], 1), p.log(), p, {}, torch.ones(1, dtype=torch.bool))
    memory = torch.zeros((1, 1), dtype=torch.float64)
    for strict in range(nodes):
        # The node is kept below 1/3 outside and always inside; those before it are kept anyhow.
        uniform = torch.full((1, nodes), 0.1)
        uniform[0, strict] = 0.9
        verdict = rule.verify(draft, scores, Fixed(uniform), memory)
        assert (verdict.lengths.item() > strict) == relaxed[strict]
        if verdict.lengths.item() == nodes:
            last = [token for token in (pending, *path) if token in (0, 1)][-1:]
            assert verdict.memory.item() == float(last == [0])


# Catches: a prompt whose span is open already, or closed again.
def test_a_gate_starts_as_the_prompt_leaves_it():
    rule = gate(Standard(), Standard())
    assert [rule.start(prompt) for prompt in ((2, 2), (0, 2), (0, 1, 2), (1, 0))] == [(0.0,), (1.0,), (0.0,), (1.0,)]


# Catches: lossless rules that become lossy by being put together.
def test_gated_lossless_rules_are_lossless():
    rule = gate(Standard(), Standard())
    assert rule.exactness == "lossless"
    p, q = random_model(V, 3, 0), random_model(V, 2, 1)
    stacked = [table.unsqueeze(0) for table in p]
    torch.testing.assert_close(output_law(rule, p, q, chain(2), 3), target_law(stacked, 3)[0], atol=1e-9, rtol=0)
    assert gate(Nucleus(), Standard()).exactness == "lossy"


# Catches: a marker that is several tokens, taken for its first one.
def test_a_marker_must_be_one_token():
    class Bytes:
        tokenizer = byte_tokenizer()

    rule = Gated(inside=Standard(), outside=Standard(), begin="a", end="b")
    rule.prepare(Bytes)
    assert rule.start(tuple(Bytes.tokenizer("xa")["input_ids"])) == (1.0,)
    with pytest.raises(CompatibilityError, match="'<think>' is 7 tokens of the target, wanted one"):
        Gated(inside=Standard(), outside=Standard()).prepare(Bytes)
    with pytest.raises(CompatibilityError, match="needs the target's tokenizer"):
        Gated(inside=Standard(), outside=Standard()).prepare(None)


# Catches: rules that can be composed in Python only, a resolved recipe that cannot be read again, a wrong option of an
# inner rule that is not named.
def test_rules_inside_rules_are_options_like_any_other():
    given = {"inside": {"use": "nucleus", "theta": 0.5}, "outside": "standard", "begin": 0, "end": 1}
    made, problems = build(Gated, given, "verifiers[0]", "gated")
    assert problems == []
    assert made.inside == Nucleus(theta=0.5)
    told = values(made)
    assert told["outside"] == {"use": "standard"}
    assert values(build(Gated, told, "verifiers[0]", "gated")[0]) == told
    made, problems = build(AnyOf, {"rules": ["standard", {"use": "nucleus", "thetta": 1}]}, "verifiers[0]", "any_of")
    assert problems == ["verifiers[0].rules: nucleus.thetta: unknown option of nucleus; did you mean 'theta'?"]
    made, problems = build(AnyOf, {"rules": [{"theta": 0.5}]}, "verifiers[0]", "any_of")
    assert problems == ["verifiers[0].rules: got {'theta': 0.5}, wanted a name, or a mapping with `use`"]


class Fixed:
    """The accept stream that was written for it."""

    def __init__(self, uniform):
        self.accept = uniform

    def uniform(self, stream, count):
        assert (stream, count) == ("accept", self.accept.shape[1])
        return self.accept
