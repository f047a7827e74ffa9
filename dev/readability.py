"""The budgets of this repository: how long its files are, and how dense the long ones read. Signs, not the aim.

    python dev/readability.py              every figure beside its limit
    python dev/readability.py --check      also exits with 1 if a figure is beyond its limit

lines      of a file, or of all files of a folder (wc -l)
step ends  last line that a reader of one training step needs, kernels left out
tuples     tuple = tuple assignments (`a, b = 1, f(x)`) per 100 lines of code
long %     percentage of lines over 100 characters
longest    lines of the longest function that is no kernel

The last three are for Python files of more than 300 lines, but not for tests.
"""

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# runs: 8,600, and 600 for portable models, JSON schemas and LoRA.
LINES = {
    "train_small.py": 4290,  # of them 90 for the portable recipe
    "train_medium.py": 4430,
    "runs/**/*.py": 9740,
    "data/*.py": 3700,
    "records/*.py": 1950,
    "dev/*.py": 3064,
    "tests/**/*.py": 17000,
    "README.md": 190,
    "runs/tutorials/train_plain.py": 450,
}
STEP_ENDS = {"train_small.py": 1450, "train_medium.py": 1580}
AROUND = ("RUN", "FILES", "COMMAND LINE")  # sections of train_small.py around the step
AROUND_LINES = 1150
INTERFACE_NAMES = 35
DENSITY = {"tuples": 1.5, "long %": 4.0, "longest": 60}
DENSE_FROM = 300  # lines
FOLDERS = ("", "data", "records", "runs", "runs/tutorials", "dev")

# What one training step passes through, kernels left out.
STEP = """
Config parameter_table lr_multiplier muon_momentum loss_weights
train train_step micro_step replay GPT GPT.forward GPT.trunk Batch PackLoader
Optimizer.step Optimizer.update_normuon Optimizer.update_adam normuon_update polar_express
Optimizer.start_reduce Optimizer.start_gather Optimizer.finish_gather
""".split()


class Figure(NamedTuple):
    of: str  # a file or folder, and what of it
    found: float
    limit: float


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# -- lengths


def length(pattern: str) -> int:
    """Lines of all files of a pattern together."""
    return sum(path.read_bytes().count(b"\n") for path in ROOT.glob(pattern))


def step_end(tree: ast.Module) -> int:
    """The last line among the functions, classes and methods of STEP; KeyError if one is missing."""
    ends = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ends[node.name] = node.end_lineno
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            ends |= {f"{node.name}.{method.name}": method.end_lineno for method in methods}
    return max(ends[name] for name in STEP)


def section_lines(source: str) -> dict[str, int]:
    """Lines of each numbered section of a script, from its banner to the next one."""
    banners = list(re.finditer(r"^# =+\n# \d+\. ([A-Z ]+?)(?: --.*)?$", source, re.M))
    starts = [banner.start() for banner in banners]
    sections = zip(banners, starts, [*starts[1:], len(source)], strict=True)
    return {banner[1]: source.count("\n", start, end) for banner, start, end in sections}


def interface_names(source: str) -> int:
    """How many words the text NAMES of tests/test_interface.py has."""
    return len(re.search(r'^NAMES = """(.*?)"""', source, re.M | re.S)[1].split())


def lengths() -> list[Figure]:
    figures = [Figure(f"{name}, lines", length(name), limit) for name, limit in LINES.items()]
    for name, limit in STEP_ENDS.items():
        figures.append(Figure(f"{name}, step ends", step_end(ast.parse(read(name))), limit))

    sections = section_lines(read("train_small.py"))
    around = sum(sections[name] for name in AROUND)
    figures.append(Figure(f"train_small.py, lines of {', '.join(AROUND)}", around, AROUND_LINES))
    names = interface_names(read("tests/test_interface.py"))
    figures.append(Figure("tests/test_interface.py, NAMES", names, INTERFACE_NAMES))
    return figures


# -- density


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether the function is decorated with jit or triton.jit."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(text.split("(")[0].split(".")[-1] == "jit" for text in decorators)


def is_tuple_to_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def density(source: str) -> dict[str, float]:
    """The three figures of a file."""
    nodes = list(ast.walk(ast.parse(source)))
    lines = source.splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef) and not is_kernel(n)]
    return {
        "tuples": 100 * sum(map(is_tuple_to_tuple, nodes)) / len(code),
        "long %": 100 * sum(len(line) > 100 for line in lines) / len(lines),
        "longest": max((f.end_lineno - f.lineno + 1 for f in functions), default=0),
    }


def densities() -> list[Figure]:
    figures = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            source = path.read_text(encoding="utf-8")
            if source.count("\n") > DENSE_FROM:
                name = path.relative_to(ROOT).as_posix()
                found = density(source)
                figures += [Figure(f"{name}, {key}", found[key], DENSITY[key]) for key in DENSITY]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 beyond a limit")
    args = parser.parse_args()
    try:
        figures = [*lengths(), *densities()]
    except KeyError as error:
        print(f"error: a training script lacks {error}, which dev/readability.py looks for; correct one of them")
        return 1

    print(f"{'':52}{'found':>8}{'limit':>8}")
    for figure in figures:
        print(f"{figure.of:52}{figure.found:8.5g}{figure.limit:8.5g}")
    beyond = [figure for figure in figures if figure.found > figure.limit]
    for figure in beyond:
        print(f"error: {figure.of}: {figure.found:.5g}; the limit is {figure.limit:.5g}", file=sys.stderr)
    return int(args.check and bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
