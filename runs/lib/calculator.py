"""The calculator of tool calls: numbers, + - * / // % **, and 'text'.count('part').

    calculate("1,000 * 3 / 2")  ->  "1500"

What a model writes is taken apart by rules, never executed.
"""

import ast
import math
import operator
import re

LEXEME = re.compile(
    r"""
    '[^'\\\n]*' | "[^"\\\n]*" | \.count\b           # texts, and the one method they have
    | (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ )          # 1,000 or 1000
      (?: \.\d* )? (?: [eE][-+]?\d+ )?
    | \.\d+ | [-+*/%()\ ]
    """,
    re.VERBOSE,
)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: a**b if abs(b) <= 100 else math.nan,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(node: ast.AST, depth: int = 100) -> int | float:
    """The value of a syntax tree that holds nothing but arithmetic and .count.

    Raises: ValueError for anything else, for more than `depth` levels, and for numbers of 1e30 or
            more; ArithmeticError for a division by zero or an overflow
    """
    match node:
        case ast.Constant(value=int() | float() as value):
            x = value
        case ast.UnaryOp() if depth:
            x = OPERATORS[type(node.op)](evaluate(node.operand, depth - 1))
        case ast.BinOp() if depth:
            left = evaluate(node.left, depth - 1)
            right = evaluate(node.right, depth - 1)
            x = OPERATORS[type(node.op)](left, right)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            x = text.count(part)
        case _:
            raise ValueError
    if isinstance(x, complex) or not abs(x) < 1e30:
        raise ValueError
    return x


def calculate(expression: str) -> str | None:
    """The result of an expression, or None if it is anything else.

    Length, depth and the size of every number are bounded, and with them time and memory.
    """
    text = expression.strip()
    parts = LEXEME.findall(text)
    if len(text) > 256 or "".join(parts) != text:
        return None

    # Python does not read 1,000 as a number.
    plain = "".join(part.replace(",", "") if part[0].isdigit() else part for part in parts)
    try:
        x = evaluate(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None

    if isinstance(x, int) or (abs(x) < 1e15 and x.is_integer()):
        return str(int(x))
    return f"{x:.12g}"
