import pytest

from specdec.code_blocks import code_of, defines

F, G = "def f(x):\n    return x\n", "def g(x):\n    return x, x\n"


def block(code, language="python", indent=""):
    return "\n".join(indent + line for line in [f"```{language}", *code.splitlines(), "```"]) + "\n"


# Catches: the first block taken, a usage example behind it, a label that is not known, a cut answer lost.
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"Sure!\n{block(F)}Bye.", F),
        (block(G) + block(F), F),
        (block(F) + block("print(f(2))"), F),
        (block(F) + "\nused as\n" + block("f(2)", ""), F),
        (block("print(1)") + block("print(2)") + block("pip install a b c d e", "bash"), "print(2)\n"),
        (block("short", "") + block("longer than that", "text"), "longer than that\n"),
        (block(F, "Python"), F),
        (block(F, "py"), F),
        (f"```python\n{F}", F),
        (f"```python\n{F}\n", f"{F}\n"),
        (f"1. Do it so:\n{block(F, indent='   ')}", F),
        (f"Answer: {block(F)}", F),
        (f"````python\n{F}````", F),
        (block("    return x"), "    return x\n"),
        ("```python\r\ndef f(x):\r\n    return x\r\n```", F),
        ("    return x\n", "    return x\n"),
        ("", ""),
    ],
)
def test_the_program_is_found_in_an_answer(text, wanted):
    assert code_of(text, "f") == wanted


# Catches: a call, a nested function, a longer name or a comment taken for the definition.
@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (F, True),
        ("async def f(): pass", True),
        ("class f: pass", True),
        ("f = lambda x: x", True),
        ("f: object = 1", True),
        ("from a import b\ndef  f (x): pass", True),
        ("print(f(2))", False),
        ("def g():\n    def f(): pass", False),
        ("def ff(x): pass", False),
        ("# def f(x)", False),
        ("", False),
    ],
)
def test_a_definition_is_one_at_the_left_margin(code, wanted):
    assert defines(code, "f") is wanted
