"""Five figures about how a training script reads: signs to look at, not the aim.

    python dev/readability.py              train_small.py, train_medium.py and runs/engine.py, where present
    python dev/readability.py --check      exits with 1 if a figure is beyond its limit
    python dev/readability.py FILE.py      other files

lines      of the file
step ends  last line that a reader of one training step needs, kernels left out (training scripts only)
tuples     tuple = tuple assignments (`a, b = 1, f(x)`) per 100 lines of code
long %     percentage of lines over 100 characters
longest    function that is no kernel
"""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("train_small.py", "train_medium.py", "runs/engine.py")
MOST_LINES = {"train_small.py": 3500, "train_medium.py": 3650}
LIMITS = {"step ends": 1400, "tuples": 1.5, "long %": 4.0, "longest": 80}

# What one training step passes through, kernels left out.
STEP = """
Config parameter_table lr_multiplier muon_momentum loss_weights
train train_step micro_step replay GPT GPT.forward GPT.trunk Batch PackLoader
Optimizer.step Optimizer.update_normuon Optimizer.update_adam normuon_update polar_express
Optimizer.start_reduce Optimizer.start_gather Optimizer.finish_gather
""".split()


def step_end(tree: ast.Module) -> int:
    """The largest last line among the functions, classes and methods of STEP; KeyError if one is missing."""
    ends = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ends[node.name] = node.end_lineno
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            ends |= {f"{node.name}.{method.name}": method.end_lineno for method in methods}
    return max(ends[name] for name in STEP)


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether the function is decorated with jit or triton.jit."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(text.split("(")[0].split(".")[-1] == "jit" for text in decorators)


def is_tuple_to_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def measure(path: Path) -> dict:
    """The five figures of a file, and "name", the longest function's."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    lines = source.splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef) and not is_kernel(n)]
    lengths = [(f.end_lineno - f.lineno + 1, f.name) for f in functions]
    longest, name = max(lengths, default=(0, ""))
    return {
        "lines": len(lines),
        "step ends": step_end(tree) if path.name.startswith("train_") else 0,
        "tuples": 100 * sum(map(is_tuple_to_tuple, nodes)) / len(code),
        "long %": 100 * sum(len(line) > 100 for line in lines) / len(lines),
        "longest": longest,
        "name": name,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help=f"default: {', '.join(FILES)}")
    parser.add_argument("--check", action="store_true", help="exit with 1 beyond a limit")
    args = parser.parse_args()
    paths = args.files or [ROOT / name for name in FILES if (ROOT / name).exists()]

    problems = []
    print(f"{'':18}{'lines':>7}{'step ends':>11}{'tuples':>8}{'long %':>8}  longest")
    for path in paths:
        try:
            found = measure(path)
        except KeyError as error:
            print(
                f"error: {path} has no {error.args[0]}, which STEP of dev/readability.py names; correct one of them",
                file=sys.stderr,
            )
            return 1
        end = found["step ends"] or "-"
        print(
            f"{path.name:18}{found['lines']:7}{end:>11}{found['tuples']:8.2f}{found['long %']:8.1f}"
            f"  {found['longest']} ({found['name']})"
        )
        limits = LIMITS | {"lines": MOST_LINES.get(path.name, found["lines"])}
        for key, limit in limits.items():
            if found[key] > limit:
                problems.append(f"{path.name}: {key} is {found[key]:.5g}, the limit is {limit}")

    if args.check and problems:
        print("error: " + "\nerror: ".join(problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
