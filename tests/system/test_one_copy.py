"""A decode step waits for its device once, in `settle`; what no rule asks for is not sorted, and not made twice."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import Engine, Request, Sampling, Target, settle
from specdec.law import Dense
from specdec.noise import Noise
from specdec.registry import load, names
from specdec.types import Draft, Scores
from specdec_plugins.drafters.layer_skip import LayerSkip
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.top_k_or import TopKOr
from tests.families import prompts, tiny

# Their results, or the shapes of these, depend on values: on an accelerator the host waits for them.
WAITING = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique", "_unique2",
           "unique_dim", "unique_consecutive", "unique_dim_consecutive"}  # fmt: skip
# Who may, by module and function, and why. The innermost function of the project counts.
EXCEPTIONS = {
    ("specdec.settle", "settle"): "the one copy of a step",
    ("specdec.processing", "processed"): "processors that look at the text are given the path to each node of a tree",
    ("specdec.probability", "nucleus"): "looks at laws on the host only; elsewhere it sorts without asking",
}


class Watched(TorchDispatchMode):
    """Fails where anybody but the exceptions waits for a device; counts operations, and elements they make."""

    def __init__(self, wide=None):
        super().__init__()
        self.seen, self.wide, self.made = {}, wide, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        truths = name.startswith(("index", "_index", "_unsafe_index")) and len(args) > 1 and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if isinstance(args[1], list | tuple) else [args[1]])
        )  # fmt: skip
        if name in WAITING or truths:
            waits(f"aten.{name}")
        self.seen[name] = self.seen.get(name, 0) + 1
        out = function(*args, **(kwargs or {}))
        if self.wide and not any(returned.alias_info for returned in function._schema.returns):
            self.made += sum(o.numel() for o in (out if isinstance(out, tuple) else [out]) if o.numel() >= self.wide)
        return out


def waits(what):
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("specdec.", "specdec_plugins.")):
            break
        frame = frame.f_back
    where = (module, frame.f_code.co_name) if frame else ("", "")
    assert where in EXCEPTIONS, f"{what} in {':'.join(where)}"


@contextmanager
def watched(**options):
    """Everything inside is looked at; yields the mode and how often `tolist` was called."""
    calls = SimpleNamespace(tolist=0)
    with pytest.MonkeyPatch.context() as patch, Watched(**options) as mode:
        for name in ("tolist", "numpy", "cpu", "item", "__array__"):
            original = getattr(Tensor, name)

            def asked(self, *args, _name=name, _original=original, **kwargs):
                waits(f"Tensor.{_name}")
                calls.tolist += _name == "tolist"
                return _original(self, *args, **kwargs)

            patch.setattr(Tensor, name, asked)
        to = Tensor.to

        def moved(self, *args, **kwargs):
            goal = [
                torch.device(goal) for goal in (*args, kwargs.get("device")) if isinstance(goal, str | torch.device)
            ]
            if any(one.type != self.device.type for one in goal):
                waits("Tensor.to")
            return to(self, *args, **kwargs)

        patch.setattr(Tensor, "to", moved)
        yield mode, calls


DRAFTERS = {
    "chain": lambda: DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=3),
    "tree": lambda: DraftModel(model=tiny("llama", seed=1), branches=[2, 2]),
    "equal siblings": lambda: DraftModel(model=tiny("llama", seed=1), branches=[2, 1], siblings="with_replacement"),
    "prompt_lookup": lambda: PromptLookup(num_speculative_tokens=3),
    "layer_skip": lambda: LayerSkip(num_speculative_tokens=3, skip=[1]),
    "none": NoDraft,
}
OPTIONS = {
    "any_of": {"rules": (Standard(), TopKOr(k=3))},
    "gated": {"inside": Nucleus(), "outside": Standard(), "begin": 3, "end": 5},
    "judge": {"weights": "head.safetensors"},
    "synthetic": {"acceptance_length": 2.5},
}
RULES = {
    **{name: lambda name=name: load("verifiers", name)(**OPTIONS.get(name, {})) for name in names("verifiers")},
    "nucleus, budget": lambda: Nucleus(budget=0.5),
    "nucleus, max_deviation": lambda: Nucleus(max_deviation=0.2),
    "nucleus, all children": lambda: Nucleus(children="all"),
}
# Every rule on chains, and on trees if it walks them; two on what is drafted in other ways.
CASES = [(rule, drafter) for rule in RULES for drafter in ("chain", *["tree"] * RULES[rule]().trees)]
CASES += [(rule, drafter) for rule in ("standard", "nucleus") for drafter in list(DRAFTERS)[2:]]


def requests(plain=False):
    """Ragged, of different lengths so that rows in the middle end first, greedy beside sampled."""
    ways = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
            {"temperature": 1.0, "repetition_penalty": 1.2, "min_new_tokens": 2}]  # fmt: skip
    return [
        Request(
            prompt=prompt, sampling=Sampling(**({} if plain else way), max_new_tokens=new, ignore_eos=True, seed=new)
        )
        for prompt, way, new in zip(prompts(), ways, (6, 2, 4, 8), strict=True)
    ]


def engine_for(rule, drafter):
    target = Target(tiny("llama"), kv=Slab(rows=4, tokens=64))
    return Engine(target, DRAFTERS[drafter](), rule, Continuous(prefill_chunk=8))


# Catches: a rule or a drafter that asks for a number (`.item()`, `if tensor:`), for the places where something holds
# (`x[mask]`, `nonzero`), or copies to the host; a second copy beside the one of `settle`.
@pytest.mark.parametrize(("rule", "drafter"), CASES)
def test_a_decode_step_copies_to_the_host_once(rule, drafter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.ones(1, 32), "bias": torch.zeros(1)}, "head.safetensors")
    engine = engine_for(RULES[rule](), drafter)
    asked = requests()
    with watched() as (mode, calls):
        done = engine.generate(asked)
    assert [len(one.tokens) for one in done] == [6, 2, 4, 8]
    assert mode.seen["index_select"] or engine.target.kv.gathers  # rows with a hole between them were read
    trees = calls.tolist - engine.steps
    assert trees == 0 or drafter in ("tree", "equal siblings")


# Catches: a test like the one above that sees nothing.
@pytest.mark.parametrize(
    "ask", [lambda x: x.item(), lambda x: bool(x > 0), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.unique(),
            lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.numpy(), lambda x: torch.equal(x, x)],
)  # fmt: skip
def test_a_rule_that_asks_is_found(ask, monkeypatch):
    accept = Standard.accept_at

    def planted(self, at):
        ask(at.p[0, 0, :1])
        return accept(self, at)

    monkeypatch.setattr(Standard, "accept_at", planted)
    engine = engine_for(Standard(), "chain")
    asked = requests()
    with pytest.raises(AssertionError, match=r"specdec\.verifier:_at_token"), watched():
        engine.generate(asked)


# Catches: a copy for each row, or for each number that is wanted, inside `settle`.
def test_settle_itself_copies_once():
    engine = engine_for(Standard(), "chain")
    asked = requests(plain=True)
    with watched() as (mode, calls):
        engine.generate(asked)
    assert calls.tolist == engine.steps > 3
    assert not mode.seen.keys() & WAITING
    assert settle.__name__ == "specdec.settle"


# Catches: a nucleus found by sorting, top-k values that nobody asked for.
@pytest.mark.parametrize("rule", [Standard(), Nucleus()])
def test_nothing_is_sorted(rule):
    engine = engine_for(rule, "chain")
    asked = requests(plain=True)
    with watched() as (mode, _):
        engine.generate(asked)
    assert not mode.seen.keys() & {"sort", "topk", "argsort", "msort", "kthvalue"}


WIDE, NODES, ROWS = 4096, 7, 3


def judged(rule):
    """Elements that operations of the rule make in results of at least V, in rows of V for each row of the batch."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn((ROWS, 1 + NODES, WIDE), generator=generator).softmax(-1)
    law = torch.randn((ROWS, NODES, WIDE), generator=generator).softmax(-1)
    tokens = torch.randint(0, WIDE, (ROWS, NODES), generator=generator)
    scores = Scores(torch.cat([tokens[:, :1], tokens], 1), probs.log(), probs, {}, torch.ones(ROWS, dtype=torch.bool))
    draft = Draft(tokens, torch.full((ROWS,), NODES), law=Dense(law))
    with Watched(wide=WIDE) as mode:
        rule.verify(draft, scores, Noise((1, 2, 3), (0, 0, 0)), None)
    return mode.made / WIDE / ROWS


# Catches: a residual, or the law of the next token, for every node instead of the one where the path ends.
def test_only_the_row_that_is_needed_gets_a_residual():
    assert judged(Standard()) <= 9  # p, q, raw logits, the zero measure, difference, its positive part, law
    # Beside those, few passes over [B, N, V]: what is greater, how much of it, in float64.
    assert judged(Nucleus()) - judged(Standard()) <= 3 * NODES
