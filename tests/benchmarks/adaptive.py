"""What a draft length that adapts gains and loses against plain decoding: the same prompts, alternating.

    python tests/benchmarks/adaptive.py TARGET DRAFT --prompts prompts.jsonl --rows 1,4,8

Greedy decoding of one chunk of prompts after another, each in every way: `plain` twice, `real` with the draft model,
`never` with the same draft model whose tokens are shifted by one, so that it costs as much and hardly ever agrees, and
`perfect`, which recites what it said itself in a run before that, at the cost of a look-up. Each way keeps its
scheduler from chunk to chunk, as a server would. What counts is the ratio of seconds of `plain` to those of a way,
inside this run: at least 0.95 for `never`. In half precision outputs may differ at near-ties; how many are equal is
shown. Steps are timed first, which takes minutes, unless `--costs` names a file with what an earlier run printed.
The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from attrs import define, evolve, field

from specdec import Engine, Request, Sampling, Target
from specdec.costs import Costs
from specdec.drafter import Drafter
from specdec.loading import load
from specdec.metrics import pool
from specdec.stopwatch import measure
from specdec.types import Draft
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.adaptive import Adaptive
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.greedy import Greedy


@define(eq=False)
class Shifted(Drafter):
    """Another drafter's tokens, each shifted by one: as dear, and wrong."""

    inner: Drafter
    vocabulary: int = 0
    catches_up = True

    @property
    def num_speculative_tokens(self):
        return self.inner.num_speculative_tokens

    def bind(self, target):
        self.inner.bind(target)
        self.vocabulary = target.vocabulary

    def propose(self, batch):
        draft = self.inner.propose(batch)
        return evolve(draft, tokens=(draft.tokens + 1) % self.vocabulary)

    def observe(self, batch, kept):
        self.inner.observe(batch, kept)

    def release(self, slots):
        self.inner.release(slots)


@define(eq=False)
class Recited(Drafter):
    """What is known to follow each prompt."""

    num_speculative_tokens: int
    known: dict = field(factory=dict)
    deterministic = True

    def bind(self, target):
        pass

    def propose(self, batch):
        found = []
        for row, most in zip(batch.rows, batch.budget, strict=True):
            text = self.known.get(row.request.prompt, ())
            found.append(list(text[row.emitted : row.emitted + most]))
        width = max(map(len, found))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.int64)
        return Draft(tokens.reshape(len(found), width), torch.tensor([len(row) for row in found]))

    def observe(self, batch, kept):
        pass

    def release(self, slots):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a question or prompt field")
    parser.add_argument("--rows", default="1,4,8", help="batch sizes, with commas")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of as many prompts as there are rows")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="longer prompts are cut")
    parser.add_argument("--costs", type=Path, help="JSON: a table of costs for all batch sizes")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()

    target_model, tokenizer = load(options.target, dtype=options.dtype)
    draft_model, _ = load(options.draft, dtype=options.dtype)
    lines = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer(line.get("question") or line["prompt"]).input_ids[: options.prompt_tokens] for line in lines]
    found = {rows: bench(rows, target_model, draft_model, tokenizer, texts, options) for rows in sizes(options.rows)}
    print(json.dumps({"rows": found, "k": options.k, "dtype": options.dtype, "threads": torch.get_num_threads()}))


def sizes(text):
    return [int(part) for part in text.split(",")]


def bench(rows, target_model, draft_model, tokenizer, texts, options):
    room = options.prompt_tokens + options.new_tokens
    target = Target(target_model, tokenizer, kv=Slab(rows=rows, tokens=room))
    sampling = Sampling(temperature=0, max_new_tokens=options.new_tokens, ignore_eos=True)

    def requests(number):
        chunk = [texts[(number * rows + index) % len(texts)] for index in range(rows)]
        return [Request(prompt=ids, sampling=sampling) for ids in chunk]

    drafter = DraftModel(model=draft_model, num_speculative_tokens=options.k)
    recited = Recited(options.k)
    start = time.perf_counter()
    if options.costs is None:
        costs = measure(target, drafter, Greedy(), requests(0))
    else:
        costs = Costs.read(json.loads(options.costs.read_text(encoding="utf-8")))
    print(f"rows {rows}: steps timed in {time.perf_counter() - start:.0f} s: {json.dumps(costs.to_dict())}", flush=True)
    looked_up = evolve(costs, draft={}, catch_up=0.0)  # and the same verifications
    engines = {
        "plain": Engine(target, NoDraft(), Greedy(), Continuous()),
        "real": Engine(target, drafter, Greedy(), Adaptive(costs=costs)),
        "never": Engine(target, Shifted(drafter), Greedy(), Adaptive(costs=costs)),
        "perfect": Engine(target, recited, Greedy(), Adaptive(costs=looked_up)),
        "plain again": Engine(target, NoDraft(), Greedy(), Continuous()),
    }

    def run(way, number):
        start = time.perf_counter()
        done = engines[way].generate(requests(number))
        return time.perf_counter() - start, done

    def learn(way, number):
        for request, done in zip(requests(number), run(way, number)[1], strict=True):
            recited.known[request.prompt] = done.tokens

    # In half precision, wider forwards may settle a near-tie otherwise than plain ones do.
    for number in range(options.chunks):
        learn("plain", number)
        learn("perfect", number)
    engines["perfect"].scheduler = Adaptive(costs=looked_up)
    ratios, equal, counters = {way: [] for way in engines}, dict.fromkeys(engines, 0), {way: [] for way in engines}
    for number in range(options.chunks):
        order = list(engines) if number % 2 == 0 else list(engines)[::-1]
        seconds, outputs = {}, {}
        for way in order:
            seconds[way], outputs[way] = run(way, number)
            counters[way] += [done.counters for done in outputs[way]]
        base = (seconds["plain"] + seconds["plain again"]) / 2
        for way in engines:
            ratios[way].append(base / seconds[way])
            pairs = zip(outputs[way], outputs["plain"], strict=True)
            equal[way] += sum(one.tokens == other.tokens for one, other in pairs)
        told = ", ".join(f"{way} {values[-1]:.3f}" for way, values in ratios.items())
        print(f"rows {rows}, chunk {number}: plain {base:.1f} s; speed against it: {told}", flush=True)
    total = {way: pool(counts) for way, counts in counters.items()}
    return {
        way: {
            "median": statistics.median(values),
            "from": min(values),
            "to": max(values),
            "of_totals": len(values) / sum(1 / value for value in values),
            "acceptance_length": total[way].acceptance_length,
            "drafted": total[way].num_draft_tokens,
            "emitted": total[way].num_emitted_tokens,
            "equal": equal[way],
        }
        for way, values in ratios.items()
    }


if __name__ == "__main__":
    main()
