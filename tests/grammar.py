"""A tiny target that knows a small grammar, and a drafter trained on it: what random weights cannot show.

A text goes round one of a few cycles of symbols, from a random place on. Every symbol stands in many places, so the
next one follows from the place in the cycle alone, which a network can only know from what came before.
"""

import functools

import torch
from attrs import evolve
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec import Engine, Request, Sampling
from specdec.metrics import pool
from specdec.target import Target
from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.design import design, network
from specdec_plugins.distill.features import head_of, size_of, tap
from specdec_plugins.distill.pool import GROUP, Pool, groups_of
from specdec_plugins.distill.recipe import DrafterSection, TrainSection
from specdec_plugins.distill.train import Trainer
from specdec_plugins.distill.vocabulary import Lexicon, frequent
from specdec_plugins.drafters.blocks.checkpoint import BlockModel
from specdec_plugins.drafters.dspark import DSpark
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard

SYMBOLS, CYCLES, PERIOD, LENGTH = 6, 3, 17, 40
VOCABULARY, MASK = 16, 15
BLOCK = 5


def texts(count, seed=0):
    """Ids [count, LENGTH]."""
    generator = torch.Generator().manual_seed(7)
    cycles = torch.randint(SYMBOLS, (CYCLES, PERIOD), generator=generator)
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(CYCLES, (count, 1), generator=generator)
    begin = torch.randint(PERIOD, (count, 1), generator=generator)
    return cycles[which, (begin + torch.arange(LENGTH)) % PERIOD]


@functools.cache
def model():
    """A llama of three layers that has learnt the grammar. Tests must not change it."""
    config = CONFIG_MAPPING["llama"](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    optimiser = torch.optim.AdamW(made.parameters(), lr=3e-3)
    for step in range(200):
        ids = texts(32, seed=step)
        logits = made(input_ids=ids).logits[:, 3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    made.generation_config.eos_token_id = None
    return made.eval().requires_grad_(False)


def target(rows=GROUP):
    """It behind a cache."""
    return Target(model(), kv=Slab(rows=rows, tokens=96))


def trainer(folder, steps):
    """What trains a drafter on it, and what the drafter is."""
    known = target()
    learnt = [Text(str(index), tuple(ids), 4) for index, ids in enumerate(texts(128, seed=1000).tolist())]
    section = DrafterSection(block_size=BLOCK, num_hidden_layers=2, taps=(0, 1, 2), markov_rank=8, mask_token_id=MASK)
    config = design(section, known, learnt)
    head = head_of(known)
    made = Trainer(
        target=known,
        network=network(config, section, size_of(tap(known, learnt[:GROUP], config.taps)), 0),
        pool=Pool(folder, groups_of(learnt, 0), lambda group: tap(known, group, config.taps), 64, 1),
        lexicon=Lexicon(head, frequent(learnt, VOCABULARY), None),
        options=TrainSection(steps=steps, sequences=8, anchors=6, decay=1.0, learning_rate=3e-3, warm_up=20),
        size=BLOCK,
        mask_id=MASK,
        seed=0,
    )
    return made, config


class Off:
    """A backbone that is given or gives something one off. One request at a time, since it remembers the last feature.

    Args:
        backbone: the right one.
        late: features stand one token behind their own.
        moved: positions by which block rows are off.
        ahead: rows by which what comes out is off.
        zeroed: features are 0.
    """

    def __init__(self, backbone, *, late=False, moved=0, ahead=0, zeroed=False):
        self.backbone, self.late, self.moved, self.ahead, self.zeroed = backbone, late, moved, ahead, zeroed
        self.hidden_norm, self.write, self.last = backbone.hidden_norm, backbone.write, None

    def context(self, features):
        if self.late:
            before = features[:, :1] if self.last is None else self.last
            self.last = features[:, -1:]
            features = torch.cat([before, features[:, :-1]], 1)
        return self.backbone.context(features * (not self.zeroed))

    def __call__(self, embedded, positions, *others):
        return self.backbone(embedded, positions + self.moved, *others).roll(-self.ahead, 1)


def kept(made, config, **fault):
    """The share of blocks that are kept up to each place and it, the target greedily decoding what is new to both.

    Args:
        made: a trainer.
        config: the drafter's.
        fault: as `Off` has it.
    """
    own = made.network
    model = BlockModel(config=config, backbone=own.backbone, markov=own.markov_head, confidence=own.confidence_head)
    known = target(rows=1)
    counters = []
    for ids in texts(8, seed=2000).tolist():
        drafter = DSpark(model=model)
        engine = Engine(known, drafter, Standard(), Continuous())
        drafter._blocks.model = evolve(model, backbone=Off(own.backbone, **fault))
        asked = Request(prompt=ids[:10], sampling=Sampling(temperature=0.0, max_new_tokens=30))
        counters.append(engine.generate([asked])[0].counters)
    whole = pool(counters)
    accepted = [*whole.num_accepted_tokens_per_pos, *[0] * BLOCK]
    return [accepted[place] / drafted for place, drafted in enumerate(whole.num_drafted_per_pos)]
