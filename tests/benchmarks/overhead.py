"""What a step costs beside the forwards of its two models.

    python tests/benchmarks/overhead.py TARGET DRAFT --k 4 --rows 1,8 --temperature 0,1

Hooks take the time of each model's forward in a step; everything else is the step without them: masks and positions,
laws and draws, the rule, what is committed and what is told. Steps that cache prompts are left out. A figure is the
median over the steps of one setting. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from contextlib import closing

import torch

from specdec import Engine, Request, Sampling, Target
from specdec.registry import load
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous


class Clock:
    """Seconds inside a model's forwards."""

    def __init__(self, model, device):
        self.seconds, self._device = 0.0, device
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self._end())

    def now(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _begin(self):
        self._start = self.now()

    def _end(self):
        self.seconds += self.now() - self._start


def numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rows", type=numbers(int), default=[1, 8])
    parser.add_argument("--temperature", type=numbers(float), default=[0.0, 1.0])
    parser.add_argument("--verifier", default="nucleus")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="decode steps of each setting, the first two apart")
    options = parser.parse_args()

    target = Target.load(options.target, dtype=options.dtype, kv=Slab(rows=max(options.rows), tokens=512))
    loaded = Target.load(options.draft, dtype=options.dtype, kv=target.kv.fork())
    drafter = DraftModel(model=loaded.model, tokenizer=loaded.tokenizer, num_speculative_tokens=options.k)
    engine = Engine(target, drafter, load("verifiers", options.verifier)(), Continuous())
    clocks = {"target": Clock(target.model, target.device), "draft": Clock(loaded.model, target.device)}
    texts = torch.randint(
        0, target.vocabulary, (max(options.rows), options.prompt_tokens), generator=torch.manual_seed(0)
    )

    def measured(rows, temperature):
        requests = [
            Request(
                prompt=texts[index].tolist(),
                sampling=Sampling(temperature=temperature, max_new_tokens=400, ignore_eos=True, seed=index),
            )
            for index in range(rows)
        ]
        taken, whole = [], engine.step

        def step():
            for clock in clocks.values():
                clock.seconds = 0.0
            before, start = engine.steps, clocks["target"].now()
            events = whole()
            seconds = clocks["target"].now() - start
            if engine.steps > before:
                spent = {name: clock.seconds for name, clock in clocks.items()}
                taken.append({"step": seconds, **spent, "rest": seconds - sum(spent.values())})
            return events

        engine.step = step
        with closing(engine.stream(requests)) as stream:
            while len(taken) < options.steps:
                next(stream)
        del engine.step
        middle = {name: statistics.median(one[name] for one in taken[2:]) for name in taken[0]}
        return {name: round(1000 * value, 3) for name, value in middle.items()} | {
            "share": round(statistics.median(one["rest"] / one["step"] for one in taken[2:]), 5)
        }

    found = []
    for rows in options.rows:
        for temperature in options.temperature:
            found.append({"rows": rows, "temperature": temperature, **measured(rows, temperature)})
            print(found[-1], flush=True)
    print(json.dumps({"k": options.k, "verifier": options.verifier, "milliseconds": found}))


if __name__ == "__main__":
    main()
