"""Recording: what a run leaves in its folder `traces`, and what becomes of it when the run is cut off."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from specdec import Engine, Request, Sampling, Target, recorder
from specdec.cli import main
from specdec.errors import DataError, OutputError
from specdec.trace import Shard, Trace
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard

FULL = pytest.mark.full
RECIPE = {
    "target": {"model": "random:llama", "dtype": "float32"},
    "drafters": [{"use": "model", "name": "model", "model": "random:llama:1", "num_speculative_tokens": 3}],
    "verifiers": [{"use": "standard"}, {"use": "nucleus"}],
    "kv": {"rows": 2, "tokens": 128},
    "sampling": {"temperature": 1.0, "max_new_tokens": 12},
    "data": {"file": "p.jsonl"},
    "report": {"repeats": 2, "trace": "full"},
    "output_dir": "out",
}
PROMPTS = ("one two one two", "abc", "a longer prompt than the others")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with recipe, prompts and a finished run with full traces."""
    folder = tmp_path_factory.mktemp("prepared")
    rows = [json.dumps({"id": f"p{index}", "prompt": text}) for index, text in enumerate(PROMPTS)]
    (folder / "p.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run()
    return folder


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch, prepared):
    """Each test has a folder of its own. The prompts are where they were, for that is compared before a run goes on."""
    recipe = RECIPE | {"data": {"file": str(prepared / "p.jsonl")}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def finished(prepared):
    """The finished run, copied."""
    shutil.copytree(prepared / "out", "out")


def run(*changes):
    arguments = [part for change in changes for part in ("--set", change)]
    done = CliRunner().invoke(main, ["run", "r.yaml", "--quiet", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr


def samples():
    lines = Path("out/samples.jsonl").read_text(encoding="utf-8").splitlines()
    return {(record["run"], record["sample"], record["repeat"]): record["tokens"] for record in map(json.loads, lines)}


def spelled():
    """The tokens of every request, put together from its steps, which must be 0, 1, 2, ..."""
    trace = Trace.open(Path("out"))
    texts, numbers = {}, {}
    for index, row in trace.rows.items():
        for steps in trace.steps(index):
            emitted = steps["emitted"].split(steps["emitted_count"].tolist())
            for request, step, tokens in zip(steps["request"].tolist(), steps["step"].tolist(), emitted, strict=True):
                key = (row["label"], *steps.requests[request])
                texts.setdefault(key, []).extend(tokens.tolist())
                numbers.setdefault(key, []).append(step)
    assert all(found == list(range(len(found))) for found in numbers.values())
    return texts


# Catches: a step of a short row that is lost or recorded twice, a repeat or a sample mixed up with another, the
# baseline or the warm-up recorded, rows of a batch in another order than their tensors.
@pytest.mark.parametrize("kind", ["full", "compact"])
def test_the_steps_of_every_drafted_request_spell_its_sample(kind):
    run(f"report.trace={kind}")
    assert spelled() == {key: tokens for key, tokens in samples().items() if key[0] != "autoregressive"}


# Catches: shards that only the user who recorded them can read, beside results that everybody can.
def test_who_may_read_a_trace_is_for_the_umask_to_say(finished):
    Path("plain").touch()
    assert {path.stat().st_mode for path in Path("out/traces").iterdir()} == {Path("plain").stat().st_mode}


# Catches: p or q of another place, probabilities that are not the very ones the rule saw, laws cut to another dtype.
def test_a_full_trace_holds_what_the_rule_saw(monkeypatch):
    seen = []
    call = recorder.Recorder.__call__

    def watched(self, batch, draft, scores, verdict, kept):
        if self._repeat == 0 and self._row == 1:
            for row, sequence in enumerate(batch.rows):
                size = int(draft.sizes[row])
                key = (sequence.request.id, batch.noise.steps[row])
                law = draft.law.dense()[row, :size] if size else None
                seen.append((key, draft.tokens[row, :size], scores.probs[row, : size + 1], law))
        call(self, batch, draft, scores, verdict, kept)

    monkeypatch.setattr(recorder.Recorder, "__call__", watched)
    monkeypatch.setattr(recorder, "SHARD_BYTES", 20_000)  # several shards a chunk
    run()
    found = {}
    shards = list(Trace.open(Path("out")).steps(1))
    assert len(shards) > 8
    for steps in shards:
        starts = steps.first.tolist()
        for index, (start, size) in enumerate(zip(starts, steps["size"].tolist(), strict=True)):
            sample, repeat = steps.requests[steps["request"][index]]
            if repeat == 0:
                places = slice(start, start + size)
                p = steps["p"][start + index : start + index + size + 1]
                law = steps["q"][places] if size else None
                found[sample, int(steps["step"][index])] = (steps["draft"][places], p, law)
    assert len(found) == len(seen)
    for key, *tensors in seen:
        for one, other in zip(tensors, found[key], strict=True):
            assert one is other is None or torch.equal(one, other)


# Catches: raw logits written for recipes that need none, or missing where a rule looks at them.
@pytest.mark.usefixtures("finished")
def test_raw_logits_are_kept_where_a_rule_needs_them():
    assert "logits" not in next(Trace.open(Path("out")).steps(1)).tensors
    run("verifiers.1.use=mars", "output_dir=other")
    steps = next(Trace.open(Path("other")).steps(1))
    assert steps["logits"].shape == steps["p"].shape


# Catches: a chunk that is counted before it is whole, shards of a chunk without samples that stay, requests traced
# twice after an append that was cut off between two lines.
@pytest.mark.parametrize("lines", [pytest.param(0, marks=FULL), 1, pytest.param(5, marks=FULL)])
@pytest.mark.usefixtures("finished")
def test_a_run_that_was_cut_off_goes_on_with_whole_traces(lines):
    whole = spelled()
    for kept in range(2):
        Path("out/results.json").unlink()
        # What a kill between shards and samples leaves: steps whose samples are not there.
        written = Path("out/samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        Path("out/samples.jsonl").write_text("".join(written[: lines + kept]), encoding="utf-8")
        with Path("out/traces/shards.jsonl").open("a") as file:
            file.write('{"file": "1-99.safe')
        Path("out/traces/1-99.safetensors").write_bytes(b"half")
        run()
        assert spelled() == whole
        named = {shard.file for shard in Trace.open(Path("out")).shards}
        assert {path.name for path in Path("out/traces").glob("*.safetensors")} == named


KILLED = """
import os, signal, sys
from specdec.cli import main
from specdec.recorder import Recording
from specdec.rundir import RunFolder
cls = {'append': RunFolder, 'count': Recording, 'save': Recording}[sys.argv[1]]
plain, calls = getattr(cls, sys.argv[1]), []
def killed(self, *arguments):
    calls.append(self)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *arguments)
setattr(cls, sys.argv[1], killed)
main(['run', 'r.yaml', '--quiet', '--overwrite'])
"""


# Catches: steps lost or doubled by a kill before a shard is written, before it counts, or before its samples are there.
@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("before", [pytest.param("save", marks=FULL), "count", pytest.param("append", marks=FULL)])
def test_a_killed_run_goes_on_with_whole_traces(before):
    whole = spelled()
    done = subprocess.run([sys.executable, "-c", KILLED, before], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 0 < len(samples()) < 18
    run()
    assert spelled() == whole


# Catches: a trace that is written unasked, traces of an overwritten run that stay.
@pytest.mark.usefixtures("finished")
def test_without_the_option_there_is_no_trace():
    assert Path("out/traces").exists()
    CliRunner().invoke(main, ["run", "r.yaml", "--quiet", "--overwrite", "--set", "report.trace=none"])
    assert not Path("out/traces").exists()


# Catches: a tree that reaches the recorder, which holds chains.
def test_a_drafter_of_trees_cannot_be_traced():
    drafter = "drafters=[{use: model, model: random:llama:1, branches: [2, 1]}]"
    arguments = ["--set", drafter, "--set", "verifiers=[{use: standard}]"]
    done = CliRunner().invoke(main, ["validate", "r.yaml", *arguments])
    assert done.exit_code == 5
    assert done.stderr.count("\n") == 1
    assert "drafters[0]: drafts trees, and report.trace records chains" in done.stderr
    assert CliRunner().invoke(main, ["validate", "r.yaml", *arguments, "--set", "report.trace=none"]).exit_code == 0


# Catches: time of the recording that is charged to draft, verify or rest.
def test_recording_is_not_in_the_time_of_the_steps():
    target = Target.load("random:llama", kv=Slab(rows=1, tokens=64))
    told = []

    def trace(*step):
        told.append(len(step))
        time.sleep(0.2)

    drafter = PromptLookup(num_speculative_tokens=2)
    engine = Engine(target, drafter, Standard(), Continuous(), trace=trace)
    engine.generate([Request(prompt=(1, 2, 1, 2), sampling=Sampling(max_new_tokens=4, ignore_eos=True))])
    assert told == [5] * engine.steps
    assert sum(engine.seconds) < 0.2 * engine.steps


# Catches: a stack trace, or a wrong figure, from a shard that is gone, cut off or another one.
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cut off"),
        (lambda path: path.write_bytes(b""), "cut off"),
        (lambda path: path.write_bytes(Path("out/traces/1-1.safetensors").read_bytes()[:40]), "cut off"),
    ],
)
@pytest.mark.usefixtures("finished")
def test_a_broken_shard_is_one_sentence(break_it, said):
    trace = Trace.open(Path("out"))
    path = trace.path / next(shard.file for shard in trace.shards if shard.row == 2)
    break_it(path)
    with pytest.raises(DataError, match=said) as caught:
        list(trace.steps(2))
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


# Catches: tensors of different lengths read as if they belonged together.
@pytest.mark.usefixtures("finished")
def test_a_shard_whose_tensors_do_not_fit_is_refused():
    trace = Trace.open(Path("out"))
    steps = next(trace.steps(1))
    assert steps.problem() is None
    shorter = dict(steps.tensors) | {"q": steps["q"][:-1]}
    assert "entries of q" in type(steps)(steps.law, steps.requests, shorter).problem()


# Catches: a line that is no shard taken for one, or an index of a later version read as ours.
@pytest.mark.usefixtures("finished")
def test_what_is_no_index_is_one_sentence():
    index = Path("out/traces/index.json")
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"schema_version": 2}))
    with pytest.raises(DataError, match="schema version 2, wanted 1"):
        Trace.open(Path("out"))
    index.write_text("{")
    with pytest.raises(DataError, match=r"index\.json: cannot be read"):
        Trace.open(Path("out"))
    index.write_text(json.dumps(content))
    Path("out/traces/shards.jsonl").write_text("[]\n")
    with pytest.raises(DataError, match=r"shards\.jsonl:1: is not the line of a shard"):
        Trace.open(Path("out"))
    with pytest.raises(DataError, match="holds no traces"):
        Trace.open(Path("elsewhere"))


# Catches: a full disk, or a folder without rights, as a stack trace.
def test_a_folder_that_cannot_be_written_is_one_sentence():
    recording = recorder.Recording(Path("gone"), "full", logits=False, about={})
    with pytest.raises(OutputError, match="gone: cannot be written"):
        recording.count([Shard("1-1.safetensors", 1, "dense", [("p0", 0)])])


# Catches: masks of one extent used for another, so that a selection mixes steps.
def test_selected_steps_are_the_same_as_before():
    run("report.trace=compact")
    for steps in Trace.open(Path("out")).steps(2):
        wanted = torch.arange(len(steps)) % 3 == 1
        chosen = steps.select(wanted)
        assert chosen.problem() is None
        whole = steps["ids"].split(steps["kept"].tolist())
        places = torch.arange(len(steps["draft"])).split(steps["size"].tolist())
        expected = [whole[place] for step in wanted.nonzero().flatten().tolist() for place in places[step].tolist()]
        assert torch.equal(chosen["ids"], torch.cat(expected))
        assert torch.equal(chosen["emitted"], steps["emitted"][wanted.repeat_interleave(steps["emitted_count"])])


# Catches: a run that goes on although the steps of finished samples are gone, and a replay that then knows fewer.
@pytest.mark.usefixtures("finished")
def test_steps_that_are_gone_are_told_when_a_run_goes_on():
    Path("out/results.json").unlink()
    shutil.rmtree("out/traces")
    done = CliRunner().invoke(main, ["run", "r.yaml", "--quiet"])
    assert done.exit_code == 8
    assert "has no steps of sample" in done.stderr
