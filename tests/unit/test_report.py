import copy
import json

import pytest

from specdec.metrics import Counters, wilson
from specdec.report import FIDELITY, cells, in_words, last_line, markdown
from specdec.results import Row, fidelity, summarise

NAN = float("nan")


def record(run, sample, tokens, *, steps=1, drafted=2, accepted=1, seconds=1.0, repeat=0, sums=None, reason="length"):
    counters = Counters(
        num_steps=steps,
        num_drafts=steps if drafted else 0,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_emitted_tokens=len(tokens),
        num_per_length={len(tokens): 1},
    )
    return {
        "run": run,
        "sample": sample,
        "repeat": repeat,
        "finish_reason": reason,
        "tokens": list(tokens),
        # What a file makes of it: keys become texts.
        "counters": json.loads(json.dumps(counters.to_dict())),
        "fidelity": sums,
        "seconds": {"draft": 0.0, "verify": seconds, "rest": 0.0},
    }


def sums(places=4, rejection=1.0, deviation=0.5, rejected=2, in_nucleus=1, in_top=2):
    return {
        "places": places,
        "rejection": rejection,
        "nucleus_excess": 0.4,
        "excess": deviation,
        "deviation": deviation,
        "accepted": places - rejected,
        "relaxed": min(1, places - rejected),
        "relaxed_target_entropy": 0.9,
        "relaxed_draft_entropy": 0.3,
        "rejected": rejected,
        "rejected_in_nucleus": in_nucleus,
        "rejected_in_top_10": in_top,
    }


def row(label, **changes):
    facts = {"drafter": "d", "verifier": label, "exactness": "lossy", "family": "other", "point_mass": False}
    return Row(label=label, **{**facts, **changes})


ROWS = (
    row("plain", drafter="none", exactness="lossless", baseline=True),
    row("standard", exactness="lossless"),
    row("rule", reference="standard"),
)
RECORDS = (
    record("plain", "a", range(4), steps=4, drafted=0, accepted=0, seconds=4.0, sums=sums(0, 0.0, 0.0, 0, 0, 0)),
    record("plain", "b", range(2), steps=2, drafted=0, accepted=0, seconds=2.0, sums=sums(0, 0.0, 0.0, 0, 0, 0)),
    record("standard", "a", [1, 2, 3, 4], steps=2, seconds=1.0, sums=sums()),
    record("standard", "b", [5, 6], steps=1, seconds=1.0, sums=sums(1, 0.5, 0.0, 0, 0, 0)),
    record("rule", "a", [1, 2, 9, 4], steps=1, seconds=0.5, sums=sums(deviation=None)),
    record("rule", "b", [5, 6], steps=1, seconds=0.5, sums=sums()),
)


def results(rows=ROWS, records=RECORDS, **changes):
    about = {
        "recipe": "r",
        "target": "t",
        "greedy": False,
        "sampling": {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": 8,
        },
        "data": {"file": "f", "prompts": 2, "repeats": 1},
        "rows_at_once": 2,
        "environment": {
            "python": "3",
            "packages": {"torch": "2"},
            "processor": "cpu",
            "torch_threads": 1,
            "accelerators": [],
            "target": {"model_type": "llama", "parameters": 10, "dtype": "float32", "device": "cpu"},
        },
        **changes,
    }
    return {**about, **summarise(rows, records)}


def grouped(groups, rows=ROWS, records=RECORDS):
    return {**results(rows, records), **summarise(rows, records, groups)}


def by_label(data):
    return {entry["label"]: entry for entry in data["rows"]}


# Catches: a mean over requests called acceptance length (it would be 2.0), and the two swapped.
def test_acceptance_length_is_pooled_over_steps():
    entry = by_label(results(records=[*RECORDS[:4], record("rule", "a", range(6), steps=2), RECORDS[5]]))["rule"]
    assert entry["acceptance_length"]["value"] == pytest.approx(8 / 3)
    assert entry["acceptance_length_mean_over_requests"] == pytest.approx((3 + 2) / 2)


# Catches: a mean of per-prompt ratios, seconds left out of the pace, a baseline of another row.
def test_speedup_is_a_ratio_of_totals():
    found = by_label(results())
    assert found["plain"]["tokens_per_second"] == pytest.approx(1.0)
    assert found["standard"]["speedup"] == pytest.approx(6 / 2)
    assert found["rule"]["speedup"] == pytest.approx(6 / 1)
    assert by_label(results(rows=ROWS[1:]))["rule"]["speedup"] is None


# Catches: means over requests instead of places, shares of all places instead of the rejected ones.
def test_fidelity_is_a_mean_over_places_and_shares_are_of_rejected_tokens():
    found = by_label(results())["standard"]["fidelity"]
    assert found["rejection"]["value"] == pytest.approx(1.5 / 5)
    assert found["rejected_in_nucleus"]["value"] == pytest.approx(1 / 2)
    assert found["rejected_in_top_10"]["value"] == pytest.approx(1.0)
    low, high = found["rejection"]["interval"]
    assert low <= found["rejection"]["value"] <= high


# Catches: a zero that stands for something that was never measured.
def test_what_is_not_measured_is_null_and_says_so():
    off = [{**entry, "fidelity": None} for entry in RECORDS]
    found = results(records=off)
    assert by_label(found)["rule"]["fidelity"] is None
    assert {cells(by_label(found)["rule"])[column] for column in FIDELITY[:-1]} == {"not measured"}
    assert cells(by_label(found)["plain"])["R"] == "-"
    assert by_label(results())["rule"]["fidelity"]["deviation"] == {"value": None, "interval": None}


# Catches: a rule without a law called unmeasured, a lossless one among them called dear, a price without drafts.
def test_a_rule_without_a_law_at_single_places_says_so():
    found = by_label(results())["rule"]
    assert cells(found)["deviation"] == "none"
    assert cells(found | {"exactness": "lossless"})["deviation"] == "0 (lossless)"
    assert cells(found | {"fidelity": found["fidelity"] | {"places": 0}})["deviation"] == "-"


# Catches: a gain against the baseline or another drafter, a sign turned round, an interval of unpaired rows.
def test_gain_is_the_paired_difference_to_the_standard_row():
    found = by_label(results())
    gain = found["rule"]["acceptance_length_gain"]
    wanted = found["rule"]["acceptance_length"]["value"] - found["standard"]["acceptance_length"]["value"]
    assert gain["value"] == pytest.approx(wanted)
    assert found["standard"]["acceptance_length_gain"] is None
    same = [{**entry, "run": "rule"} for entry in RECORDS if entry["run"] == "standard"]
    own = by_label(results(records=[*(e for e in RECORDS if e["run"] != "rule"), *same]))["rule"]
    assert own["acceptance_length_gain"] == {"value": 0.0, "interval": [0.0, 0.0]}


# Catches: agreement with another drafter's row or of unmatched prompts, an index that counts from 1.
def test_agreement_is_with_the_standard_row_on_the_same_prompt_and_repeat():
    found = by_label(results())
    assert found["rule"]["agreement"] == {"requests": 2, "equal": 1, "share": 0.5, "median_first_difference": 2}
    assert found["standard"]["agreement"] is None
    assert cells(found["rule"])["same ids as standard"] == "50 %, else from 2"
    shorter = [*RECORDS[:4], record("rule", "a", [1, 2]), record("rule", "b", [5, 6], reason="error")]
    assert by_label(results(records=shorter))["rule"]["agreement"]["median_first_difference"] == 2
    assert by_label(results(records=shorter))["rule"]["agreement"]["requests"] == 1


# Catches: NaN or infinity in results.json, also where nothing ran or everything failed.
@pytest.mark.parametrize("records", [RECORDS, RECORDS[:2], ()])
def test_results_are_json_without_nan(records):
    found = results(records=records)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    json.dumps(last_line(found, "x"), allow_nan=False)
    assert markdown(found)


# Catches: a normal interval, which is empty at 0 and 1, a difference of unpaired means or with its sign turned.
def test_scores_have_wilsons_interval_and_the_paired_difference_to_standard():
    def scored(entry, value):
        return {**entry, "scores": {"strict": value}}

    values = {("standard", "a"): 1.0, ("standard", "b"): 0.0, ("rule", "a"): 0.0, ("rule", "b"): 0.0}
    some = [scored(entry, values.get((entry["run"], entry["sample"]), 1.0)) for entry in RECORDS]
    extra = scored(record("rule", "c", [1]), 1.0)  # standard has no such prompt
    found = by_label(results(records=[*some, extra]))
    assert found["plain"]["scores"]["strict"]["difference"] is None
    assert found["plain"]["scores"]["strict"]["interval"] == pytest.approx([0.3423802275066531, 1.0])
    strict = found["rule"]["scores"]["strict"]
    assert (strict["value"], strict["requests"]) == (pytest.approx(1 / 3), 3)
    assert strict["difference"]["value"] == pytest.approx(-1 / 2)
    assert strict["difference"]["interval"] == [-1.0, 0.0]
    assert wilson(8, 10) == pytest.approx((0.4901624715, 0.9433178485))
    text = markdown(results(records=[*some, extra]))
    assert " strict |" in text
    assert "-50 [-100, +0]" in text
    assert "Wilson" in text
    assert "Wilson" not in markdown(results())


# Catches: sums over all drafted places, a rank compared with <=, in_nucleus of accepted tokens.
def test_fidelity_sums_are_over_examined_places():
    diagnostics = {
        "accepted": [1.0, 0.0, 0.0],
        "by_ratio": [0.0, 0.0, 0.0],
        "rejection": [0.1, 0.2, 0.3],
        "target_entropy": [1.0, 2.0, 4.0],
        "draft_entropy": [0.5, 8.0, 16.0],
        "excess": [0.1, 0.1, 0.2],
        "nucleus_excess": [0.0, 0.1, 0.1],
        "deviation": [0.1, 0.1, 0.1],
        "in_nucleus": [1.0, 1.0, 0.0],
        "rank": [0.0, 9.0, 10.0],
    }
    found = fidelity(diagnostics)
    assert found["places"] == 3
    assert found["rejection"] == pytest.approx(0.6)
    assert (found["rejected"], found["rejected_in_nucleus"], found["rejected_in_top_10"]) == (2, 1, 1)
    assert (found["accepted"], found["relaxed"]) == (1, 1)
    assert (found["relaxed_target_entropy"], found["relaxed_draft_entropy"]) == (1.0, 0.5)
    assert found["excess"] == pytest.approx(0.4)
    assert fidelity({**diagnostics, "by_ratio": [1.0, 1.0, 0.0]})["relaxed"] == 0
    unknown = fidelity({**diagnostics, "deviation": [0.1, NAN, 0.1], "excess": [NAN] * 3})
    assert (unknown["deviation"], unknown["excess"], unknown["places"]) == (None, None, 3)
    assert fidelity({})["places"] == 0


# Catches: a table whose rows have other columns than its head, a formula that is not printed.
def test_the_report_begins_with_one_table_and_has_every_formula():
    found = results()
    text = markdown(found)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables[0]) == 2 + len(ROWS)
    for table in tables:
        assert len({line.count(" | ") for line in table[:1] + table[2:]}) == 1
    for name in set(found["formulas"]) - {"acceptance_length_mean_over_requests", "interval", "scores"}:
        assert f": {found['formulas'][name]}." in text, name


# Catches: sums divided by places, a bound above 1 or from a rule without a law, lossless rules that have a price.
def test_the_price_of_a_rule_is_told_for_a_request():
    steep = [{**entry, "fidelity": sums(deviation=1.5)} for entry in RECORDS]
    found = by_label(results(records=steep))["rule"]["fidelity"]
    assert found["deviation_per_request"]["value"] == pytest.approx(1.5)
    assert found["deviation"]["value"] == pytest.approx(1.5 / 4)
    assert found["sequence_bound"] == 1.0
    assert found["relaxed"]["value"] == pytest.approx(1 / 2)
    assert found["relaxed_target_entropy"]["value"] == pytest.approx(0.9)
    section = markdown(results(records=steep)).split("## Beyond the standard rule")[1].split("##")[0]
    assert "| rule " in section
    assert "standard" not in section
    assert by_label(results())["rule"]["fidelity"]["sequence_bound"] is None
    section = markdown(results()).split("## Beyond the standard rule")[1].split("##")[0]
    assert section.count(" none ") == 3


# Catches: the two shares swapped, positions of other rows, a column for none.
def test_acceptance_by_position_stands_in_a_table():
    counters = json.loads(json.dumps(Counters(
        num_drafted_per_pos=[4, 4], num_examined_per_pos=[4, 2], num_accepted_tokens_per_pos=[2, 1]
    ).to_dict()))  # fmt: skip
    found = results(records=[*RECORDS[:4], {**RECORDS[4], "counters": counters}])
    section = markdown(found).split("## Acceptance by position")[1].split("##")[0]
    assert "| rule | lossy     | 50 % / 50 % | 50 % / 25 % |" in section
    assert "plain" not in section
    assert "## Acceptance by position" not in markdown(results())


# Catches: a speed-up below 1 that is called faster, the baseline compared with itself, words without a baseline.
def test_the_report_says_in_words_what_is_faster_and_what_is_slower():
    slow = [{**entry, "seconds": {"draft": 0.0, "verify": 5.0, "rest": 0.0}} for entry in RECORDS[4:]]
    heading = "Against autoregressive decoding, with 2 prompts at once on this machine:"
    assert in_words(results()) == [heading, "", "- **faster**: rule (6.00x), standard (3.00x)", ""]
    found = in_words(results(records=[*RECORDS[:4], *slow]))
    assert found[2:] == ["- **faster**: standard (3.00x)", "- **slower**: rule (0.60x)", ""]
    assert in_words(results(rows=ROWS[1:])) == []
    assert "\n".join(in_words(results())) in markdown(results())


# Catches: a mark that is missing, a mark without its explanation, a failure that nobody sees.
def test_point_masses_greedy_and_failures_are_marked():
    plain = markdown(results())
    assert "point masses" not in plain
    assert "greedy" not in plain
    rows = (*ROWS[:2], row("rule", point_mass=True))
    failed = [*RECORDS[:5], {**copy.deepcopy(RECORDS[5]), "finish_reason": "error"}]
    text = markdown(results(rows, failed, greedy=True))
    assert "| rule * (1 of 2 failed) " in text
    assert "\\* Drafts are point masses" in text
    assert "Decoding is greedy" in text
    assert "not finite: rule (1)" in text


# Catches: a rule that has a law told to have none where a group has no draft, a crash on groups of an older run.
def test_a_group_in_which_nothing_was_examined_has_no_price():
    idle = [*RECORDS[:3], record("standard", "b", [5, 6], steps=1, seconds=1.0, sums=sums(0, 0.0, 0.0, 0, 0, 0))]
    found = grouped({"a": "maths", "b": "code"}, ROWS[:2], idle)

    def price():
        section = markdown(found).split("## By kind of prompt")[1].split("##")[0]
        return section.splitlines()[4].split("|")[-2].strip()

    assert price() == "-"
    del found["rows"][1]["groups"]["code"]["deviation"]
    assert price() == "not measured"


# Catches: a group's figures over all prompts, a gain against the standard row's other prompts, prompts of no group that
# are counted, a section where there are no groups.
def test_kinds_of_prompts_are_told_apart():
    found = by_label(grouped({"a": "maths", "b": None}))["rule"]["groups"]
    assert list(found) == ["maths"]
    assert found["maths"]["requests"] == 1
    assert found["maths"]["acceptance_length"]["value"] == pytest.approx(4.0)
    assert found["maths"]["acceptance_length_gain"]["value"] == pytest.approx(4.0 - 4 / 2)
    assert found["maths"]["deviation"]["value"] is None
    assert by_label(grouped({"a": "x", "b": "y"}))["rule"]["groups"]["y"]["deviation"]["value"] == pytest.approx(
        0.5 / 4
    )
    section = markdown(grouped({"a": "maths", "b": "code"})).split("## By kind of prompt")[1].split("##")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["standard", "rule"]  # plain decoding drafts nothing
    assert [line.split("|")[5].strip() for line in lines[2:]] == ["0.125", "none"]  # of maths
    assert "By kind" not in markdown(results())
    assert "By kind" not in markdown(grouped({"a": "maths", "b": "maths"}))  # the whole again
    wild = markdown(grouped({"a": "a|b", "b": "<i>"})).split("## By kind of prompt")[1]
    assert "a\\|b: gain" in wild
    assert "&lt;i>: gain" in wild
