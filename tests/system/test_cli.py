import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from specdec import comparison
from specdec.cli import main
from specdec.errors import DataError
from specdec.figures import FILES
from specdec.page import page
from specdec.recipe import DataSection
from specdec.task import Sample

SMALL = ("--set", "sampling.max_new_tokens=6", "--limit", "2")
LABELS = [
    "autoregressive",
    *(f"{drafter} + {rule}" for drafter in ("model", "prompt_lookup") for rule in ("standard", "typical", "nucleus")),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def specdec(*arguments):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def run(*arguments):
    result = specdec("run", "smoke", *SMALL, *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def records(folder="runs/smoke"):
    return [json.loads(line) for line in Path(folder, "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def without_times(entries):
    return sorted(
        ({key: value for key, value in entry.items() if key != "seconds"} for entry in entries),
        key=lambda entry: (entry["run"], entry["sample"], entry["repeat"]),
    )


# Catches: a file that is not written, a row or a repeat that is left out, a last line that is not one JSON document,
# logs on stdout, escape codes in a pipe.
def test_a_run_writes_its_folder_and_ends_in_one_json_line():
    result = run("--set", "report.repeats=2")
    last = json.loads(result.stdout.splitlines()[-1])
    assert [row["label"] for row in last["rows"]] == LABELS
    folder = Path(last["output_dir"])
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "config.yaml",
        "environment.json",
        "figures",
        "report.html",
        "report.md",
        "results.json",
        "samples.jsonl",
        "table.csv",
    ]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.csv")} == set(FILES)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert results["schema_version"] == 1
    for row in results["rows"]:
        assert (row["requests"], row["prompts"], row["errors"]) == (4, 2, 0)
        assert row["counters"]["num_emitted_tokens"] > 0
        assert row["tokens_per_second"] > 0
    assert results["rows"][0]["speedup"] == 1.0
    standard = {drafter: f"{drafter} + standard" for drafter in ("model", "prompt_lookup")}
    for row in results["rows"]:
        compared = row["verifier"] != "standard"
        assert row["reference"] == (standard[row["drafter"]] if compared else None)
        assert (row["agreement"] is not None) is compared
    assert len(records()) == len(LABELS) * 2 * 2
    assert "generation config" in result.stderr
    assert "generation config" not in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert report.split("## How to read it")[0].rstrip() in result.stdout
    assert (folder / "report.html").read_text(encoding="utf-8") == page(results)
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["target"]["weights"].startswith("sha256")


# Catches: repeats or prompts that share noise, noise that differs between combinations.
def test_repeats_differ_and_a_second_run_is_the_same():
    run("--set", "report.repeats=2")
    first = records()
    plain = {(entry["sample"], entry["repeat"]): entry["tokens"] for entry in first if entry["run"] == LABELS[0]}
    assert len({tuple(tokens) for tokens in plain.values()}) == len(plain)
    run("--set", "report.repeats=2", "--output-dir", "again")
    assert without_times(records("again")) == without_times(first)


# Catches: the seconds of a chunk counted once for every row of it, or the warm-up counted at all.
def test_the_times_of_records_add_up_to_those_of_the_engine(monkeypatch):
    original = comparison._Run._segment
    spent = [0.0, 0.0, 0.0]

    def watched(self, combination, chunk, repeat):
        before = list(combination.engine.seconds)
        made = original(self, combination, chunk, repeat)
        for index, (after, earlier) in enumerate(zip(combination.engine.seconds, before, strict=True)):
            spent[index] += after - earlier
        return made

    monkeypatch.setattr(comparison._Run, "_segment", watched)
    run()
    for index, name in enumerate(("draft", "verify", "rest")):
        assert sum(entry["seconds"][name] for entry in records()) == pytest.approx(spent[index])


# Catches: --quiet that still prints, or that drops the last line.
def test_quiet_prints_the_json_line_only():
    result = run("--quiet")
    assert len(result.stdout.splitlines()) == 1
    assert json.loads(result.stdout)["recipe"] == "smoke"
    assert result.stderr == ""


# Catches: lossless rules whose rows leave the target's greedy path; temperature that does not reach the engine.
def test_at_temperature_zero_lossless_rows_have_the_ids_of_plain_decoding():
    run("--set", "sampling.temperature=0")
    found = {(entry["run"], entry["sample"]): entry["tokens"] for entry in records()}
    for sample in {sample for _, sample in found}:
        for drafter in ("model", "prompt_lookup"):
            assert found[f"{drafter} + standard", sample] == found["autoregressive", sample]
    report = Path("runs/smoke/report.md").read_text(encoding="utf-8")
    assert "Decoding is greedy" in report
    assert "model + standard \\*" in report or "model + standard *" in report


# Catches: figures that stand for something that was not computed.
def test_without_diagnostics_fidelity_is_not_measured():
    result = run("--set", "report.diagnostics=false", "--set", "report.baseline=false")
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["label"] for row in rows] == LABELS[1:]
    assert all(row["rejection"] is None and row["speedup"] is None for row in rows)
    assert "not measured" in result.stdout


# Catches: an option that does not reach the engine, numbers that JSON cannot hold, lists of another length.
def test_logprobs_stand_in_the_samples_when_asked():
    run("--set", "report.logprobs=true", "--set", "verifiers.1={use: fly}", "--set", "sampling.temperature=0")
    entries = records()
    for entry in entries:
        assert set(entry["logprobs"]) == {"target", "raw", "output", "uncovered"}
        assert {len(values) for values in entry["logprobs"].values() if values is not None} == {len(entry["tokens"])}
        assert set(entry["logprobs"]["target"]) <= {0.0, None}  # greedy: all mass on one token
    unknown = {entry["run"] for entry in entries if entry["logprobs"]["output"] is None}
    assert unknown <= {"model + fly", "prompt_lookup + fly"}
    assert unknown
    run("--overwrite")
    assert all("logprobs" not in entry for entry in records())


TASK = """
from attrs import frozen
from specdec import Sample, Task

@frozen(kw_only=True)
class Vowels(Task):
    "Prompts of its own; scores the share of vowels."

    def samples(self, file, limit):
        return [Sample(id=str(index), text="la " * (index + 2), fields={"least": index}) for index in range(limit or 3)]

    def score(self, sample, completion):
        return {"long": float(len(completion) > sample.fields["least"]), "vowels": len(completion) % 2}
"""


# Catches: scores of another sample's fields, scores that a row lacks, a column that is missing in the terminal.
def test_scores_of_a_task_stand_in_samples_results_and_tables():
    Path("my_task.py").write_text(TASK, encoding="utf-8")
    result = run("--set", "data={task: my_task:Vowels, limit: 2}")
    for entry in records():
        text = entry["text"]
        assert entry["scores"] == {"long": float(len(text) > int(entry["sample"])), "vowels": len(text) % 2}
    rows = json.loads(Path("runs/smoke/results.json").read_text(encoding="utf-8"))["rows"]
    assert all(set(row["scores"]) == {"long", "vowels"} for row in rows)
    assert "vowels" in result.stdout
    assert "vowels" in Path("runs/smoke/report.md").read_text(encoding="utf-8")


# Catches: a control that is not truncated, that drafts, or that stands beside rules without a nucleus.
def test_controls_sample_plainly_with_the_nucleus_of_each_rule():
    rules = "verifiers=[{use: standard}, {use: nucleus, theta: 0.6}, {use: nucleus, theta: 0.6, children: all}]"
    run("--set", rules, "--set", "report.controls=true")
    control = {entry["sample"]: entry for entry in records() if entry["run"] == "top_p=0.6"}
    assert len(control) == 2
    assert all(entry["counters"]["num_draft_tokens"] == 0 for entry in control.values())
    run("--overwrite", "--set", "sampling.top_p=0.6")
    plain = {entry["sample"]: entry["tokens"] for entry in records() if entry["run"] == "autoregressive"}
    assert {sample: entry["tokens"] for sample, entry in control.items()} == plain
    assert not any(entry["run"].startswith("top_p") for entry in records())


# Catches: two controls of one name, a control that is named after what it is not, rules within rules without one.
def test_controls_are_what_they_are_called():
    nested = "{use: gated, inside: {use: nucleus, theta: 0.7}, outside: {use: standard}, begin: 0, end: 1}"
    plain = ", ".join(f"{{use: nucleus, theta: {theta}}}" for theta in (0.5, 0.50000001, 1.0))
    run("--set", f"verifiers=[{plain}, {nested}]", "--set", "report.controls=true")
    found = [entry["run"] for entry in records() if entry["run"].startswith("top_p")]
    assert sorted(found) == sorted(2 * ["top_p=0.5", "top_p=0.50000001", "top_p=0.7"])
    for option in ("sampling.top_p=0.8", "sampling.temperature=0"):
        refused = specdec("run", "smoke", *SMALL, "--set", "report.controls=true", "--set", option)
        assert refused.exit_code == 2
        assert "report.controls: got true with sampling." in refused.stderr


# Catches: names that break the tables they stand in.
def test_names_stay_in_their_cells():
    refused = specdec("validate", "smoke", "--set", r'verifiers=[{use: standard, name: "two\nlines"}]')
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "verifiers[0].name: got 'two\\nlines', wanted a text of one line, not empty" in refused.stderr
    run("--set", r"verifiers=[{use: standard, name: 'a\|b <i>'}]")
    report = Path("runs/smoke/report.md").read_text(encoding="utf-8")
    assert r"| model + a\\\|b &lt;i> " in report


# Catches: a finished run that is overwritten or appended to; --overwrite that keeps old records or an old page, or that
# takes a file that no run wrote.
def test_a_finished_run_is_replaced_only_when_asked():
    run()
    before = records()
    refused = specdec("run", "smoke", *SMALL)
    assert refused.exit_code == 8
    assert refused.stderr == "error: runs/smoke: holds a finished run; try another --output-dir, or --overwrite\n"
    assert refused.stdout == ""
    assert records() == before
    page, mine = Path("runs/smoke/report.html"), Path("runs/smoke/figures/mine.csv")
    page.write_text("old", encoding="utf-8")
    mine.write_text("mine", encoding="utf-8")
    run("--overwrite")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert mine.read_text(encoding="utf-8") == "mine"
    assert len(records()) == len(before)
    assert records() != before  # at least the times


# Catches: a run that starts over, runs a prompt twice, glues a line to one that was cut off, or loses times.
def test_an_interrupted_run_goes_on_where_it_stopped(monkeypatch):
    run("--output-dir", "whole")
    original = comparison._Run._segment
    calls = []

    def stop_at_the_fourth(self, combination, chunk, repeat):
        calls.append(combination.row.label)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, combination, chunk, repeat)

    monkeypatch.setattr(comparison._Run, "_segment", stop_at_the_fourth)
    stopped = specdec("run", "smoke", *SMALL)
    assert stopped.exit_code == 130
    assert stopped.stderr.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in stopped.stderr
    kept = records()
    assert [entry["run"] for entry in kept] == [label for label in LABELS[:3] for _ in range(2)]
    with Path("runs/smoke/samples.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"run": "model + nuc')

    calls.clear()
    calls.extend([""] * 10)
    result = run()
    assert calls[10:] == LABELS[3:]
    assert "resuming, 6 requests are there already" in result.stderr
    assert records()[:6] == kept
    assert without_times(records()) == without_times(records("whole"))
    row = json.loads(Path("runs/smoke/results.json").read_text(encoding="utf-8"))["rows"][0]
    assert row["seconds"]["verify"] == pytest.approx(sum(entry["seconds"]["verify"] for entry in kept[:2]))


# Catches: records of two recipes, of two machines or of other prompts in one file.
def test_an_unfinished_run_of_something_else_is_refused(monkeypatch):
    run()
    Path("runs/smoke/results.json").unlink()
    other = specdec("run", "smoke", *SMALL, "--set", "seed=1")
    assert other.exit_code == 8
    assert "another recipe (seed: 0 there, 1 now); try another --output-dir" in other.stderr
    environment = Path("runs/smoke/environment.json")
    found = json.loads(environment.read_text(encoding="utf-8"))
    found["packages"]["torch"] = "1.0"
    environment.write_text(json.dumps(found), encoding="utf-8")
    elsewhere = specdec("run", "smoke", *SMALL)
    assert elsewhere.exit_code == 8
    assert "begun elsewhere (packages.torch: '1.0' there" in elsewhere.stderr


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_run_is_left_alone(kind):
    # Catches: a thesis chapter that is lost.
    Path("out").write_text("mine") if kind == "file" else Path("out").mkdir()
    if kind == "folder":
        Path("out/mine.txt").write_text("mine")
    result = specdec("run", "smoke", *SMALL, "--output-dir", "out")
    assert result.exit_code == 8
    assert ("is a file" if kind == "file" else "holds files that are no run") in result.stderr


# Catches: a lock that is not taken, is taken after the folder was changed, or outlives the run or the process.
def test_a_folder_that_is_in_use_is_refused():
    code = (
        "import fcntl, time\nfile = open('runs/smoke/.lock')\nfcntl.flock(file, 2)\nprint(flush=True)\ntime.sleep(99)"
    )
    run()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        refused = specdec("run", "smoke", *SMALL, "--overwrite")
        other.kill()
    assert refused.exit_code == 8
    assert refused.stderr == "error: runs/smoke: in use by another run; try another --output-dir\n"
    assert len(records()) == len(LABELS) * 2
    run("--overwrite")


# Catches: a look at the folder that is not repeated under the lock, so that what the other run wrote is lost.
def test_a_run_that_came_and_went_meanwhile_is_kept(monkeypatch):
    original = comparison.encode

    def meanwhile(*arguments):
        monkeypatch.setattr(comparison, "encode", original)
        run()
        return original(*arguments)

    monkeypatch.setattr(comparison, "encode", meanwhile)
    late = specdec("run", "smoke", *SMALL)
    assert late.exit_code == 8
    assert "holds a finished run" in late.stderr
    assert len(records()) == len(LABELS) * 2


# Catches: a record that is counted twice, or a damaged folder that ends in a traceback.
def test_a_damaged_folder_is_told_and_a_double_record_is_dropped():
    run()
    Path("runs/smoke/results.json").unlink()
    samples, config = Path("runs/smoke/samples.jsonl"), Path("runs/smoke/config.yaml")
    written, settings = samples.read_text(encoding="utf-8"), config.read_bytes()
    for junk in ("5", "{}", '{"run": [], "sample": "a", "repeat": 0}', "nonsense", "[" * 100_000):
        samples.write_text(f"{written}{junk}\n", encoding="utf-8")
        refused = specdec("run", "smoke", *SMALL)
        assert (refused.exit_code, len(refused.stderr.splitlines())) == (8, 2), junk
        assert refused.stderr.splitlines()[1].startswith("error: runs/smoke"), junk
    for broken in (b"a: \xff", b"a: ["):
        config.write_bytes(broken)
        refused = specdec("run", "smoke", *SMALL)
        assert refused.exit_code == 8
        assert refused.stderr.startswith("error: runs/smoke/config.yaml")
    config.write_bytes(settings)
    lines = written.splitlines(keepends=True)
    changed = json.dumps({**json.loads(lines[0]), "text": "later"})
    samples.write_text(f"{written}{changed}\n", encoding="utf-8")
    run()
    assert [json.dumps(entry) for entry in records()] == [json.dumps(json.loads(line)) for line in lines]


# Catches: a full disk behind stdout that ends in a traceback, or in Python's own exit code 120.
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("ls", "verifiers"), ("--help",)])
def test_a_stdout_that_is_full_is_one_sentence(arguments, unbuffered):
    code = "from specdec.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 8
    assert done.stderr == (
        "error: stdout: cannot be written: No space left on device; try another place for the output\n"
    )


class Template:
    """A tokenizer with a template that refuses system turns."""

    chat_template = "some"

    def __call__(self, text, **_):
        return {"input_ids": [len(text)]}

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        if turns[0]["role"] == "system":
            raise RuntimeError("System role\nnot supported")
        return turns[0]["content"]


# Catches: what a template raises shown as a traceback, a sample that is not named, a message of several lines.
@pytest.mark.parametrize(
    ("role", "options", "why"),
    [
        ("system", {}, "RuntimeError: System role not supported"),
        ("user", {"tokenize": True}, "TypeError: .*multiple values for keyword argument 'tokenize'"),
    ],
)
def test_a_template_that_refuses_a_sample_is_a_data_error(role, options, why):
    samples = [Sample(id="good", text="a"), Sample(id="bad", messages=({"role": role, "content": "b"},))]
    name = "bad" if role == "system" else "good"
    with pytest.raises(DataError, match=rf"^sample '{name}': cannot become tokens: {why}; try other data\.chat"):
        comparison.encode(samples, Template(), DataSection(chat_template_kwargs=options))


# Catches: tracebacks, wrong exit codes, errors on stdout, problems told one at a time.
@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        (("run", "absent"), 2, ["recipe 'absent': no such file; shipped: "]),
        (("run", "pair"), 2, ["--set target.model=VALUE", "--set drafters.0.model=VALUE"]),
        (
            ("validate", "smoke", "--set", "verifiers.2.thetta=1", "--set", "kv.rows=0"),
            2,
            ["mean 'theta'?", "kv.rows: "],
        ),
        (("run", "smoke", "--set", "target.model=random:nosuch"), 4, ["model 'random:nosuch': "]),
        (("run", "smoke", "--set", "target.device=nosuch"), 4, ["device 'nosuch'"]),
        (("run", "smoke", "--set", "kv.tokens=60"), 6, ["'colours'", "'counting'", "'code'", "'letter'", "'accents'"]),
        (("run", "smoke", "--set", "data.chat_template=true"), 7, ["data.chat_template: true, but"]),
        (("validate", "smoke", "--set", "data.prompt_field=x"), 7, ["smoke.jsonl:1: no field x"]),
        (("show", "nucleos"), 3, ["nucleos: unknown; did you mean 'nucleus'?"]),
        (("ls", "verifier"), 3, ["unknown kind 'verifier'; did you mean 'verifiers'?"]),
    ],
)
def test_an_error_is_one_line_a_problem_and_an_exit_code(arguments, code, lines):
    result = specdec(*arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(lines), result.stderr
    for error, line in zip(errors, lines, strict=True):
        assert line in error


# Catches: a validate that loads a model (this one does not exist) or that counts rows wrongly.
def test_validate_loads_no_model():
    result = specdec("validate", "smoke", "--set", "target.model=no/such/model", "--limit", "3")
    assert result.exit_code == 0
    assert result.stdout.startswith("smoke: valid; 3 prompts x 1 repeats x 7 rows")


# Catches: a built-in that is in no group, an ls of the wrong kind.
def test_ls_lists_every_kind_with_a_line_each():
    everything = specdec("ls").stdout
    for name in ("drafters", "prompt_lookup", "verifiers", "nucleus", "kv", "slab", "continuous", "jsonl"):
        assert name in everything
    only = specdec("ls", "verifiers").stdout
    assert re.search(r"^  nucleus +Keeps what the standard rule keeps", only, re.MULTILINE)
    assert "slab" not in only


# Catches: options without types, defaults or texts; a formula or a source that is not shown.
@pytest.mark.parametrize("name", ["nucleus", "verifiers/nucleus"])
def test_show_says_options_formula_and_source(name):
    text = specdec("show", name).stdout
    for part in (
        "theta: float, default 0.95",
        "mass of the nucleus",
        "Formula: a(x) = 1 if x in S",
        "arXiv:2610.07822",
    ):
        assert part in text
    assert "exactness: lossy" in text
    assert "specdec_plugins.verifiers.nucleus:Nucleus" in text
    assert "model: Any, required" in specdec("show", "drafters/model").stdout
    assert "rows: int, default 8" in specdec("show", "slab").stdout


# Catches: a config.yaml that cannot be run again.
def test_a_runs_config_is_a_recipe():
    run()
    config = Path("runs/smoke/config.yaml")
    assert yaml.safe_load(config.read_text(encoding="utf-8"))["verifiers"][2]["theta"] == 0.95
    result = specdec("run", str(config), "--output-dir", "again")
    assert result.exit_code == 0
    assert without_times(records("again")) == without_times(records())


# Catches: one failing row that takes the others down, or a failure that is not told.
def test_a_row_that_fails_is_recorded_and_the_others_go_on(monkeypatch):
    original = comparison.Target.score

    def poisoned(self, batch, draft, taps=()):
        scores = original(self, batch, draft, taps)
        for index, sequence in enumerate(batch.rows):
            if sequence.request.id == "counting" and sequence.step == 1:
                scores.finite[index] = False
        return scores

    monkeypatch.setattr(comparison.Target, "score", poisoned)
    result = run()
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["errors"] for row in rows] == [1] * len(LABELS)
    assert "(1 of 2 failed)" in result.stdout
    reasons = {entry["sample"]: entry["finish_reason"] for entry in records()}
    assert reasons["counting"] == "error"
    assert reasons["colours"] != "error"


# Catches: an incompatible pair that is found when the run is half done, or alone.
def test_pairs_that_do_not_fit_are_all_named():
    Path("needy.py").write_text(
        "from attrs import frozen\n"
        "from specdec_plugins.verifiers.standard import Standard\n"
        "from specdec import PointwiseVerifier\n"
        "@frozen(kw_only=True)\n"
        "class Needy(PointwiseVerifier):\n"
        "    family = 'other'\n"
        "    exactness = 'lossy'\n"
        "    needs = frozenset({'draft_law'})\n"
        "    def acceptance(self, at):\n"
        "        return at.p\n"
    )
    result = specdec(
        "run", "smoke", "--set", "verifiers=[{use: 'needy:Needy'}, {use: 'needy:Needy', name: two}]", "--limit", "1"
    )
    assert result.exit_code == 5
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [error.split(": ")[1] for error in errors] == ["prompt_lookup + needy:Needy", "prompt_lookup + two"]


# Catches: imports at the top of the command line that make every call slow.
@pytest.mark.parametrize("arguments", [("--version",), ("ls",), ("--help",)])
def test_quick_commands_load_no_model_library(arguments):
    code = (
        "import sys\nfrom specdec.cli import main\n"
        f"main({list(arguments)!r}, standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'slow'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
