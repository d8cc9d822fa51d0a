"""What it gives that a finished row's place is taken at once: the same requests, continuous and static, alternating.

    python tests/benchmarks/batching.py TARGET --draft DRAFT --prompts prompts.jsonl

Requests want 8 to 256 new tokens each, ends ignored. In float32 both schedulers must emit the same tokens. What counts
is the ratio of tokens a second inside this run. The last line of stdout is one JSON document.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from specdec import Engine, Request, Sampling, Target
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.standard import Standard

LEAST, MOST = 8, 256


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", help="a draft model; plain decoding when left out")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a question or prompt field")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="each prompt is cut to this many")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()

    cells = options.prompt_tokens + MOST + 1
    target = Target.load(options.target, dtype=options.dtype, kv=Slab(rows=options.rows, tokens=cells))
    drafter = (
        DraftModel(model=options.draft, dtype=options.dtype, num_speculative_tokens=options.k)
        if options.draft
        else NoDraft()
    )
    rows = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("question") or row["prompt"] for row in rows]
    chance = random.Random(0)
    requests = [
        Request(
            prompt=target.tokenizer(texts[index % len(texts)]).input_ids[: options.prompt_tokens],
            sampling=Sampling(
                temperature=options.temperature,
                max_new_tokens=chance.randint(LEAST, MOST),
                ignore_eos=True,
                seed=index,
            ),
            id=str(index),
        )
        for index in range(options.requests)
    ]
    engines = {kind.__name__.lower(): Engine(target, drafter, Standard(), kind()) for kind in (Continuous, Static)}

    def run(way):
        steps, start = engines[way].steps, time.perf_counter()
        done = engines[way].generate(requests)
        return time.perf_counter() - start, engines[way].steps - steps, [one.tokens for one in done]

    for engine in engines.values():
        engine.generate(requests[: options.rows])
    ratios, steps, equal = [], {}, []
    for number in range(options.rounds):
        order = list(engines) if number % 2 == 0 else list(engines)[::-1]
        found = {way: run(way) for way in order}
        ratios.append(found["static"][0] / found["continuous"][0])
        steps = {way: count for way, (_, count, _) in found.items()}
        pairs = zip(found["static"][2], found["continuous"][2], strict=True)
        equal.append(sum(left == right for left, right in pairs))
        print(number, f"{ratios[-1]:.3f}", steps, f"{equal[-1]} of {len(requests)} equal", flush=True)
    assert options.dtype not in ("float32", "float64") or set(equal) == {len(requests)}, "outputs differ"
    print(json.dumps({
        "tokens": sum(request.sampling.max_new_tokens for request in requests),
        "ratio": {"median": statistics.median(ratios), "from": min(ratios), "to": max(ratios)},
        "steps": steps, "equal_outputs": min(equal), "requests": len(requests), "dtype": options.dtype,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
