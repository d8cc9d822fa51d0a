"""The costs of steps for schedulers that decide by them, measured once for each drafter of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.costs import Costs
from specdec.engine import Engine
from specdec.stopwatch import measure
from specdec.types import Request

_log = logging.getLogger("specdec")


def price(engines: Iterable[tuple[str, Engine]], requests: Sequence[Request]) -> dict[str, Any]:
    """Tell each engine's scheduler what its steps cost, if it wants to know.

    Args:
        engines: each with the name of its drafter; engines with the same one share its costs.
        requests: whose prompts are decoded to time steps.

    Returns:
        The costs that schedulers decide by, as plain data, by drafter.

    Raises:
        RequestError: texts end before steps can be timed.
    """
    found: dict[str, Costs] = {}
    for name, engine in engines:
        if not engine.drafter.num_speculative_tokens:
            continue

        def timed(name: str = name, engine: Engine = engine) -> Costs:
            if name not in found:
                _log.info("%s: timing steps; results.json will say what they cost", name)
                found[name] = measure(engine.target, engine.drafter, engine.verifier, requests)
            return found[name]

        if (costs := engine.scheduler.price(name, timed)) is not None:
            found[name] = costs
    return {name: costs.to_dict() for name, costs in found.items()}
