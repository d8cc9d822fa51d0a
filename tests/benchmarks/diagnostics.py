"""What diagnostics and log-probabilities add to a step: the same requests without them and with them, alternating.

    python tests/benchmarks/diagnostics.py TARGET DRAFT --prompts prompts.jsonl --k 7 --rows 1

Time is taken around whole runs, not from `Engine.seconds`, which leaves diagnostics out. All ways emit the same tokens.
What counts is the ratio of seconds to those of `off`, inside this run. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from specdec import Engine, Request, Sampling, Target
from specdec.registry import load
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous

WAYS = {
    "off": {},
    "off again": {},
    "diagnostics": {"diagnostics": True},
    "logprobs": {"logprobs": True},
    "both": {"diagnostics": True, "logprobs": True},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a question or prompt field")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--verifier", default="nucleus")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()

    target = Target.load(options.target, dtype=options.dtype, kv=Slab(rows=options.rows, tokens=512))
    drafter = DraftModel(model=options.draft, dtype=options.dtype, num_speculative_tokens=options.k)
    rule = load("verifiers", options.verifier)
    engines = {way: Engine(target, drafter, rule(), Continuous(), **asked) for way, asked in WAYS.items()}
    rows = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("question") or row["prompt"] for row in rows]

    def run(way, number):
        first = number * options.rows
        requests = [
            Request(
                prompt=target.tokenizer(texts[(first + index) % len(texts)]).input_ids,
                sampling=Sampling(max_new_tokens=options.new_tokens, ignore_eos=True, seed=first + index),
            )
            for index in range(options.rows)
        ]
        steps, start = engines[way].steps, time.perf_counter()
        tokens = [done.tokens for done in engines[way].generate(requests)]
        return (time.perf_counter() - start), engines[way].steps - steps, tokens

    for way in WAYS:
        run(way, 0)
    ratios = {way: [] for way in WAYS}
    steps = []
    for number in range(options.rounds):
        order = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
        found = {way: run(way, number) for way in order}
        assert len({str(tokens) for _, _, tokens in found.values()}) == 1, "the ways emitted different tokens"
        base = (found["off"][0] + found["off again"][0]) / 2
        steps.append(base / found["off"][1])
        for way, (seconds, _, _) in found.items():
            ratios[way].append(seconds / base)
        print(number, {way: round(values[-1], 4) for way, values in ratios.items()}, flush=True)
    print(json.dumps({
        "seconds_per_step": statistics.fmean(steps),
        "ratios": {way: {"median": statistics.median(values), "mean": statistics.fmean(values),
                         "from": min(values), "to": max(values)} for way, values in ratios.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
