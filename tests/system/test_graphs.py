"""Forwards in fixed shapes, compiled or captured, say what forwards without them say."""

import copy
import itertools
import shutil

import pytest
import torch
from attrs import define
from click.testing import CliRunner

from specdec import Engine, Request, Sampling, Target, graphs
from specdec.cli import main
from specdec.errors import CompatibilityError, ModelError, RequestError
from specdec.kv import KVCacheManager
from specdec.packing import PackedLinear
from specdec.types import Span
from specdec_plugins.drafters.layer_skip import LayerSkip
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.judge import Judge
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.tree import Tree
from tests.captures import without_cuda
from tests.families import greedy, prompts, tiny

NEW = 24
FAMILIES = ("llama", "qwen2", "gemma3", "gpt2")
DRAFTERS = {
    "none": lambda family, k: NoDraft(),
    "model": lambda family, k: DraftModel(model=tiny(family, seed=1), num_speculative_tokens=k),
    "layer_skip": lambda family, k: LayerSkip(num_speculative_tokens=k, skip=(1,)),
    "prompt_lookup": lambda family, k: PromptLookup(num_speculative_tokens=k),
}


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(graphs, "FEWEST_CELLS", 16)
    return without_cuda(monkeypatch)


@pytest.fixture
def compiles(monkeypatch):
    """How often something was compiled, by a compiler that changes nothing."""
    found = []

    def backend(module, _):
        found.append(module)
        return module.forward

    monkeypatch.setattr(graphs, "BACKEND", backend)
    return found


def make(family="llama", kind="cuda", rows=2, tokens=64, **options):
    return Target(tiny(family, **options), kv=Slab(rows=rows, tokens=tokens), graphs=kind)


def decode(target, drafter, new=NEW):
    """Four ragged prompts through fewer rows than that, in chunks; they end at different steps."""
    engine = Engine(target, drafter, Standard(), Continuous(prefill_chunk=5))
    requests = [
        Request(prompt=prompt, sampling=Sampling(temperature=0, max_new_tokens=new - 3 * index))
        for index, prompt in enumerate(prompts())
    ]
    return [completion.tokens for completion in engine.generate(requests)]


def expected(family):
    return [tokens[: NEW - 3 * index] for index, tokens in enumerate(greedy(family, NEW))]


# Catches: numbers of the first batch that stay in a graph (lengths, rows, tokens, a mask, a rotary position), a number
# looked at on the host, a shape's key that lacks what its graph depends on (it grows past 16 and 32 cells here), rows
# and slots mixed up, padding that writes into cells of a running row.
@pytest.mark.parametrize(
    ("family", "drafter", "k", "rows"),
    [
        pytest.param(family, drafter, k, rows, marks=() if daily else pytest.mark.full)
        for (f, family), (d, drafter) in itertools.product(enumerate(FAMILIES), enumerate(DRAFTERS))
        for (k, rows), daily in (((3, 2), (f + d) % 2 == 0), ((7, 3), (f + d) % 2 == 1), ((3, 3), 0), ((7, 2), 0))
    ],
)
def test_captured_forwards_equal_generate(family, drafter, k, rows, captures):
    target = make(family, rows=rows)
    assert decode(target, DRAFTERS[drafter](family, k)) == expected(family)
    assert sum(graph.replays for graph in captures) >= target.shapes.runs > target.shapes.made > 2


# Catches: a bool mask for eager attention, which would add it.
def test_captured_forwards_with_eager_attention_equal_generate(captures):
    target = make("gemma3", attention="eager")
    wanted = [tokens[: NEW - 3 * i] for i, tokens in enumerate(greedy("gemma3", NEW, attention="eager"))]
    assert decode(target, PromptLookup(num_speculative_tokens=3)) == wanted


# Catches: guards on what changes from step to step (lengths of the cache, rows, a Python number), more shapes than
# there are buckets, a compiler's limit of shapes after which it quietly compiles no more.
@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("qwen2", marks=pytest.mark.full), pytest.param("gemma3", marks=pytest.mark.full)],
)
def test_compiled_forwards_equal_generate_and_nothing_is_compiled_after_the_first_run(family, compiles):
    target = make(family, "compile")
    drafters = [NoDraft(), PromptLookup(num_speculative_tokens=3)]
    if family == "llama":
        drafters += [PromptLookup(num_speculative_tokens=7), DRAFTERS["model"](family, 3)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for drafter in drafters:
            assert decode(target, drafter) == expected(family)
    made, first = target.shapes.made, len(compiles)
    widths, rows = {1, 2, 4, 8} if family == "llama" else {1, 2, 4}, {1, 2}
    assert made <= len(widths) * len(rows)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for drafter in drafters:
            assert decode(target, drafter) == expected(family)
    assert target.shapes.made == made
    assert len(compiles) == first
    if family != "llama":  # a draft model has shapes of its own
        assert first == made


# Catches: compiled forwards that are right for the compiler that changes nothing only.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from inside the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_forwards_compiled_to_machine_code_equal_generate():
    target = make("llama", "compile")
    assert decode(target, PromptLookup(num_speculative_tokens=3)) == expected("llama")


# Catches: idle rows or columns that write anywhere but into the scratch cell, a scratch cell that is read, rows that
# read another's cells (poison would come through).
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_touches_no_cell_and_takes_no_part(family, captures):
    fixed, plain = make(family, rows=4, dtype=torch.float64), make(family, "off", rows=4, dtype=torch.float64)
    slots = tuple(range(4))
    ids = torch.arange(40).view(4, 10)
    for target in (fixed, plain):
        for _ in slots:
            target.kv.acquire()
        target.forward(slots, Span(ids, (10,) * 4))
        target.kv.commit(slots, torch.arange(10).expand(4, -1), (9, 4, 10, 7), chain=True)
    some, span = (1, 2), Span(torch.tensor([[5, 6, 7], [8, 0, 0]]), (3, 1))
    wanted = plain.forward(some, span).logits
    for store in (*fixed.kv._keys.values(), *fixed.kv._values.values()):
        store[[0, 3]] = 1e30
        store[:, :, -1] = float("nan")
    before = [store.clone() for store in fixed.kv._keys.values()]
    found = fixed.forward(some, span).logits
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1, 0], wanted[1, 0])
    for old, new in zip(before, fixed.kv._keys.values(), strict=True):
        written = (old != new).any(1).any(-1)[:, :-1]
        assert written.nonzero().tolist() == [[1, 4], [1, 5], [1, 6], [2, 10]]


# Catches: logits that are the graph's own memory, which the next replay writes over.
def test_logits_outlive_the_next_forward(captures):
    target = make(rows=1)
    slot = (target.kv.acquire(),)
    first = target.forward(slot, Span(torch.tensor([[1, 2]]), (2,))).logits
    kept = first.clone()
    second = target.forward(slot, Span(torch.tensor([[3, 4]]), (2,))).logits
    assert target.shapes.made == 1
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


# Catches: a staged forward that runs past its row because nobody looks at lengths any more.
def test_a_row_that_is_too_short_is_one_sentence(captures):
    target = make(rows=1, tokens=4)
    with pytest.raises(RequestError, match=r"kv\.tokens: 5 cells are needed and a row has 4"):
        target.forward((target.kv.acquire(),), Span(torch.tensor([[1, 2, 3, 4, 5]]), (5,)))


@pytest.mark.parametrize(("count", "found"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 12)])
def test_a_bucket_is_the_next_power_of_two_or_all_there_is(count, found):
    assert graphs.bucket(count, 1, 12) == found
    assert graphs.bucket(count, 8, 12) == max(8, found)


# Catches: graphs for what is no chain of few tokens, with wrong masks or without the features.
def test_prompts_taps_and_trees_run_as_without(captures):
    fixed, plain = make(rows=1), make("llama", "off", rows=1)
    long = torch.arange(graphs.WIDEST + 1).unsqueeze(0)
    tree = torch.tensor([[-1, 0, 0]])
    for target in (fixed, plain):
        target.kv.acquire()
    for span, options in (
        (Span(long, (long.shape[1],)), {}),
        (Span(long[:, :3], (3,)), {"taps": (0,)}),
        (Span(long[:, :3], (3,), tree), {}),
    ):
        found, wanted = (target.forward((0,), span, **options) for target in (fixed, plain))
        assert torch.equal(found.logits, wanted.logits)
        assert found.hidden.keys() == wanted.hidden.keys()
    assert fixed.forward((0,), Span(long[:, :3], (3,)), logits=False).logits is None
    assert fixed.shapes.made == 0


@define(kw_only=True, eq=False)
class Wandering(KVCacheManager):
    """A cache that promises nothing about where its cells are."""

    _reserve = _write = _read = _move = _clear = None


def scaled(kind):
    model = tiny("llama")
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    config._attn_implementation = "sdpa"
    return type(model)(config)


def marked(**marks):
    model = type(tiny("llama"))(tiny("llama").config)
    for name, value in marks.items():
        setattr(model, name, value)
    return model


# Catches: a combination that fails in the middle of a run, or quietly runs without graphs.
@pytest.mark.parametrize(
    ("model", "kind", "kv", "said"),
    [
        (tiny("llama"), "cuda", Slab(rows=1), r"'cuda' needs a CUDA device and the model is on cpu; try 'compile'"),
        (tiny("llama"), "compile", Wandering(rows=1), "needs a cache of fixed cells and Wandering has none"),
        (tiny("llama"), "triton", Slab(rows=1), "got 'triton', wanted off, compile or cuda"),
        (marked(hf_quantizer=object()), "compile", Slab(rows=1), "takes no quantized weights"),
        (marked(hf_device_map={"a": 0, "b": "cpu"}), "compile", Slab(rows=1), "takes no model on several devices"),
        (scaled("dynamic"), "compile", Slab(rows=1), "takes no rope scaling 'dynamic'"),
    ],
)
def test_what_cannot_run_in_fixed_shapes_is_one_sentence(model, kind, kv, said):
    with pytest.raises(ModelError, match=rf"target\.graphs: .*{said}|target\.graphs: {said}") as caught:
        Target(model, kv=kv, graphs=kind)
    assert "\n" not in str(caught.value)


# Catches: prepared layers that reach a compiler which has no idea of them.
def test_prepared_layers_are_not_compiled():
    model = copy.deepcopy(tiny("llama"))
    model.lm_head = PackedLinear(model.lm_head)
    with pytest.raises(ModelError, match=r"'compile' takes no prepared linear layers.*packed: false"):
        Target(model, kv=Slab(rows=1, tokens=64), graphs="compile")


# Catches: a tree whose siblings see each other, features that nobody kept.
@pytest.mark.parametrize(
    ("drafter", "rule", "said"),
    [
        (
            DraftModel(model=tiny("llama", seed=1), branches=[2, 1]),
            Tree(),
            "runs chains only and drafter DraftModel proposes trees",
        ),
        (NoDraft(), Judge(weights="nowhere.safetensors"), "keeps no features and verifier Judge taps layers"),
    ],
)
def test_trees_and_taps_are_refused(drafter, rule, said):
    with pytest.raises(CompatibilityError) as caught:
        Engine(make("llama", "compile"), drafter, rule, Continuous())
    assert caught.value.problems == [f"target.graphs: 'compile' {said}; try 'off'"]


# Catches: a compiler's failure as its traceback.
def test_what_a_compiler_says_is_one_sentence(monkeypatch):
    def backend(*_):
        raise RuntimeError("no g++\nnor clang")

    monkeypatch.setattr(graphs, "BACKEND", backend)
    with pytest.raises(
        ModelError, match=r"target\.graphs: 'compile' cannot be had of this model: .*no g\+\+.*; try 'off'"
    ) as e:
        decode(make("llama", "compile"), NoDraft())
    assert "\n" not in str(e.value)


# Catches: a draft model, or the target without some layers, that runs as if nobody had asked.
def test_draft_models_and_subsets_follow_the_target(captures):
    target = make()
    assert target.subset([0]).graphs == "cuda"
    drafter = DraftModel(model=tiny("llama", seed=1))
    drafter.bind(target)
    assert drafter._draft.graphs == "cuda"
    assert drafter._draft.shapes is not target.shapes


# Catches: an option that is accepted and never reaches the target, or the loader that does not know it.
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("run smoke --set target.graphs=cuda --output-dir OUT --quiet", 4, "'cuda' needs a CUDA device"),
        ("generate --model random:llama hello --set target.graphs=cuda", 4, "'cuda' needs a CUDA device"),
        ("validate smoke --set target.graphs=fast", 2, "target.graphs: got 'fast'"),
        ("doctor random:llama --set target.graphs=compile", 2, "the doctor looks at a model as it is; leave it out"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_recipe_s_option_reaches_the_target(command, code, said, tmp_path):
    done = CliRunner().invoke(main, command.replace("OUT", str(tmp_path / "out")).split())
    assert done.exit_code == code, done.output
    assert said in " ".join(done.output.split())
