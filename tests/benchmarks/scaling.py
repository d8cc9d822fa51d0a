"""How a step's cost grows: seconds against cached tokens, rows and draft length, one of them changed at a time.

    python tests/benchmarks/scaling.py TARGET DRAFT --figure growth.svg

Rows are put at a cached length without reading a prompt: their cells hold zeros, which cost what other numbers cost.
The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from specdec import Engine, Request, Sampling, Target
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard

LENGTHS, ROWS, WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16), (0, 1, 2, 3, 4, 5, 7, 11, 15)
AT = {"cached": 512, "rows": 1, "k": 4}
PARTS = ("draft", "verify", "rest")


class Fixed(Continuous):
    """Every row drafts what is asked, as `Continuous` would, but no more than `width`."""

    width = 0

    def budget(self, row, most):
        return min(super().budget(row, most), self.width)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most-cached", type=int, default=max(LENGTHS))
    parser.add_argument("--figure", type=Path, help="an SVG file")
    options = parser.parse_args()

    room = options.most_cached + (options.steps + 2) * (max(WIDTHS) + 1) + 1
    target = Target.load(options.target, dtype=options.dtype, kv=Slab(rows=max(ROWS), tokens=room))
    drafter = DraftModel(model=options.draft, dtype=options.dtype, num_speculative_tokens=max(WIDTHS))
    scheduler = Fixed()
    engine = Engine(target, drafter, Standard(), scheduler)
    count = 0

    def seconds(cached, rows, k):
        """Medians of draft, verification and rest."""
        nonlocal count
        scheduler.width = k
        names = set()
        for _ in range(rows):
            count += 1
            prompt = [7 + (count + place) % 200 for place in range(cached + 1)]
            sampling = Sampling(max_new_tokens=room - cached - 1, ignore_eos=True, seed=count)
            names.add(engine.submit(Request(prompt=prompt, sampling=sampling)))
            row = scheduler.waiting.pop()
            row.slot, row.cached = target.kv.acquire(), cached
            for kv in (target.kv, drafter._draft.kv):
                kv.occupy(row.slot)
                kv.lengths[row.slot] = cached
            scheduler.running.append(row)
        found = []
        for _ in range(options.steps + 2):
            before = list(engine.seconds)
            engine.step()
            found.append([after - earlier for after, earlier in zip(engine.seconds, before, strict=True)])
        slots = tuple(row.slot for row in scheduler.drop(names))
        target.kv.release(slots)
        drafter.release(slots)
        return [statistics.median(part) for part in zip(*found[2:], strict=True)]

    axes = {
        "cached": [length for length in LENGTHS if length <= options.most_cached],
        "rows": list(ROWS),
        "k": list(WIDTHS),
    }
    table = {}
    for name, values in axes.items():
        table[name] = {}
        for value in values:
            began = time.perf_counter()
            table[name][value] = seconds(**{**AT, name: value})
            parts = "  ".join(f"{part} {1000 * one:7.1f}" for part, one in zip(PARTS, table[name][value], strict=True))
            print(f"{name:6} {value:5}  {parts}  ms   ({time.perf_counter() - began:.0f} s)", flush=True)
    if options.figure:
        draw(table, options.figure)
    print(json.dumps({"at": AT, "parts": PARTS, "seconds": table}))


def draw(table, file):
    """Three panels, one for each thing that grows."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    titles = {"cached": "cached tokens", "rows": "rows", "k": "num_speculative_tokens"}
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for panel, (name, cells) in zip(panels, table.items(), strict=True):
        places = list(cells)
        for index, part in enumerate(PARTS):
            panel.plot(places, [1000 * cell[index] for cell in cells.values()], marker="o", label=part)
        panel.set_xlabel(titles[name])
        panel.set_ylim(bottom=0)
        if name == "cached":
            panel.set_xscale("log", base=2)
    panels[0].set_ylabel("ms a step")
    panels[0].legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
