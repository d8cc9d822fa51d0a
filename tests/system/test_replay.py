"""Rules over recorded steps, against the runs that recorded them and against each other."""

import csv
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from attrs import define
from click.testing import CliRunner

from specdec.cli import main
from specdec.errors import CompatibilityError
from specdec.frontier import THETAS, frontiers
from specdec.law import Dense, PointMass
from specdec.places import StandIn, Whole
from specdec.probability import entropy, mass_above
from specdec.replay import BRACKET, FIGURES, UnrecordedError, replay
from specdec.rerun import judge
from specdec.theory import rejection
from specdec.trace import Trace
from specdec.verifier import PointwiseVerifier
from specdec_plugins.verifiers.ensemble import Ensemble
from specdec_plugins.verifiers.gated import Gated
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.top_k import TopK
from specdec_plugins.verifiers.typical import Typical
from tests.traces import LABEL, compacted, steps, write

RULES = [
    {"use": "standard"},
    {"use": "typical"},
    {"use": "nucleus"},
    {"use": "nucleus", "name": "budget", "budget": 0.5},
    {"use": "gated", "inside": "nucleus", "outside": "standard", "begin": 5, "end": 9},
    {"use": "block"},
    {"use": "fly", "window": 1},
]
RECIPE = {
    "target": {"model": "random:llama", "dtype": "float32"},
    "drafters": [
        {"use": "model", "name": "model", "model": "random:llama:1", "num_speculative_tokens": 3},
        {"use": "prompt_lookup", "name": "prompt_lookup", "num_speculative_tokens": 4},
    ],
    "verifiers": RULES,
    "kv": {"rows": 3, "tokens": 128},
    "sampling": {"temperature": 1.0, "max_new_tokens": 14},
    "data": {"file": "p.jsonl"},
    "report": {"repeats": 2, "trace": "full", "baseline": False},
    "output_dir": "out",
}
PROMPTS = ("one two one two", "abc", "a longer prompt than the others", "x x x x")


def run(folder, **changes):
    rows = [json.dumps({"id": f"p{index}", "prompt": text}) for index, text in enumerate(PROMPTS)]
    (folder / "p.jsonl").write_text("\n".join(rows) + "\n")
    content = {**RECIPE, "output_dir": str(folder / "out"), **changes}
    (folder / "r.yaml").write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(main, ["run", str(folder / "r.yaml"), "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """One run, full and compact, at temperature 1."""
    place_by_place = [rule for rule in RULES if rule["use"] not in ("block", "fly")]
    report = {**RECIPE["report"], "trace": "compact", "repeats": 1}
    return {
        "full": run(tmp_path_factory.mktemp("full")),
        "compact": run(tmp_path_factory.mktemp("compact"), report=report, verifiers=place_by_place),
    }


def specdec(*arguments):
    return CliRunner().invoke(main, ["replay", *map(str, arguments)], catch_exceptions=False)


def document(*arguments):
    done = specdec(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def rows(*arguments):
    return {row["row"]: row for row in document(*arguments)["rows"]}


# Catches: noise of another step or request, rows of ragged batches mixed up, a rule's memory that does not go on from
# step to step, laws of another place, the token after the kept ones drawn from another law.
def test_on_the_recorded_noise_every_rule_emits_what_it_emitted(recorded):
    found = rows(recorded["full"])
    assert len(found) == 2 * len(RULES)
    for label, row in found.items():
        assert row["steps"] > 40, label
        assert row["equal_steps"] == row["steps"], label


# Catches: a greedy run, whose laws have all their mass on one token, that replays otherwise.
def test_a_greedy_run_is_reproduced_token_for_token(tmp_path):
    verifiers = [{"use": "greedy"}, {"use": "standard"}, {"use": "relaxed"}]
    once = {**RECIPE["report"], "repeats": 1}
    out = run(tmp_path, verifiers=verifiers, report=once, sampling={"temperature": 0, "max_new_tokens": 14})
    for row in rows(out).values():
        assert row["equal_steps"] == row["steps"] > 10


# Catches: a check that is always content: another rule, or the same with other options, does not emit the same.
def test_another_rule_does_not_come_out_as_recorded(recorded):
    for rule in (("standard",), ("nucleus", "--set", "theta=0.5")):
        row = rows(recorded["full"], "--row", "model + nucleus", "--check", "--verifier", *rule)["model + nucleus"]
        assert row["equal_steps"] < row["steps"]
    own = rows(recorded["full"], "--row", "model + nucleus", "--verifier", "nucleus", "--set", "theta=0.95")
    assert own["model + nucleus"]["equal_steps"] == own["model + nucleus"]["steps"]
    other = rows(recorded["full"], "--row", "model + nucleus", "--verifier", "standard")
    assert other["model + nucleus"]["equal_steps"] is None


# Catches: a compact trace that lost the drafted token's p or q, or whose keys of the noise are wrong.
def test_a_compact_trace_keeps_as_many_tokens_as_recorded(recorded):
    found = rows(recorded["compact"])
    assert len(found) == 10
    for label, row in found.items():
        assert row["equal_steps"] == row["steps"] > 20, label


# Catches: a product over all acceptances where one over the first k is meant, a bonus that is not counted, places after
# a rejection counted as examined, drafted tokens counted twice. The run's own figures are of one draw of the noise.
def test_the_expectation_lies_within_what_the_run_measured(recorded):
    results = json.loads((recorded["full"] / "results.json").read_text())
    found = rows(recorded["full"])
    for row in results["rows"]:
        one = found[row["label"]]
        if not one["expectation"]:
            assert one["acceptance_length"]["value"] == pytest.approx(row["acceptance_length"]["value"])
            continue
        pairs = [("acceptance_length", row["acceptance_length"])]
        pairs += [(name, row["fidelity"][name]) for name in ("rejection", "nucleus_excess")]
        for name, measured in pairs:
            low, high = measured["interval"]
            wider = 0.5 * (high - low) + 0.02
            assert low - wider <= one[name]["value"] <= high + wider, (row["label"], name)


# Catches: a sweep that takes another value than it says, loses other options, or leaves out the last value.
def test_a_point_of_a_sweep_is_the_single_replay(recorded):
    sweep = document(recorded["full"], "--row", "model + nucleus", "--sweep", "nucleus.theta=0.5:0.95:0.15")["rows"]
    assert [row["value"] for row in sweep] == [0.5, 0.65, 0.8, 0.95]
    lengths = [row["acceptance_length"]["value"] for row in sweep]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 4
    assert sweep[-1]["equal_steps"] is None
    single = rows(recorded["full"], "--row", "model + nucleus")["model + nucleus"]
    assert {name: sweep[-1][name] for name in FIGURES} == {name: single[name] for name in FIGURES}
    [capped] = document(
        *(recorded["full"], "--row", "model + nucleus", "--sweep", "nucleus.theta=0.8:0.8:1"),
        *("--set", "max_deviation=0.0"),
    )["rows"]
    assert capped["acceptance_length"]["value"] < sweep[2]["acceptance_length"]["value"]


# Catches: a frontier over another row's steps, of one drafter only, at thetas that are not what they are called, a rule
# without theta that has one.
def test_the_frontier_of_a_run_is_what_replay_says(recorded):
    found = json.loads((recorded["full"] / "results.json").read_text())["frontiers"]
    assert [(one["rule"], one["trace"]) for one in found] == [
        (rule, f"{drafter} + standard")
        for drafter in ("model", "prompt_lookup")
        for rule in ("nucleus", "nucleus(budget=0.5)")
    ]
    assert found[1]["runs"] == [{"label": "model + budget", "theta": 0.95}]
    for one in found:
        assert [point["theta"] for point in one["points"]] == [None, *THETAS]
    for one in found[::2]:  # a larger theta spends a budget sooner
        lengths = [point["acceptance_length"]["value"] for point in one["points"]]
        assert lengths == sorted(lengths)
    single = document(recorded["full"], "--row", "model + standard", "--verifier", "nucleus", "--set", "theta=0.9")
    point = next(point for point in found[0]["points"] if point["theta"] == 0.9)
    assert point["acceptance_length"] == single["rows"][0]["acceptance_length"]
    assert point["deviation"] == single["rows"][0]["deviation"]


# Catches: a run that fails where a compact trace leaves a theta open, or is silent about the point it has not.
def test_a_theta_that_a_trace_leaves_open_is_said(tmp_path):
    nucleus = {"use": "nucleus", "name": "mine", "theta": 0.9}
    full = steps(60, 20_000)
    run = write(tmp_path / "run", compacted(full), kind="compact", vocabulary=20_000, verifier=nucleus)
    found, said = frontiers(Trace.open(run))
    assert found[0]["trace"] == LABEL  # no standard row
    assert [point["theta"] for point in found[0]["points"]] == [None, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert len(said) == 1
    assert re.fullmatch(r"nucleus at theta 0\.99: .* needs a full trace; try report\.trace: full", said[0])


@define(kw_only=True, eq=False)
class Strange(PointwiseVerifier):
    """A rule with a theta that works in a run alone."""

    family = "other"
    exactness = "lossy"
    theta: float = 0.5

    def prepare(self, target):
        self.bound = target.vocabulary

    def acceptance(self, at):
        return (at.p > self.theta).to(at.p.dtype)


# Catches: a finished run that loses its report because a rule of it cannot be replayed, a point that is silently gone.
def test_a_rule_that_cannot_be_replayed_costs_no_report(tmp_path):
    verifiers = [{"use": "standard"}, {"use": "nucleus"}, {"use": f"{__name__}:Strange"}]
    report = {**RECIPE["report"], "repeats": 1}
    out = run(tmp_path, verifiers=verifiers, report=report, drafters=RECIPE["drafters"][:1])
    found = json.loads((out / "results.json").read_text())
    strange, nucleus = sorted(found["frontiers"], key=lambda one: len(one["points"]))
    assert [point["theta"] for point in strange["points"]] == [None]
    assert len(nucleus["points"]) == 1 + len(THETAS)
    assert len(found["notes"]) == len(THETAS)
    assert all(f"Strange at theta {theta}: " in note for theta, note in zip(THETAS, found["notes"], strict=True))
    (out / "results.json").unlink()
    for shard in (out / "traces").glob("*.safetensors"):
        shard.write_bytes(b"")
    again = CliRunner().invoke(main, ["run", str(tmp_path / "r.yaml"), "--quiet"], catch_exceptions=False)
    assert again.exit_code == 0, again.stderr
    found = json.loads((out / "results.json").read_text())
    assert any("perhaps it was cut off" in note for note in found["notes"])


# Catches: a rule that gives no numbers, blamed on what a trace left out.
def test_a_rule_that_gives_no_number_is_told_so(tmp_path, monkeypatch):
    full, _ = both(tmp_path, 200)
    monkeypatch.setattr(Strange, "acceptance", lambda _, at: torch.full_like(at.p, math.nan))
    with pytest.raises(CompatibilityError, match="rule it: makes acceptance_length something else than a finite"):
        replay(full, 1, {"it": Strange()})


# Catches: columns that moved, values that are rounded, a file that is overwritten.
def test_the_csv_holds_the_figures_of_the_table(recorded, tmp_path):
    file = tmp_path / "frontier.csv"
    sweep = (recorded["full"], "--row", "model + nucleus", "--sweep", "nucleus.theta=0.6:0.8:0.1", "--csv", file)
    found = document(*sweep)["rows"]
    with file.open() as opened:
        lines = list(csv.DictReader(opened))
    assert len(lines) == len(found) == 3
    for line, row in zip(lines, found, strict=True):
        assert (line["row"], float(line["value"])) == (row["row"], row["value"])
        for name in FIGURES:
            assert float(line[name]) == row[name]["value"]
            assert [float(line[f"{name}_low"]), float(line[f"{name}_high"])] == row[name]["interval"]
    again = specdec(*sweep)
    assert again.exit_code == 8
    assert again.stderr == f"error: {file}: exists; try another --csv\n"


# Catches: output that does not say what its figures are.
def test_the_output_says_where_blocks_begin_and_what_is_no_expectation(recorded):
    told = specdec(recorded["full"], "--row", "model + block").stdout
    assert "Blocks begin where those of the recorded rule began" in told
    assert "block does not decide place by place: its figures are of the recorded noise, no expectation" in told
    assert "expectations over the accept noise" not in told
    told = specdec(recorded["full"], "--row", "model + standard").stdout
    assert "expectations over the accept noise" in told


def both(folder, vocabulary, law="dense", **options):
    """The same steps as a full and as a compact trace."""
    made = steps(30, vocabulary, law=law, **options)
    kinds = {"full": made, "compact": compacted(made)}
    return [
        Trace.open(write(folder / kind, one, kind=kind, vocabulary=vocabulary, deterministic=law == "point"))
        for kind, one in kinds.items()
    ]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A full and a compact trace by the kind of law; the tails of the compact one have up to a tenth of the mass."""
    return {law: both(tmp_path_factory.mktemp(law), 20_000, law) for law in ("dense", "point")}


# Catches: a bracket that does not hold what it is said to, tail mass that is lost or counted twice, kept tokens that
# are not where they were.
@pytest.mark.parametrize(
    ("rule", "law"),
    [
        pytest.param(rule, law, marks=() if law == "dense" or index == 2 else pytest.mark.full)
        for law in ("dense", "point")
        for index, rule in enumerate(
            (
                Standard(),
                Nucleus(),
                Nucleus(theta=0.6),
                Nucleus(theta=0.8, budget=0.4),
                Typical(),
                TopK(k=20),
                Ensemble(),
            )
        )
    ],
)
def test_a_compact_trace_gives_what_the_full_one_gives(rule, law, wide):
    if law == "point" and isinstance(rule, Ensemble):
        return
    full, compact = (replay(trace, 1, {"rule": rule})["rule"] for trace in wide[law])
    for name in FIGURES:
        one, other = full.figures[name], compact.figures[name]
        assert one.open == 0
        assert other.open <= BRACKET
        assert other.value == pytest.approx(one.value, abs=BRACKET), name
    assert full.steps == compact.steps == 30


# Catches: a figure that is given although the trace does not hold it.
def test_a_rule_that_reaches_into_what_was_left_out_needs_a_full_trace(wide):
    full, compact = wide["dense"]
    rule = Nucleus(theta=0.995)
    replay(full, 1, {"it": rule})
    with pytest.raises(CompatibilityError, match=r"moves \w+ by 0\.\d+, wanted 0\.001 at most: it needs a full trace"):
        replay(compact, 1, {"it": rule})


# Catches: one value of a sweep that a trace leaves open and that costs the others.
def test_a_value_that_a_trace_leaves_open_costs_a_sweep_no_other(tmp_path):
    out = write(tmp_path / "run", compacted(steps(60, 20_000)), kind="compact", vocabulary=20_000)
    done = specdec(out, "--sweep", "nucleus.theta=0.8:0.99:0.19", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["value"] for row in found["rows"]] == [0.8]
    assert len(found["left_out"]) == 1
    assert "rule nucleus(theta=0.99): what a compact trace left out moves" in found["left_out"][0]


# Catches: numbers that are broken taken for numbers that a trace does not hold, so that a row is left out in silence.
def test_a_recorded_figure_that_is_no_number_is_an_error(tmp_path):
    made = compacted(steps(30, 300))
    made["rejection"][0] = torch.nan
    trace = Trace.open(write(tmp_path / "run", made, kind="compact", vocabulary=300))
    with pytest.raises(CompatibilityError, match="makes rejection something else than a finite number") as error:
        replay(trace, 1, {"it": Standard()})
    assert not isinstance(error.value, UnrecordedError)


# Catches: stand-ins that contradict what is known of the tokens left out.
@pytest.mark.parametrize("law", ["dense", "point"])
def test_what_stands_in_has_everything_that_is_known(law):
    full = steps(30, 20_000, law=law)
    compact = compacted(full)
    places = torch.arange(len(full["draft"]))
    whole = Whole(full).at(places)
    p, q = whole.p.double(), whole.q.dense().double()
    for uneven in (False, True):
        at = StandIn(compact, uneven).at(places)
        assert isinstance(at.q, Dense if law == "dense" else PointMass)
        ours, theirs = at.p.double(), at.q.dense().double()
        drafted = ours.gather(1, at.token.unsqueeze(1)).squeeze(1)
        assert torch.equal(drafted, p.gather(1, full["draft"].unsqueeze(1)).squeeze(1))
        assert torch.equal(at.q.at(at.token), whole.q.at(full["draft"]))
        close = {"rtol": 0, "atol": 2e-5}
        torch.testing.assert_close(ours.sum(1), p.sum(1), **close)
        torch.testing.assert_close(theirs.sum(1), q.sum(1), **close)
        torch.testing.assert_close(rejection(ours, theirs), rejection(p, q), **close)
        torch.testing.assert_close(mass_above(ours, drafted), mass_above(p, drafted), rtol=0, atol=2e-4)
        usual = drafted > compact["cut"]
        torch.testing.assert_close(entropy(ours)[usual], entropy(p)[usual], rtol=0, atol=2e-3)


# Catches: waves that mix requests, or a memory that follows the replayed rule's way instead of the recorded one.
def test_a_rule_with_memory_gives_the_same_for_each_request_alone():
    made = steps(40, 300, prompts=7)
    rule = Gated(inside=Nucleus(theta=0.7, budget=0.5), outside=Standard(), begin=3, end=0)
    rule.prepare(None)
    prompts = {f"p{index}": (index % 4, 1) for index in range(7)}
    together = judge(rule, Whole(made), {}, prompts)
    for request in range(7):
        mine = made["request"] == request
        alone = judge(rule, Whole(made.select(mine)), {}, prompts)
        places = mine.repeat_interleave(made["size"])
        assert torch.equal(alone.acceptance, together.acceptance[places])
        assert torch.equal(alone.deviation, together.deviation[places])
        assert torch.equal(alone.starts, together.starts[mine])


# Catches: steps of one request that are split over two shards and begin anew in the second.
def test_memory_goes_on_from_shard_to_shard(tmp_path):
    made = steps(60, 300, prompts=5)
    early = made["step"] < 6
    whole, parts = (
        Trace.open(write(tmp_path / name, *shards, kind="full", vocabulary=300))
        for name, shards in (("whole", [made]), ("parts", [made.select(early), made.select(~early)]))
    )
    rule = Nucleus(budget=0.3)
    one, other = (replay(trace, 1, {"it": rule})["it"] for trace in (whole, parts))
    for name in FIGURES:
        assert one.figures[name].value == pytest.approx(other.figures[name].value, abs=1e-9)
    forgetful = replay(whole, 1, {"it": Nucleus()})["it"]
    assert forgetful.figures["deviation"].value > one.figures["deviation"].value + 0.01


# Catches: a rule that runs over traces that do not hold what it looks at.
@pytest.mark.parametrize(
    ("kind", "row", "rule", "said"),
    [
        ("compact", "model + standard", "mars", "looks at raw logits: it needs a full trace"),
        ("compact", "model + standard", "block", "does not decide place by place: it needs a full trace"),
        ("full", "prompt_lookup + standard", "ensemble", "needs the law a token was drawn from"),
    ],
)
def test_a_rule_whose_needs_are_not_in_the_trace_is_refused(recorded, kind, row, rule, said):
    done = specdec(recorded[kind], "--row", row, "--verifier", rule)
    assert done.exit_code == 5
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


# Catches: one row that cannot be replayed and costs all the others, or is missing without a word.
def test_rows_that_cannot_be_replayed_are_left_out_and_named(tmp_path):
    out = run(
        tmp_path, verifiers=[{"use": "standard"}, {"use": "block"}, {"use": "nucleus"}], report={"trace": "compact"}
    )
    rows = ["model + standard", "model + nucleus", "prompt_lookup + standard", "prompt_lookup + nucleus"]
    why = "rule block does not decide place by place: it needs a full trace; try report.trace: full"
    done = specdec(out)
    assert done.exit_code == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:5]] == rows
    assert f"\nLeft out: model + block: {why}.\nLeft out: prompt_lookup + block: {why}.\n" in done.stdout
    found = json.loads(specdec(out, "--json").stdout)
    assert [row["row"] for row in found["rows"]] == rows
    assert found["left_out"] == [f"model + block: {why}", f"prompt_lookup + block: {why}"]
    assert json.loads(specdec(out, "--verifier", "standard", "--json").stdout)["left_out"] == []


# Catches: logits that were not recorded taken for logits.
def test_raw_logits_that_were_not_recorded_are_refused(tmp_path):
    out = run(tmp_path, verifiers=[{"use": "standard"}], report={"trace": "full"})
    done = specdec(out, "--row", "model + standard", "--verifier", "mars")
    assert (done.exit_code, done.stderr.count("\n")) == (5, 1)
    assert "record with it" in done.stderr


# Catches: a broken folder, or options that mean nothing, as a stack trace or as silence.
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gone"], 7, "gone: no such folder"),
        (["{out}", "--row", "model + standrad"], 2, "did you mean 'model + standard'?"),
        (["{out}", "--set", "theta=0.9"], 2, "give --verifier, too"),
        (["{out}", "--verifier", "nucleus", "--set", "thetta=0.9"], 2, "did you mean 'theta'?"),
        (["{out}", "--verifier", "nucelus"], 3, "did you mean 'nucleus'?"),
        (["{out}", "--sweep", "nucleus.theta=0.5"], 2, "wanted NAME.OPTION=FROM:TO:STEP"),
        (["{out}", "--sweep", "nucleus.theta=0.5:0.9:0"], 2, "STEP from 1e-12"),
        (["{out}", "--sweep", "nucleus.theta=0.5:0.9:1e-300"], 2, "STEP from 1e-12"),
        (["{out}", "--sweep", "nucleus.theta=0:1e400:1"], 2, "finite numbers"),
        (["{out}", "--sweep", "nucleus.theta=0.5:0.9:0.1", "--set", "theta=0.1"], 2, "is what --sweep sets"),
        (["{out}", "--sweep", "nucleus.theta=0.5:1.9:0.2"], 2, "wanted <= 1"),
        (["{out}", "--sweep", "nucleus.theta=0.5:0.9:0.1", "--verifier", "standard"], 2, "the sweep names its rule"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence(recorded, arguments, code, said):
    done = specdec(*(part.format(out=recorded["full"]) for part in arguments))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert said in done.stderr


# Catches: figures of half a run, of a shard that is gone, of a run without traces.
def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    out = run(tmp_path, verifiers=[{"use": "standard"}])
    shard = next(Path(out, "traces").glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1000])
    cut = specdec(out)
    shard.unlink()
    gone = specdec(out)
    shard.write_bytes(content)
    assert specdec(out).exit_code == 0
    (out / "results.json").unlink()
    unfinished = specdec(out)
    for done, said in ((cut, "cut off"), (gone, "is missing"), (unfinished, "unfinished run")):
        assert (done.exit_code, done.stderr.count("\n")) == (7, 1), done.stderr
        assert said in done.stderr


# Catches: an end inside a draft after which tokens are counted, drafted tokens that a stop cut off, places behind it.
def test_expected_counts_are_those_of_all_that_can_happen(tmp_path):
    made = steps(30, 300)
    ends = torch.where(made["step"] % 2 == 0, made["size"], (made["size"] - 2).clamp(min=0))
    made = type(made)(made.law, made.requests, dict(made.tensors) | {"end": ends})
    trace = Trace.open(write(tmp_path / "run", made, kind="full", vocabulary=300))
    acceptance = judge(Standard(), Whole(made), {}, {}).acceptance.split(made["size"].tolist())
    total = dict.fromkeys(("emitted", "accepted", "drafted", "examined"), 0.0)
    for chances, size, end in zip(acceptance, made["size"].tolist(), ends.tolist(), strict=True):
        for outcome in itertools.product((True, False), repeat=size):
            chance = math.prod(a if keep else 1 - a for a, keep in zip(chances.tolist(), outcome, strict=True))
            kept = next((node for node, keep in enumerate(outcome) if not keep), size)
            cut = kept > end  # the end itself is the last token that is emitted
            kept = min(kept, end + 1)
            total["emitted"] += chance * (kept if cut else kept + 1)
            total["accepted"] += chance * kept
            total["drafted"] += chance * (kept if cut else size)
            total["examined"] += chance * (kept if cut else min(kept + 1, size))
    figures = replay(trace, 1, {"it": Standard()})["it"].figures
    for name, wanted in (
        ("acceptance_length", total["emitted"] / len(made)),
        ("acceptance_rate", total["accepted"] / total["drafted"]),
        ("acceptance", total["accepted"] / total["examined"]),
    ):
        assert figures[name].value == pytest.approx(wanted, abs=1e-6), name


PARITY = """
import torch
from attrs import frozen
from specdec import Place, PointwiseVerifier
from specdec.theory import standard_acceptance

@frozen(kw_only=True)
class Parity(PointwiseVerifier):
    family, exactness, memory = "other", "lossy", 1

    def start(self, prompt):
        return (float(sum(token % 2 for token in prompt[:-1])),)

    def acceptance(self, at):
        odd = (at.memory[..., 0] % 2 > 0).unsqueeze(-1)
        return torch.where(odd, standard_acceptance(at.p, at.q.dense()), torch.full_like(at.p, 0.7))

    def follow(self, tokens, memory):
        return memory + (tokens % 2).unsqueeze(-1)
"""


# Catches: pending or kept tokens that a rule is not told of, tokens of a compact trace told by their new numbers, a
# prompt that is not there, a class of no package that is not found.
@pytest.mark.parametrize("kind", ["full", "compact"])
def test_a_rule_that_follows_every_token_is_told_of_every_token(kind, tmp_path, monkeypatch):
    (tmp_path / "parity.py").write_text(PARITY)
    monkeypatch.chdir(tmp_path)
    out = run(tmp_path, verifiers=[{"use": "parity:Parity"}], report={"trace": kind, "baseline": False})
    for row in rows(out).values():
        assert row["equal_steps"] == row["steps"] > 20
