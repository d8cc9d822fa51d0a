"""Greedy decoding of a real pair, batch 1, against transformers' assisted generation: same process, alternating.

    python tests/benchmarks/assisted.py TARGET DRAFT --prompts prompts.jsonl --k 4

Both sides draft K tokens every step (constant schedule, no confidence threshold), share the loaded weights and decode
the same prompts one after the other, the order of the sides alternating. What counts is the ratio of tokens per second
inside this run, not the absolute numbers. In half precision the two may differ at near-ties of the logits; how many
outputs are equal is shown. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from specdec import Engine, Request, Sampling, Target
from specdec.loading import load
from specdec.metrics import bootstrap, pool
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.greedy import Greedy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a question or prompt field")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()

    target_model, tokenizer = load(options.target, dtype=options.dtype)
    draft_model, draft_tokenizer = load(options.draft, dtype=options.dtype)
    generation = draft_model.generation_config
    generation.num_assistant_tokens = options.k
    generation.num_assistant_tokens_schedule = "constant"
    generation.assistant_confidence_threshold = 0.0

    target = Target(target_model, tokenizer, kv=Slab(rows=1, tokens=1024))
    drafter = DraftModel(model=draft_model, tokenizer=draft_tokenizer, num_speculative_tokens=options.k)
    engine = Engine(target, drafter, Greedy(), Static())

    def ours(ids):
        sampling = Sampling(temperature=0, max_new_tokens=options.new_tokens)
        completion = engine.generate([Request(prompt=ids, sampling=sampling)])[0]
        counters.append(completion.counters)
        return list(completion.tokens)

    def theirs(ids):
        tensor = torch.tensor([ids])
        out = target_model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            assistant_model=draft_model,
            do_sample=False,
            max_new_tokens=options.new_tokens,
            pad_token_id=0,
            repetition_penalty=1.0,  # Qwen's generation configs set one, and greedy decoding would read it
        )
        return out[0, len(ids) :].tolist()

    counters = []
    rows = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()[: options.limit]]
    texts = [row.get("question") or row["prompt"] for row in rows]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    for side in (ours, theirs):  # warm up
        side(prompts[0][:32])
    counters.clear()

    results = []
    for index, ids in enumerate(prompts):
        sides = [("specdec", ours), ("transformers", theirs)]
        times, outputs = {}, {}
        for name, side in sides if index % 2 else reversed(sides):
            start = time.perf_counter()
            outputs[name] = side(ids)
            times[name] = time.perf_counter() - start
        result = {
            "prompt_tokens": len(ids),
            "tokens": {name: len(tokens) for name, tokens in outputs.items()},
            "seconds": times,
            "equal": outputs["specdec"] == outputs["transformers"],
        }
        result["ratio"] = (result["tokens"]["specdec"] / times["specdec"]) / (
            result["tokens"]["transformers"] / times["transformers"]
        )
        results.append(result)
        print(f"prompt {index}: ratio {result['ratio']:.3f}, {times}, equal {result['equal']}", flush=True)

    def ratio(group):
        rate = {
            name: sum(r["tokens"][name] for r in group) / sum(r["seconds"][name] for r in group)
            for name in ("specdec", "transformers")
        }
        return rate["specdec"] / rate["transformers"]

    print(
        json.dumps(
            {
                "ratio_of_totals": ratio(results),
                "interval": bootstrap(results, ratio),
                "median_ratio": statistics.median(r["ratio"] for r in results),
                "ratios": [r["ratio"] for r in results],
                "tokens_per_second": {
                    name: sum(r["tokens"][name] for r in results) / sum(r["seconds"][name] for r in results)
                    for name in ("specdec", "transformers")
                },
                "acceptance_length": pool(counters).acceptance_length,
                "equal_outputs": sum(r["equal"] for r in results),
                "prompts": len(results),
                "dtype": options.dtype,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
