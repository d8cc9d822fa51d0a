"""What only a GPU can say: `python tests/gpu/check.py [--target NAME --draft NAME]`, a few minutes.

Greedy outputs of transformers, of the engine, and of the engine in fixed shapes are equal in float32; a decode step
copies once from the device to the host; graphs are replayed. Then speed, as ratios inside this run, and memory. Every
finding is a line, the last line is JSON, and the exit code is 1 where a check failed.

With `--device cpu` everything but the copies and the memory is looked at, with torch.compile in place of CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial

import torch

from specdec import Engine, Request, Sampling, Target, graphs
from specdec.loading import load, torch_dtype
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard

_LENGTHS = (33, 5, 1, 60, 18, 9)  # of the prompts, more than there are rows
_TIE = 1e-3  # two logits nearer than this are no difference between kernels worth a failure


class Check:
    """The models, and what was found about them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.kind = "compile" if asked.device == "cpu" else "cuda"
        place = {"device": asked.device, "dtype": "float32", "attn_implementation": "sdpa"}
        self.model, self.draft = load(asked.target, **place)[0], load(asked.draft, **place)[0]
        generator = torch.Generator().manual_seed(0)
        most = min(one.config.get_text_config(decoder=True).vocab_size for one in (self.model, self.draft))
        self.prompts = [tuple(torch.randint(0, most, (n,), generator=generator).tolist()) for n in _LENGTHS]
        self.found: dict[str, object] = {}
        self.failed: list[str] = []

    def say(self, name: str, passed: bool | None, text: str, **numbers: object) -> None:
        print(f"{ {True: 'ok', False: 'FAILED', None: '-'}[passed]:7}{name}: {text}", flush=True)
        self.found[name] = {"passed": passed, **numbers}
        if passed is False:
            self.failed.append(name)

    def engine(self, kind: str, k: int, rows: int) -> Engine:
        kv = Slab(rows=rows, tokens=max(_LENGTHS) + self.asked.new)
        drafter = DraftModel(model=self.draft, num_speculative_tokens=k) if k else NoDraft()
        scheduler = Continuous(prefill_chunk=16)
        return Engine(Target(self.model, kv=kv, graphs=kind), drafter, Standard(), scheduler)

    def requests(self, count: int = len(_LENGTHS)) -> list[Request]:
        sampling = Sampling(temperature=0, max_new_tokens=self.asked.new, ignore_eos=True)
        return [Request(prompt=prompt, sampling=sampling) for prompt in self.prompts[:count]]

    def serve(self, engine: Engine, count: int = len(_LENGTHS)) -> list[tuple[int, ...]]:
        return [completion.tokens for completion in engine.generate(self.requests(count))]

    def plain(self, count: int = len(_LENGTHS)) -> list[tuple[int, ...]]:
        """What transformers' own generate gives, each prompt alone."""
        found = []
        for prompt in self.prompts[:count]:
            ids = torch.tensor([prompt], device=self.model.device)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=None,
                min_new_tokens=self.asked.new, max_new_tokens=self.asked.new,
            )  # fmt: skip
            found.append(tuple(out[0, len(prompt) :].tolist()))
        return found

    def equality(self) -> None:
        wanted = self.plain()
        for kind in ("off", self.kind):
            for k in (0, self.asked.k):
                engine = self.engine(kind, k, self.asked.rows)
                done = self.serve(engine)
                gaps = [self.gap(*case) for case in zip(self.prompts, done, wanted, strict=True) if case[1] != case[2]]
                ties = sum(gap < _TIE for gap in gaps)
                text = f"{len(done) - len(gaps)} of {len(done)} outputs equal those of generate, {ties} differ at a tie"
                self.say(f"equality graphs={kind} k={k}", len(gaps) == ties, text, gaps=gaps)
                if (shapes := engine.target.shapes) is not None:
                    text = f"{shapes.made} shapes made, {shapes.runs} forwards in them"
                    enough = shapes.runs > shapes.made > 0
                    self.say(f"replay k={k}", enough, text, made=shapes.made, runs=shapes.runs)

    def gap(self, prompt: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]) -> float:
        """How far apart the logits of the two tokens are where two outputs part."""
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            return float("inf")
        with torch.inference_mode():
            ids = torch.tensor([prompt + theirs[:place]], device=self.model.device)
            logits = self.model(ids).logits[0, -1].float()
        return abs(logits[ours[place]] - logits[theirs[place]]).item()

    def copies(self) -> None:
        if self.kind != "cuda":
            return self.say("copies", None, "only a GPU has any")
        for kind in ("off", "cuda"):
            engine = self.engine(kind, self.asked.k, self.asked.rows)
            self.serve(engine)  # shapes are made outside of what is counted
            for request in self.requests(self.asked.rows):
                engine.submit(request)
            while any(row.behind for row in engine.scheduler.running) or not engine.scheduler.running:
                engine.step()
            before, counted = engine.steps, ("Memcpy DtoH", "Memcpy HtoD", "cudaStreamSynchronize", "cudaGraphLaunch")
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
                for _ in range(4):
                    engine.step()
                torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            steps = engine.steps - before
            numbers = {what: sum(name.startswith(what) for name in names) / steps for what in counted}
            text = "a step has " + ", ".join(f"{number:g} {what}" for what, number in numbers.items())
            replays = (numbers["cudaGraphLaunch"] > 0) == (kind == "cuda")
            self.say(f"copies graphs={kind}", numbers["Memcpy DtoH"] == 1 and replays, text, per_step=numbers)
        return None

    def speed(self) -> None:
        """Tokens a second, in turn, medians."""
        if self.kind == "cuda":
            self.model, self.draft = (one.to(torch_dtype(self.asked.dtype)) for one in (self.model, self.draft))
        for rows in sorted({1, self.asked.rows}):
            count = 1 if rows == 1 else len(_LENGTHS)
            sides = {
                f"{kind} k={k}": partial(self.serve, self.engine(kind, k, rows), count)
                for kind in ("off", self.kind)
                for k in (0, self.asked.k)
            }
            sides["generate"] = partial(self.plain, count)
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(1 + self.asked.repeats):  # the first one makes shapes and counts nowhere
                for name, go in sides.items():
                    start = time.perf_counter()
                    go()
                    if self.kind == "cuda":
                        torch.cuda.synchronize()
                    if turn:
                        seconds[name].append(time.perf_counter() - start)
            rate = {name: count * self.asked.new / statistics.median(taken) for name, taken in seconds.items()}
            text = ", ".join(f"{name} {one:.0f} ({one / rate['off k=0']:.2f}x)" for name, one in rate.items())
            self.say(f"speed rows={rows}", None, f"tokens/s {text}", tokens_per_second=rate)

    def memory(self) -> None:
        if self.kind != "cuda":
            return self.say("memory", None, "only counted on a GPU")
        used = {}
        for kind in ("off", "cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
            engine = self.engine(kind, self.asked.k, self.asked.rows)
            self.serve(engine)
            used[kind] = (torch.cuda.max_memory_reserved() - before) / 2**20
        text = f"{used['off']:.0f} MiB beside the weights without graphs, {used['cuda']:.0f} MiB with"
        self.say("memory", None, text, mebibytes=used)
        return None


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="random:llama", help="a hub id, a folder or random:FAMILY")
    parser.add_argument("--draft", default="random:llama:1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="for speed and memory on a GPU; equality is in float32")
    parser.add_argument("--k", type=int, default=5, help="draft tokens")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="tokens of an output")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default=graphs.BACKEND, help="of torch.compile; eager looks at this file only")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = options(arguments)
    if asked.device != "cpu" and not torch.cuda.is_available():
        print("this check needs a CUDA GPU and there is none; try --device cpu for the part that needs none")
        return 0
    graphs.BACKEND = asked.backend
    start = time.perf_counter()
    check = Check(asked)
    for look in (check.equality, check.copies, check.speed, check.memory):
        look()
    about = torch.cuda.get_device_name() if check.kind == "cuda" else "cpu"
    summary = {"device": about, "torch": torch.__version__, "target": asked.target, "draft": asked.draft}
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({**summary, "seconds": seconds, "failed": check.failed, "found": check.found}))
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
