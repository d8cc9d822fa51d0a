"""Whether what a block drafter learns is what it is asked for later: shown on a grammar, not on random weights."""

import pytest
from grammar import BLOCK, right, trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("pool"), steps=200)
    while made.step < made.options.steps:
        made.advance()
    return made


# Catches: a mask that hides the last feature or shows the anchor's own, rows that predict their own place, a Markov
# head told the token it predicts.
def test_a_drafter_that_learnt_a_grammar_is_right_at_every_place(trained):
    assert min(right(trained)) > 0.9


# Catches: a test above that any features, positions or targets would pass.
@pytest.mark.parametrize("fault", [{"late": True}, {"moved": 1}, {"moved": -1}, {"ahead": 1}], ids=str)
def test_what_is_one_off_is_seen_at_every_place(trained, fault):
    healthy, faulty = right(trained), right(trained, **fault)
    assert [place for place in range(BLOCK) if faulty[place] > healthy[place] - 0.3] == []


# Catches: a grammar in which the token before says what follows, so that features would not matter.
def test_without_features_it_knows_nothing(trained):
    assert max(right(trained, zeroed=True)) < 0.3
