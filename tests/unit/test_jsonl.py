import gzip
import json

import pytest

from specdec.errors import DataError
from specdec_plugins.tasks.jsonl import Jsonl


def write(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


# Catches: a field that is not looked for, a later turn that is appended, a line number that counts from 0.
def test_every_known_field_gives_a_prompt_and_an_id(tmp_path):
    turn = {"role": "user", "content": "e"}
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "a", "id": 7},
        {"question": "b", "task_id": "t"},
        "",
        {"turns": ["c", "later"], "question_id": 81},
        {"text": "d"},
        {"messages": [turn]},
    )
    samples = Jsonl().samples(file, None)
    assert [(s.id, s.text) for s in samples[:4]] == [("7", "a"), ("t", "b"), ("81", "c"), ("5", "d")]
    assert samples[4].messages == (turn,)
    assert samples[4].text is None


# Catches: a limit that is applied after the whole file was judged, or that counts blank lines.
def test_nothing_behind_the_limit_is_read(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "a"}, "", {"prompt": "b"}, "broken")
    assert [sample.text for sample in Jsonl().samples(file, 2)] == ["a", "b"]


# Catches: gz opened as text.
def test_a_gz_file_is_unpacked(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert Jsonl().samples(str(path), None)[0].text == "a"


# Catches: the option ignored when a preferred field is there too.
def test_prompt_field_wins(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "story": "b"})
    assert Jsonl(prompt_field="story").samples(file, None)[0].text == "b"


# Catches: a message without file and line, a row that is skipped, an empty prompt that reaches the engine.
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "a"', {"prompt": "b"}], r"a\.jsonl:1:\d+: not JSON"),
        ([{"prompt": "a"}, ["b"]], r"a\.jsonl:2: got list, wanted an object"),
        ([{"answer": "a"}], r"a\.jsonl:1: no field messages or .*it has 'answer'"),
        ([{"prompt": 5}], r"a\.jsonl:1: field 'prompt' is 5, wanted a text"),
        ([{"prompt": ""}], r"a\.jsonl:1: field 'prompt' is \"\""),
        ([{"turns": []}], r"a\.jsonl:1: field 'turns' is \[\], wanted a list that begins with a text"),
        ([{"messages": [{"role": "user"}]}], r"a\.jsonl:1: field 'messages'"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], r"a\.jsonl:2: id '1' is also line 1's"),
        ([{"prompt": "a", "id": ""}], r"a\.jsonl:1: the id is an empty text"),
        ([{"prompt": "a", "id": "\ud800"}], r"a\.jsonl:1: got '\\ud800' in the id or the prompt"),
        ([{"prompt": "a"}, {"prompt": "b\ud800"}], r"a\.jsonl:2: got '\\ud800' in the id or the prompt"),
        ([{"messages": [{"role": "user", "content": "\udfff"}]}], r"a\.jsonl:1: got '\\udfff'"),
        (['{"prompt": "a", "n": ' + "9" * 5000 + "}"], r"a\.jsonl:1: cannot be read: Exceeds the limit"),
        (['{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"], r"a\.jsonl:1: nested too deeply"),
        ([], r"a\.jsonl: empty"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(tmp_path, rows, message):
    file = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError, match=message):
        Jsonl().samples(file, None)


# Catches: what gzip and zlib raise for a damaged file: OSError, EOFError, zlib.error.
@pytest.mark.parametrize(
    "damage", [lambda good: b"no gz", lambda good: good[:-9], lambda good: good[:12] + b"\xff" * 9]
)
def test_a_damaged_gz_file_is_a_data_error(tmp_path, damage):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"prompt": "a"}\n')))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read"):
        Jsonl().samples(str(path), None)


# Catches: a FileNotFoundError with a traceback.
@pytest.mark.parametrize("file", ["missing.jsonl", None])
def test_a_missing_file_is_a_data_error(file):
    with pytest.raises(DataError, match="missing"):
        Jsonl().samples(file, None)
