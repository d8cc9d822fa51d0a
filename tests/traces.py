"""Traces without a model: laws that look like those of one, and the steps that the standard rule makes of them."""

import json

import torch

from specdec import compact
from specdec.noise import Noise, request_seed
from specdec.recorder import Recording
from specdec.trace import FOLDER, Steps

LABEL = "drafter + standard"
STANDARD = {"use": "standard", "name": "standard"}


def laws(count, vocabulary, generator, flattest=1.5, spread=0.7):
    """p and q [count, V]: power laws, some peaked and some flat, q a noisy copy of p, ids in no order."""
    power = flattest + 2.5 * torch.rand((count, 1), generator=generator)
    base = -power * torch.log(torch.arange(vocabulary) + 1.0 + 3 * torch.rand((count, 1), generator=generator))
    noise = spread * torch.randn((count, vocabulary), generator=generator)
    order = torch.rand((count, vocabulary), generator=generator).argsort(1)
    p, q = base.softmax(1), (base + noise).softmax(1)
    return torch.zeros_like(p).scatter_(1, order, p), torch.zeros_like(q).scatter_(1, order, q)


def steps(count, vocabulary, drafts=3, prompts=10, seed=0, law="dense"):
    """Full steps of the standard rule; their emitted tokens after the kept ones are all 0, and no rule made them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, drafts + 1, (count,), generator=generator)
    sizes[0] = drafts
    places = int(sizes.sum())
    p, q = laws(places + count, vocabulary, generator)
    owner = torch.arange(count).repeat_interleave(sizes)
    drawn = q[torch.arange(places) + owner]
    draft = torch.multinomial(drawn, 1, generator=generator).squeeze(1)
    request = torch.arange(count) % prompts
    seeds = torch.tensor([request_seed(0, f"p{index}", 0) for index in range(prompts)])[request]
    tensors = {
        "request": request,
        "step": torch.arange(count) // prompts,
        "seed": seeds,
        "pending": torch.zeros(count, dtype=torch.int64),
        "size": sizes,
        "end": sizes.clone(),
        "draft": draft,
        "p": p,
        "finished": torch.zeros(count, dtype=torch.int64),
    }
    if law == "dense":
        tensors["q"] = drawn
    made = Steps(law, tuple((f"p{index}", 0) for index in range(prompts)), tensors)
    noise = Noise(tuple(seeds.tolist()), tuple(tensors["step"].tolist())).uniform("accept", drafts)
    here = p[torch.arange(places) + owner].gather(1, draft.unsqueeze(1)).squeeze(1)
    chance = here / drawn.gather(1, draft.unsqueeze(1)).squeeze(1) if law == "dense" else here
    keep = torch.zeros((count, drafts), dtype=torch.int64)
    keep[owner, made.depth] = (noise[owner, made.depth] < chance).long()
    tensors["accepted"] = keep.cumprod(1).sum(1)
    tensors["emitted_count"] = tensors["accepted"] + 1
    tensors["emitted"] = torch.zeros(int(tensors["emitted_count"].sum()), dtype=torch.int64)
    return made


def compacted(full):
    """The same steps as a compact trace holds them."""
    places = torch.arange(len(full["draft"]))
    p = full["p"][places + full.owner]
    tensors = {name: tensor for name, tensor in full.tensors.items() if name not in ("p", "q")}
    return Steps(full.law, full.requests, tensors | compact.compacted(p, full.tensors.get("q"), full["draft"]))


def write(run, *shards, kind, vocabulary, deterministic=False, verifier=STANDARD):
    """A finished run's folder with these steps of one combination."""
    (run / FOLDER).mkdir(parents=True)
    about = {"sampling": {}, "drafters": [], "verifiers": []}
    recording = Recording(run / FOLDER, kind, logits=False, about=about)
    entries = {"drafter": {"use": "model", "name": "drafter"}, "verifier": verifier}
    recording._rows.append({"row": 1, "label": LABEL, "deterministic": deterministic, **entries})
    recording.begin(vocabulary, {sample: (1,) for made in shards for sample, _ in made.requests}, [])
    recording.count([recording.save(1, made) for made in shards])
    (run / "results.json").write_text(json.dumps({}))
    return run
