"""Whether what a block drafter learns is what it is asked for later: shown on a grammar, not on random weights."""

import pytest

from tests.grammar import BLOCK, kept, trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made, config = trainer(tmp_path_factory.mktemp("pool"), steps=250)
    while made.step < made.options.steps:
        made.advance()
    return made, config


@pytest.fixture(scope="module")
def healthy(trained):
    return kept(*trained)


# Catches: training in which a block sees its anchor's own features or not the last ones before it, rows that learn
# their own place, a Markov head told the token it predicts: none of it shows in the loss.
def test_a_drafter_that_learnt_a_grammar_is_kept_at_every_place(healthy):
    assert len(healthy) == BLOCK
    assert min(healthy) > 0.9


# Catches: a grammar on which features, positions or places that are one off would not show.
@pytest.mark.parametrize("fault", [{"late": True}, {"moved": 1}, {"moved": -1}, {"ahead": 1}], ids=str)
def test_what_is_one_off_shows_at_every_place(trained, healthy, fault):
    faulty = kept(*trained, **fault)
    assert [place for place in range(BLOCK) if faulty[place] > healthy[place] - 0.3] == []


# Catches: a grammar in which the token before says what follows, so that features would not matter.
def test_without_features_nothing_is_known(trained):
    assert max(kept(*trained, zeroed=True)) < 0.3
