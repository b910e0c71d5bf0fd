"""Constraints written in TOML: one boolean expression over named numbers and strings, and nothing else.

`batch * kv_len <= 1048576 and num_warps in (4, 8)` is parsed once, when its file is loaded; what it may hold is a list
of syntax nodes below, checked before simpleeval ever sees it. Numbers stay below 2^63 in size, so that no expression
can take long. There are no attributes, no indexing, no calls but `min`, `max`, `cdiv`.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kerneltune.errors import UserError

MAX_LENGTH = 1000  # characters of one expression
MAX_DEPTH = 30  # nested syntax nodes; simpleeval recurses three frames for each
MAX_NUMBER = 2**63
MAX_EXPONENT = 63


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    _numbers(a, b)
    return -(-a // b)


FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "cdiv": cdiv}

_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.Call, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)


@dataclass(frozen=True)
class Expression:
    """A parsed constraint. Call it with the values of its names."""

    text: str
    origin: str  # for messages: "moe.toml: where[2].rule"
    names: frozenset[str]  # the names it reads
    flags: frozenset[str]  # those that stand where true or false must
    tree: ast.expr = field(compare=False, repr=False)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """True or false for these values.

        Raises:
            UserError: it cannot be evaluated (division by zero, a string in arithmetic).
        """
        for name in self.flags:
            if not isinstance(values.get(name), bool):
                raise UserError(f"{self.origin}: {self.text!r}: {name} is {values.get(name)!r}, expected true or false")
        try:
            return bool(_evaluator(values).eval(self.text, previously_parsed=self.tree))
        except Exception as error:  # whatever simpleeval or an operator says about these values
            given = ", ".join(f"{name}={values.get(name)!r}" for name in sorted(self.names))
            raise UserError(f"{self.origin}: {self.text!r} cannot be evaluated: {error} (with {given})") from None


def parse_expression(text: object, known: Collection[str], origin: str) -> Expression:
    """Parse and check one constraint.

    Args:
        text: the expression, as read from a file.
        known: the names it may use.
        origin: file and key, named by every error.

    Raises:
        UserError: not one boolean expression of the allowed parts over known names.
    """
    if not isinstance(text, str):
        raise UserError(f"{origin}: expected an expression in quotes, got {text!r:.80}")
    if len(text) > MAX_LENGTH:
        raise UserError(f"{origin}: an expression has at most {MAX_LENGTH} characters, got {len(text)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a string literal, say
            tree = ast.parse((text if "#" in text else text.replace("\n", " ")).strip(), mode="eval")
            depth = _depth(tree)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        detail = error.msg if isinstance(error, SyntaxError) else "nested too deeply or not text"
        raise UserError(f"{origin}: {text!r:.200} is not an expression: {detail}") from None
    if depth > MAX_DEPTH:
        raise UserError(f"{origin}: {text!r:.200} is nested more than {MAX_DEPTH} deep")
    names: set[str] = set()
    for node in ast.walk(tree):
        _check_node(node, text, origin)
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
            names.add(node.id)
    for name in sorted(names):
        if name not in known:
            raise UserError(f"{origin}: unknown name {name!r} in {text!r:.200}{suggest(name, known)}")
    flags = _flags(tree.body)
    if flags is None:
        raise UserError(f"{origin}: {text!r:.200} is not true or false; expected a comparison, or several with and, or")
    return Expression(text.strip(), origin, frozenset(names), frozenset(flags), tree.body)


def suggest(name: str, known: Collection[str]) -> str:
    """`: did you mean 'x'?`, or the list of what there is."""
    close = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f": did you mean {close[0]!r}?" if close else f": expected one of {', '.join(known)}"


def _check_node(node: ast.AST, text: str, origin: str) -> None:
    wrong = ""
    if not isinstance(node, _ALLOWED):
        wrong = f"{type(node).__name__} is not allowed"
    elif isinstance(node, ast.Constant):
        if not isinstance(node.value, bool | int | float | str):
            wrong = f"the literal {node.value!r:.40} is not allowed"
        elif not isinstance(node.value, str) and not abs(node.value) < MAX_NUMBER:
            wrong = "a number is too large"
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            wrong = f"only {', '.join(FUNCTIONS)} can be called"
        elif node.keywords:
            wrong = f"{node.func.id} takes no named arguments"
    if wrong:
        allowed = "names, literals, arithmetic, comparisons, in, and, or, not, min, max, cdiv"
        raise UserError(f"{origin}: {text!r:.200}: {wrong} (expected only {allowed})")


def _flags(node: ast.expr) -> set[str] | None:
    """The names that must be true or false for `node` to be; None: it is a number, a text or a list in any case."""
    if isinstance(node, ast.BoolOp):
        parts = [_flags(value) for value in node.values]
        return None if None in parts else set().union(*(part for part in parts if part))
    if isinstance(node, ast.UnaryOp):
        return _flags(node.operand) if isinstance(node.op, ast.Not) else None
    if isinstance(node, ast.Name):
        return {node.id} if node.id not in FUNCTIONS else None
    is_boolean = isinstance(node, ast.Compare) or (isinstance(node, ast.Constant) and isinstance(node.value, bool))
    return set() if is_boolean else None


def _depth(node: ast.AST) -> int:
    return 1 + max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)


def _numbers(*values: Any) -> None:
    for value in values:
        if not isinstance(value, int | float):
            raise TypeError(f"expected a number, got {value!r:.40}")


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on numbers only, with a result below MAX_NUMBER in size."""

    def checked(*values: Any) -> Any:
        _numbers(*values)
        result = function(*values)
        if not (isinstance(result, int) or math.isfinite(result)) or abs(result) >= MAX_NUMBER:
            raise OverflowError("a number became too large")
        return result

    return checked


def _power(base: Any, exponent: Any) -> Any:
    if not 0 <= exponent <= MAX_EXPONENT:
        raise OverflowError(f"expected an exponent from 0 to {MAX_EXPONENT}, got {exponent}")
    return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: _arithmetic(operator.add),
    ast.Sub: _arithmetic(operator.sub),
    ast.Mult: _arithmetic(operator.mul),
    ast.Div: _arithmetic(operator.truediv),
    ast.FloorDiv: _arithmetic(operator.floordiv),
    ast.Mod: _arithmetic(operator.mod),
    ast.Pow: _arithmetic(_power),
    ast.USub: _arithmetic(operator.neg),
    ast.UAdd: _arithmetic(operator.pos),
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


def _evaluator(values: Mapping[str, Any]) -> Any:
    """A simpleeval evaluator that also knows lists and tuples; parse_expression has let nothing else through."""
    from simpleeval import EvalWithCompoundTypes

    return EvalWithCompoundTypes(operators=_OPERATORS, functions=dict(FUNCTIONS), names=dict(values))
