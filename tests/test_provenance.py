"""A comment or a docstring changes no hash; a constant does; the Python that computes it does not matter."""

from __future__ import annotations

from kerneltune.provenance import code_only

SOURCE = '''"""What it is."""

import triton  # the compiler

LIMIT = 64  # keys


@triton.jit
def kernel(x):
    """Doc
    of two lines."""
    text = f"a{x!r}b"  # not "a # comment"
    return "# kept", text, LIMIT
'''


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    other = SOURCE.replace("# the compiler", "").replace("of two lines", "that says more").replace("\n\n\n", "\n\n")
    assert code_only(other) == code_only(SOURCE)


def test_a_constant_counts() -> None:
    assert code_only(SOURCE.replace("64", "128")) != code_only(SOURCE)


def test_the_text_is_the_code_itself() -> None:
    assert code_only(SOURCE) == (
        "import triton\nLIMIT = 64\n@triton.jit\ndef kernel(x):\n"
        '    text = f"a{x!r}b"\n    return "# kept", text, LIMIT'
    )
