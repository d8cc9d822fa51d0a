"""The preflight has tests of its own; here it looks once at each model, not once for each engine over it."""

from weakref import WeakKeyDictionary

import pytest

import specdec.engine
import specdec_plugins.drafters.model
from specdec.preflight import preflight

passed = WeakKeyDictionary()


def once(target):
    kind = type(target.kv), target.kv.rows > 1
    target.preflighted = target.preflighted or kind in passed.get(target.model, ())
    preflight(target)
    if target.preflighted:
        passed.setdefault(target.model, set()).add(kind)


@pytest.fixture(autouse=True)
def known_models_pass(monkeypatch):
    monkeypatch.setattr(specdec.engine, "preflight", once)
    monkeypatch.setattr(specdec_plugins.drafters.model, "preflight", once)
