"""What the fault tests are made of: a text whose next token is known, drafters by name, and wrappers that watch.

`CountUp` makes every model count: after token t comes t + 1. So every output is known beforehand, no token comes twice
in it, any of them can be declared to be an end, and every drafter that follows the request's processors, or copies from
the prompt, drafts only right tokens.
"""

import copy
import math

import torch
from attrs import fields
from transformers import LogitsProcessor

from specdec import Engine, Request, Sampling, Target, registry
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard
from tests.block_checkpoints import networks
from tests.families import tiny
from tests.scripted import Scripted

V = 80
FIRST, LAST = 10, 39
# The numbers once through, so that a look-up finds them, then the one before the first.
COUNTING = (FIRST - 1, *range(FIRST, LAST + 1), FIRST - 1)
NUMBERS = tuple(range(FIRST, LAST + 1))

# What registered drafters draft with that cannot do without; all other options have defaults that make sense.
MODELS = {
    "model": lambda family, **options: tiny(family, seed=1, **options),
    "dspark": lambda family, **options: networks("dspark", family, **options),
    "dflash": lambda family, **options: networks("z-lab", family, **options),
}


class CountUp(LogitsProcessor):
    """After token t comes t + 1."""

    def __call__(self, input_ids, scores):
        only = torch.full_like(scores, -math.inf)
        following = (input_ids[:, -1:] + 1) % scores.shape[1]
        return only.scatter(1, following, 0.0)


def registered(*, drafting=False):
    """Names of all registered drafters, those that never draft left out on demand."""
    names = registry.names("drafters")
    return [name for name in names if not (drafting and build(name).num_speculative_tokens == 0)]


def build(name, k=4, family="llama", **options):
    """A registered drafter of draft length `k`, with whatever model it needs."""
    kind = registry.load("drafters", name)
    known = {field.name for field in fields(kind)}
    given = {"num_speculative_tokens": k} if "num_speculative_tokens" in known else {}
    given |= {"model": MODELS[name](family, **options)} if name in MODELS else {}
    return kind(**given)


def engine(
    drafter=None, family="llama", *, model=None, rows=4, tokens=96, verifier=None, scheduler=None, tokenizer=None,
    eos=None, **options,
):  # fmt: skip
    """An engine over a tiny model; `eos` replaces the target's end-of-sequence ids."""
    target = Target(model or tiny(family), tokenizer, kv=Slab(rows=rows, tokens=tokens))
    target.preflighted = True  # the preflight has tests of its own, and these are many engines
    if eos is not None:
        target.eos_ids = frozenset(eos)
    return Engine(target, drafter or NoDraft(), verifier or Standard(), scheduler or Continuous(), **options)


def ask(prompt=COUNTING, new=12, temperature=0, processors=None, name="", **options):
    """A request; one that counts up unless it has a prompt of its own."""
    if processors is None:
        processors = (CountUp(),) if prompt is COUNTING else ()
    sampling = Sampling(temperature=temperature, max_new_tokens=new, **options)
    return Request(prompt=prompt, sampling=sampling, processors=processors, id=name)


def serve(drafter=None, request=None, **options):
    """One request, alone."""
    return engine(drafter, **options).generate([request or ask()])[0]


def counting(k, wrong_at=None, num_speculative_tokens=None):
    """A drafter that drafts k numbers, wrong at one place of every block."""

    def script(tokens, budget):
        block = [(tokens[-1] + 1 + i) % V for i in range(min(budget, k))]
        if wrong_at is not None and wrong_at < len(block):
            block[wrong_at] = (block[wrong_at] + 2) % V
        return block

    return Scripted(script=script, num_speculative_tokens=num_speculative_tokens or k)


def in_turn(script, widths):
    """A script cut to each of some widths in turn, call by call."""
    calls = iter(range(10**6))

    def cut(tokens, budget):
        return script(tokens, budget)[: widths[next(calls) % len(widths)]]

    return cut


class Watched:
    """A drafter that remembers what it was asked and answered; `change` may alter the answer first."""

    def __init__(self, inner, change=lambda draft, batch: draft):
        self.inner, self.change = inner, change
        self.asked, self.drafts = [], []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, batch):
        draft = self.change(self.inner.propose(batch), batch)
        self.asked.append(batch)
        self.drafts.append(draft)
        return draft


class Forwards:
    """What a model's layers are fed while the block lasts: ids, positions and mask of each forward."""

    def __init__(self, model):
        self.model, self.inputs = model.base_model, []

    def __enter__(self):
        def before(module, arguments, options):
            ids = options["input_ids"] if "input_ids" in options else arguments[0]
            self.inputs.append({"ids": ids, "positions": options["position_ids"], "mask": options["attention_mask"]})

        self.handle = self.model.register_forward_pre_hook(before, with_kwargs=True)
        return self

    def __exit__(self, *_):
        self.handle.remove()


def own(family="llama", **options):
    """A copy of a tiny model, to be changed."""
    return copy.deepcopy(tiny(family, **options))


def facts(completion):
    return completion.tokens, completion.finish_reason, completion.counters


def generate(model, prompt, new, **options):
    """What transformers' own greedy generate gives."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0, **options
    )
    return tuple(out[0, len(prompt) :].tolist())
