"""Block drafters on a target: what does not fit is said before the first step, and slots have no memory."""

import copy

import pytest
import torch
from attrs import evolve

from specdec import Engine, Target, registry
from specdec.errors import CompatibilityError, ModelError
from specdec.options import build
from specdec.packing import pack
from specdec_plugins.drafters.blocks import checkpoint
from specdec_plugins.drafters.dflash import DFlash
from specdec_plugins.drafters.dspark import DSpark
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard
from tests.block_checkpoints import deepspec, drafter, networks, of_target, speculators, weights, write, z_lab
from tests.families import prompts, tiny
from tests.faults.kit import Watched, ask, engine, facts, generate, serve

TEXT = (3, 1, 4, 1, 5)


def target(family="qwen3", layers=4, rows=4, **options):
    made = Target(tiny(family, layers=layers), kv=Slab(rows=rows, tokens=64), **options)
    made.preflighted = True
    return made


def misfits(made, to):
    with pytest.raises(CompatibilityError) as error:
        made.bind(to)
    return error.value.problems


# Catches: a drafter of another target that runs and is never right; reasons that come one by one.
def test_everything_that_the_target_cannot_give_is_said_at_once(tmp_path):
    config = deepspec(hidden_size=64, vocab_size=81, num_target_layers=9, target_layer_ids=[0, 7])
    folder = write(tmp_path, config)
    made = DSpark(model=str(folder), num_speculative_tokens=9)
    assert [said.removeprefix("drafter DSpark: ") for said in misfits(made, target())] == [
        "taps layer 7 and the target has 4; wanted 0 to 2, as the last one's output is never tapped raw",
        "was trained for a target of decoder layers 9, and this one has 4",
        "was trained for a target of hidden size 64, and this one has 32",
        "was trained for a target of vocabulary 81, and this one has 80",
        "num_speculative_tokens is 9 and a block drafts 5",
    ]


# Catches: the raw output of the last layer, which no checkpoint was trained on, where no count of layers is given.
def test_the_last_layer_is_never_tapped(tmp_path):
    config = deepspec(target_layer_ids=[0, 3], num_target_layers=None)
    [said] = misfits(DSpark(model=str(write(tmp_path, config))), target())
    assert "taps layer 3 and the target has 4; wanted 0 to 2" in said


# Catches: heads that are not run, or rows read as another form's, because the drafter's name says so.
def test_a_checkpoint_of_the_other_kind_is_refused_with_the_drafter_for_it(tmp_path):
    flash, spark = write(tmp_path / "a", z_lab()), write(tmp_path / "b", deepspec())
    assert misfits(DSpark(model=str(flash)), target()) == [
        "drafter DSpark: the checkpoint is one of DFlash; try drafter 'dflash'"
    ]
    assert misfits(DFlash(model=str(spark)), target()) == [
        "drafter DFlash: the checkpoint has a Markov or a confidence head; try drafter 'dspark'"
    ]
    for kind in (DSpark, DFlash):  # DeepSpec's dflash_*_block7 has neither head, and all its rows draft
        both = kind(model=str(write(tmp_path / kind.__name__, deepspec(None))))
        both.bind(target())
        assert both.num_speculative_tokens == 5


# Catches: a threshold without a guess, and graphs that keep no features.
def test_options_that_checkpoint_or_target_cannot_serve_are_refused(tmp_path):
    folder = str(write(tmp_path, deepspec(None)))
    [said] = misfits(DSpark(model=folder, threshold=0.3), target())
    assert said == "drafter DSpark: threshold is 0.3 and the checkpoint has no confidence head; try 0"
    graphed = target()
    graphed.graphs = "compile"
    [said] = misfits(DSpark(model=folder), graphed)
    assert "target.graphs 'compile' keeps no features" in said


# Catches: an option of nonsense that reaches the first step, or a missing folder found after the target was loaded.
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threshold": 1.5}, "threshold: got 1.5, wanted <= 1.0"),
        ({"draft_temperature": 0.0}, "draft_temperature: must be at least 1e-4, got 0.0; try proposal 'argmax'"),
        ({"draft_temperature": 0.5, "proposal": "argmax"}, "must be left out with proposal 'argmax'"),
        ({"proposal": "best"}, "proposal: got 'best', wanted one of sample, argmax"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: got 0, wanted >= 1"),
        ({"num_speculative_tokens": None, "model": "./absent"}, "'./absent': no such folder"),
    ],
)
def test_wrong_options_are_named(options, said, tmp_path):
    given = {"model": str(write(tmp_path, deepspec())), "num_speculative_tokens": 3} | options
    given = {name: value for name, value in given.items() if value is not None}
    made, problems = build(DSpark, given, "drafters[0]", "dspark")
    assert made is None
    assert any(said in problem for problem in problems), problems


# Catches: a second copy of the target's embedding and head kept; others thrown away as if they were the same.
def test_copies_of_the_targets_embedding_and_head_are_not_kept_and_others_are_used(tmp_path):
    base, to = weights(deepspec()), target()
    same = DSpark(model=str(write(tmp_path / "same", deepspec(), base | of_target(to.model))))
    same.bind(to)
    assert same.notes == []
    assert same._blocks.weights == sum(value.nbytes for value in base.values())

    own = of_target(to.model)
    own["lm_head.weight"] = own["lm_head.weight"].roll(1, 0)  # every token becomes its neighbour
    other = Watched(DSpark(model=str(write(tmp_path / "other", deepspec(None), weights(deepspec(None)) | own))))
    plain = Watched(DSpark(model=str(write(tmp_path / "none", deepspec(None)))))
    for made in (other, plain):
        Engine(target(), made, Standard(), Continuous()).generate([ask(TEXT, new=8)])
    [note] = other.inner.notes
    assert note == f"lm_head.weight of {tmp_path / 'other'} is not the target's; it is used as it is"
    extra = own["lm_head.weight"].nbytes
    assert other.inner._blocks.weights == plain.inner._blocks.weights + extra
    assert torch.equal(other.drafts[0].tokens, (plain.drafts[0].tokens + 1) % 80)


# Catches: a tiny difference in bfloat16 between a packed layer and a plain one taken for another embedding.
def test_a_packed_head_in_half_precision_is_still_the_targets(tmp_path):
    model = tiny("qwen3", layers=4, dtype=torch.bfloat16)
    copies = of_target(model)
    own = copy.deepcopy(model)
    pack(own)
    made = DSpark(model=str(write(tmp_path, deepspec(), weights(deepspec()) | copies)))
    to = Target(own, kv=Slab(rows=1, tokens=32))
    to.preflighted = True
    made.bind(to)
    assert made.notes == []


# Catches: keys of a row that ended, or of a row whose numbers went wrong, in what the next one of its slot attends to.
@pytest.mark.parametrize("name", ["dspark", "z-lab"])
def test_a_slot_forgets_a_row_whose_features_were_not_finite(name):
    class Broken(Watched):
        """Spoils the features of one request."""

        def observe(self, batch, kept):
            rows = [index for index, row in enumerate(batch.rows) if row.request.id == "bad"]
            hidden = {tap: value.clone() for tap, value in kept.hidden.items()}
            for value in hidden.values():
                value[rows] = torch.nan
            self.inner.observe(batch, evolve(kept, hidden=hidden))

    made = Broken(drafter(name, 3, proposal="sample"))
    # The short row takes the slot of the bad one beside a longer row, so that cells are read that it never wrote.
    bad = ask(prompts()[1], new=4, temperature=1.0, name="bad")
    long = ask(prompts()[1], new=40, temperature=1.0, name="long")
    short = ask(TEXT[:2], new=8, temperature=1.0, name="short")
    first, _, last = engine(made, rows=2).generate([bad, long, short])
    assert first.counters.num_draft_tokens == 0
    assert facts(last) == facts(serve(drafter(name, 3, proposal="sample"), short))
    assert last.counters.num_draft_tokens > 0


# Catches: a row that fails on its own NaN logits and takes its batch mates along.
def test_a_row_without_finite_features_drafts_nothing_and_ends_as_without_a_drafter():
    class Broken(Watched):
        def observe(self, batch, kept):
            for value in kept.hidden.values():
                value[0] = torch.inf
            self.inner.observe(batch, kept)

    made = Broken(drafter("rnn", 3))
    done = engine(made, rows=2).generate([ask(TEXT, new=10), ask(TEXT[::-1], new=10)])
    assert [one.tokens for one in done] == [generate(tiny("llama"), text, 10) for text in (TEXT, TEXT[::-1])]
    assert all(int(draft.sizes[0]) == 0 for draft in made.drafts)


def lengths_and_sizes(made, **options):
    """How long the text was, and how much was drafted, step by step; the output is the target's."""
    seen = Watched(made)
    found, propose = [], seen.propose

    def remember(batch):
        length = batch.lengths[0]
        draft = propose(batch)
        found.append((length, int(draft.sizes[0])))
        return draft

    seen.propose = remember
    done = serve(seen, ask(TEXT, new=18), **options)
    assert done.tokens == generate(tiny("llama"), TEXT, 18)
    return found


# Catches: positions past what the drafter was trained on.
def test_past_its_context_a_row_gets_no_draft():
    short = networks("dspark", "llama", max_position_embeddings=16)
    found = lengths_and_sizes(DSpark(model=short, num_speculative_tokens=3))
    assert {size > 0 for length, size in found if length <= 9} == {True}
    assert {size for length, size in found if length > 9} == {0}


# Catches: a block that passes the end of a cache row and stops the run, or rows that are not drafted for before it.
def test_a_block_may_pass_the_end_of_a_cache_row():
    found = lengths_and_sizes(drafter("dspark", 7), tokens=23)
    assert max(length for length, size in found if size) + 7 > 23


# Catches: a drafter that is bound twice and forgets its rows, or is shared by two targets.
def test_binding_again_changes_nothing_and_another_target_is_refused():
    made, to = drafter("dspark", family="qwen3", layers=4), target()
    assert made.taps == ()
    made.bind(to)
    inner = made._blocks
    made.bind(to)
    assert made._blocks is inner
    assert made.taps == (1, 2)
    with pytest.raises(CompatibilityError, match="bound to another target"):
        made.bind(target())
    with pytest.raises(CompatibilityError, match="not bound to a target"):
        drafter("dspark").propose(None)


# Catches: a speculators config whose ids are read as numbers of layers, seen by what is tapped.
def test_ids_of_the_speculators_package_are_one_more_than_the_layers_tapped(tmp_path):
    made = []
    for name, config in (("a", deepspec()), ("b", speculators())):
        made.append(Watched(DSpark(model=str(write(tmp_path / name, config, weights(deepspec()))))))
        Engine(target(), made[-1], Standard(), Continuous()).generate([ask(TEXT, new=8)])
    assert made[0].taps == made[1].taps == (0, 2)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(made[0].drafts, made[1].drafts, strict=True))


# Catches: weights that stay on another device or in another dtype than was asked for; packed layers that differ.
def test_dtype_and_packing_are_as_asked(tmp_path):
    folder = str(write(tmp_path, deepspec()))
    half = DSpark(model=folder, dtype="bfloat16")
    half.bind(target())
    assert half._blocks.model.backbone.fc.weight.dtype == torch.bfloat16
    asked = [ask(prompt, new=8) for prompt in prompts()]
    found = [
        [
            facts(done)
            for done in Engine(target(), DSpark(model=folder, packed=packed), Standard(), Continuous()).generate(asked)
        ]
        for packed in (True, False)
    ]
    assert found[0] == found[1]
    with pytest.raises(ModelError, match="unknown dtype 'half'"):
        DSpark(model=folder, dtype="half").bind(target())


# Catches: a device that is not there as a traceback.
def test_an_unknown_device_is_one_sentence(tmp_path):
    made = DSpark(model=str(write(tmp_path, deepspec())), device="nowhere")
    with pytest.raises(ModelError, match=r"drafter DSpark: device 'nowhere': .*; leave it out for the target's"):
        made.bind(target())


# Catches: a folder of an ordinary model, or of nothing, claimed by a drafter.
def test_folders_are_told_apart_by_their_config(tmp_path):
    assert registry.drafter_of(str(write(tmp_path / "a", deepspec()))) == "dspark"
    assert registry.drafter_of(str(write(tmp_path / "b", z_lab()))) == "dflash"
    assert registry.drafter_of(str(write(tmp_path / "c", speculators("dflash")))) == "dflash"
    assert registry.drafter_of(str(write(tmp_path / "d", {"architectures": ["Qwen3ForCausalLM"]}, {}))) is None
    (tmp_path / "a" / "config.json").write_text("[]")
    assert registry.drafter_of(str(tmp_path / "a")) is None
    assert registry.drafter_of("owner/name") is None
    assert checkpoint.describe(tmp_path / "b").most == 4


# Catches: a dtype or a device that is asked for and does nothing, because the networks are there already.
def test_networks_that_are_given_are_taken_as_they_are():
    for option in ({"dtype": "bfloat16"}, {"device": "cpu"}):
        [said] = misfits(DSpark(model=networks("dspark", "qwen3", 4), **option), target())
        assert said == "drafter DSpark: dtype and device are those of the networks given as 'model'; leave them out"
