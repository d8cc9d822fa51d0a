"""The two lossless rules for trees, by enumeration."""

import pytest
import torch

from specdec.compat import misfits
from specdec.testing import chain, output_law, random_model, token_law
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.verifiers.sample_match import SampleMatch
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.tree import Tree
from specdec_plugins.verifiers.tree_target import TreeTarget

SHAPES = [(-1, -1, -1), (-1, -1, 0, 1), (-1, 0, 0, -1, 3), (-1, -1, 0, 0, 1)]


def laws(seed, zeros=0):
    return random_model(3, 4, seed, zeros=zeros), random_model(3, 4, seed + 50, zeros=zeros)


# Catches: siblings tried against p instead of what is left of it, a residual of the parent's law, the first child's law
# taken for all.
@pytest.mark.parametrize("replace", [True, False], ids=["with_replacement", "without_replacement"])
@pytest.mark.parametrize("parents", SHAPES)
@pytest.mark.parametrize("rule", [Tree(), TreeTarget()], ids=["tree", "tree_target"])
def test_both_reproduce_the_target_over_sampled_siblings(rule, parents, replace):
    for seed in range(2):
        p, q = laws(seed, zeros=int(seed and replace))
        law = output_law(rule, p, q, parents, 3, replace=replace)
        torch.testing.assert_close(law, token_law(p, 3), atol=1e-9, rtol=0)


# Catches: a rule for chains under another name that has drifted from it.
def test_on_chains_they_are_the_rules_for_chains():
    p, q = laws(7)
    for ours, theirs in ((Tree(), Standard()), (TreeTarget(), SampleMatch())):
        torch.testing.assert_close(output_law(ours, p, q, chain(2), 3), output_law(theirs, p, q, chain(2), 3))


# Catches: point masses accepted as if they had been drawn from a law.
def test_tree_refuses_a_drafter_without_a_law():
    assert misfits(PromptLookup(), TreeTarget()) == []
    [problem] = misfits(PromptLookup(), Tree())
    assert "needs the law a token was drawn from" in problem
