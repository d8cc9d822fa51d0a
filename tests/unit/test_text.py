import itertools
from collections.abc import Iterator

import pytest

from specdec.loading import byte_tokenizer
from specdec.text import TextStream

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = "aé中🙂👩‍👩‍👧 z"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


class Pieces:
    """A tokenizer whose ids are given pieces of text, as long as wanted."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.pieces[index] for index in ids)


class ByteGroups:
    """A tokenizer whose ids are groups of bytes, so that a token may end inside a character."""

    def __init__(self, groups: list[bytes]) -> None:
        self.groups = groups

    def decode(self, ids: list[int], **_: object) -> str:
        return b"".join(self.groups[index] for index in ids).decode("utf-8", errors="replace")


def ids_of(tokenizer, data: bytes) -> list[int]:
    """One id per byte, also for bytes that are no text."""
    index_of = {_byte(symbol): index for symbol, index in tokenizer.get_vocab().items() if len(symbol) == 1}
    return [index_of[value] for value in data]


def _byte(symbol: str) -> int:
    """The byte that a byte-level symbol stands for: printable ones themselves, the others from 256 up in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return ord(symbol) if ord(symbol) < 256 else others[ord(symbol) - 256]


def run(stream: TextStream, ids: list[int]) -> list[str]:
    """All pieces; after each one the text is what they add up to and has not shrunk."""
    pieces = []
    for index in ids:
        before = stream.text
        pieces.append(stream.push(index))
        assert stream.text == before + pieces[-1]
    pieces.append(stream.close())
    assert stream.text == "".join(pieces)
    return pieces


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut data into groups."""
    for cuts in itertools.product((False, True), repeat=len(data) - 1):
        groups, start = [], 0
        for index, cut in enumerate(cuts, 1):
            if cut:
                groups.append(data[start:index])
                start = index
        yield [*groups, data[start:]]


def test_the_stream_of_bytes_adds_up_to_the_text(tokenizer):
    # One id per byte: catches decoding token by token.
    stream = TextStream(tokenizer)
    pieces = run(stream, ids_of(tokenizer, TEXT.encode()))
    assert stream.text == TEXT
    assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("text", ["é中🙂", "🙂a🙂", "中文字", "a\u0301z🙂"])
def test_every_split_of_the_bytes_gives_the_same_text_without_broken_characters(text):
    # All cuts; catches a piece released in the middle of a character, and one lost at a cut.
    for groups in splits(text.encode()):
        stream = TextStream(ByteGroups(groups))
        pieces = run(stream, list(range(len(groups))))
        assert stream.text == text
        assert not any(BROKEN in piece for piece in pieces)


def test_a_whole_character_is_released_at_once(tokenizer):
    # Holding back more than the incomplete character would delay streams.
    stream = TextStream(tokenizer)
    shown = [stream.push(index) for index in ids_of(tokenizer, "a中b".encode())]
    assert shown == ["a", "", "", "中", "b"]


@pytest.mark.parametrize("data", [b"\xf0\x9f\x99", b"a\xe4\xb8", b"\xffz", b"\xf0\xe4\xb8\xad", b"\xc3\xc3\xa9"])
def test_really_broken_bytes_become_replacement_characters_as_in_batch_decoding(tokenizer, data):
    # Catches text that is held back for ever, and a good character lost beside a broken one.
    ids = ids_of(tokenizer, data)
    stream = TextStream(tokenizer)
    run(stream, ids)
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert BROKEN in stream.text


def test_special_tokens_have_no_text(tokenizer):
    stream = TextStream(tokenizer)
    run(stream, [*ids_of(tokenizer, b"ab"), 256, *ids_of(tokenizer, b"c")])
    assert stream.text == "abc"


def test_long_text_is_decoded_in_windows(tokenizer):
    # Catches a window that drops or repeats what lies before it.
    text = TEXT * 40
    stream = TextStream(tokenizer)
    run(stream, ids_of(tokenizer, text.encode()))
    assert stream.text == text


class Stripping(Pieces):
    """Drops the space before the first word of what it decodes, as sentence-piece tokenizers do."""

    def decode(self, ids: list[int], **_: object) -> str:
        return super().decode(ids).removeprefix(" ")


def test_spaces_between_words_survive_a_tokenizer_that_strips_the_first():
    # Catches decoding a window without the token before it.
    tokenizer = Stripping(" Hello", " big", " world", "s", " ", " again")
    stream = TextStream(tokenizer)
    run(stream, list(range(6)))
    assert stream.text == tokenizer.decode(list(range(6)))


# Stop strings.


def reference(text: str, stops: tuple[str, ...]) -> str:
    """Character by character: the text ends before the stop string that is completed first."""
    for end in range(len(text) + 1):
        done = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: min(done)]
    return text


STOPS = [
    ("END",),
    ("中文",),
    ("aab",),
    ("ab", "abc"),
    ("bc", "abcd"),
    ("b", "ab"),
    ("\n\n", "\nX"),
    ("zzz",),
    ("aa",),
]
TEXTS = ["xxENDyy", "ENEND", "前中中文后", "aaab", "zabcd", "abcd", "q\nX", "q\n\n", "zz", "aa", "EN", "baab"]


@pytest.mark.parametrize("stops", STOPS)
def test_the_text_ends_before_the_stop_string_however_tokens_split_it(stops):
    # Every text in every split: catches a stop string over two tokens, one inside a token, prefixes shown too early,
    # and an answer that depends on where tokens end.
    for text in TEXTS:
        for groups in splits(text.encode() if len(text.encode()) < 9 else text.encode()[:9]):
            whole = b"".join(groups).decode(errors="replace")
            if BROKEN in whole:
                continue
            stream = TextStream(ByteGroups(groups), stops)
            run(stream, list(range(len(groups))))
            assert stream.text == reference(whole, stops), groups
            assert stream.stopped == any(stop in whole for stop in stops)


def test_what_may_begin_a_stop_string_is_held_back_and_no_more():
    # Catches prefixes that are shown, and text held back that cannot become a stop string any more.
    stream = TextStream(Pieces("Hello E", "N", "Z", " EN", "D more"), ("END",))
    assert [stream.push(index) for index in range(5)] == ["Hello ", "", "ENZ", " ", ""]
    assert stream.stopped
    assert stream.text == "Hello ENZ "


def test_held_text_is_released_at_the_end():
    stream = TextStream(Pieces("Hello E", "N"), ("END",))
    assert [stream.push(0), stream.push(1), stream.close()] == ["Hello ", "", "EN"]
    assert not stream.stopped


def test_nothing_is_shown_after_a_stop():
    # Catches a stream that goes on when a block has more tokens.
    stream = TextStream(Pieces("a", "STOP", "b"), ("STOP",))
    assert [stream.push(0), stream.push(1), stream.push(2), stream.close()] == ["a", "", "", ""]
    assert stream.text == "a"


def test_a_stop_string_that_a_held_character_completes_stops():
    # The last character of the stop string arrives in three bytes.
    stream = TextStream(ByteGroups([b"x\xe4", b"\xb8", b"\xadz"]), ("x中",))
    assert [stream.push(0), stream.push(1)] == ["", ""]
    assert not stream.stopped
    assert stream.push(2) == ""
    assert stream.stopped
    assert stream.text == ""
