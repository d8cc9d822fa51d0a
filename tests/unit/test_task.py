import pytest
from attrs import frozen

from specdec.errors import DataError
from specdec.task import Sample, Task, samples_of, scores_of

SAMPLE = Sample(id="a", text="?")


@frozen
class Given(Task):
    """A task whose scores are what the test says."""

    value: object = None

    def samples(self, file, limit):
        return [SAMPLE]

    def score(self, sample, completion):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


# Catches: a metric that is dropped, an int that is refused, no score taken for a failure.
@pytest.mark.parametrize(("value", "wanted"), [({"a": 1, "b": 0.25}, {"a": 1.0, "b": 0.25}), ({}, {})])
def test_scores_are_numbers_by_name(value, wanted):
    assert scores_of(Given(value), "mine", SAMPLE, "!") == wanted


# Catches: NaN or a percentage in the results, a traceback out of a stranger's scorer, a DataError that is wrapped.
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1.5}, r"task mine: score\(\) of sample 'a' gave \{'a': 1.5\}, wanted numbers from 0 to 1"),
        ({"a": float("nan")}, r"gave \{'a': nan\}"),
        (None, r"task mine: score\(\) of sample 'a' failed: AttributeError"),
        ({"a": "yes"}, r"failed: ValueError"),
        (KeyError("x"), r"failed: KeyError: 'x'; wanted numbers by name"),
        (DataError("data.file: missing"), r"^data\.file: missing$"),
    ],
)
def test_what_is_no_score_is_one_sentence(value, message):
    with pytest.raises(DataError, match=message):
        scores_of(Given(value), "mine", SAMPLE, "!")


# Catches: a group that is no text, or breaks a table, found out when the report of hours is made.
@pytest.mark.parametrize("group", [3, ["a"], "", "a\nb"])
def test_a_group_that_no_table_could_show_is_refused(group):
    @frozen
    class Grouped(Given):
        def samples(self, file, limit):
            return [Sample(id="a", text="?", group=group)]

    with pytest.raises(DataError, match=r"task mine: sample 'a' has the group .*, wanted a printable text or None"):
        samples_of(Grouped(), "mine", None, None)
