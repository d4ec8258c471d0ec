"""Measures size and structure of the code: lines, layers of packages, uses of Lightning's private names, longest files.

    python benchmarks/house.py [CHECKOUT]

Code lines are those of vlm/ and train.py as `ruff format` lays them out at a width of 120, imports included; blank
lines, comments and docstrings do not count. Nothing is imported: all is read from source files, Lightning's too.
"""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Trees = dict[Path, ast.Module]


def code_lines(source: str, tree: ast.Module) -> int:
    """Returns the number of code lines: not blank, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields each import as (module, name); the name of a plain `import module` is empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(node: ast.AST) -> set[str]:
    """Returns private names that a class or file defines: functions, classes, class variables, attributes of `self`."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.ClassDef, *FUNCTIONS)):
            names.add(part.name)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and on_self(part):
            names.add(part.attr)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
    return {name for name in names if private(name)}


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def classes(trees: Trees) -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def base_names(node: ast.ClassDef) -> set[str]:
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}


def lightning_uses(ours: Trees, theirs: Trees, root: Path) -> list[tuple[Path, int, str]]:
    """Returns uses of Lightning's private names as (file, line, name).

    These are imports of Lightning's private modules or names; private names that a class inherits from a class of
    Lightning; and, in packages that import Lightning, attributes of any object but `self` whose private name is defined
    in Lightning's source but not in the file.
    """

    def home(path: Path) -> tuple[str, ...]:
        return path.relative_to(root).parts[:2]

    known = set().union(*map(own_names, theirs.values()))
    own_classes, their_classes = classes(ours), classes(theirs)

    def inherited(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Returns the private names that a class inherits from Lightning."""
        if name in seen or name not in own_classes | their_classes:
            return set()
        node = own_classes.get(name) or their_classes[name]
        own = set() if name in own_classes else own_names(node)
        return own.union(*(inherited(base, seen | {name}) for base in base_names(node)))

    knowing = {home(path) for path, tree in ours.items() if any(m.startswith("lightning") for m, _ in imported(tree))}
    uses = []
    for path, tree in ours.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
                hidden = any(map(private, node.module.split(".")))
                uses += [(path, node.lineno, alias.name) for alias in node.names if hidden or private(alias.name)]
            elif isinstance(node, ast.ClassDef):
                has = set().union(*map(inherited, base_names(node)))
                for part in ast.walk(node):
                    name = part.attr if isinstance(part, ast.Attribute) and on_self(part) else ""
                    name = part.name if isinstance(part, FUNCTIONS) else name
                    uses += [(path, part.lineno, name)] if private(name) and name in has else []
        foreign = known - own_names(tree) if home(path) in knowing else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in foreign and not on_self(node):
                uses.append((path, node.lineno, node.attr))
    return sorted(set(uses))


def package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "vlm" and len(parts) > 1 else parts[0]


def arrows(trees: Trees, root: Path) -> set[tuple[str, str, str]]:
    """Returns imports between packages of vlm/, lazy ones included: (file, its package, the imported package)."""
    found = set()
    for path, tree in trees.items():
        name = path.relative_to(root).with_suffix("").as_posix()
        own = package(name.replace("/", "."))
        for module, what in imported(tree):
            if module == "vlm":
                module = f"vlm.{what}"
            if module.startswith("vlm.") and package(module) != own:
                found.add((name, own, package(module)))
    return found


def order(root: Path) -> dict[str, int]:
    """Returns the floor of each package, as stated in tests/test_imports.py."""
    for node in ast.parse((root / "tests/test_imports.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLOORS":
            return {name: level for level, names in enumerate(ast.literal_eval(node.value)) for name in names}
    raise SystemExit("tests/test_imports.py states no FLOORS")


def floors(edges: set[tuple[str, str]]) -> int:
    """Returns the number of packages in the longest chain of imports; `edges` must be free of cycles."""
    below: dict[str, set[str]] = defaultdict(set)
    for upper, lower in edges:
        below[upper].add(lower)

    def height(name: str) -> int:
        return 1 + max(map(height, below[name]), default=0)

    return max(map(height, list(below)))


def main() -> None:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    files = [*sorted(root.glob("vlm/**/*.py")), root / "train.py"]
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    sizes = {path: code_lines(source, trees[path]) for path, source in sources.items()}
    print(f"code lines: {sum(sizes.values()):,} in {len(files)} files")
    per: dict[str, int] = defaultdict(int)
    for path, size in sizes.items():
        parts = path.relative_to(root).parts
        per[parts[1] if len(parts) > 2 else "others"] += size
    print("  " + "  ".join(f"{name} {size:,}" for name, size in sorted(per.items(), key=lambda pair: -pair[1])))
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in root.glob("tests/**/*.py")]
    print(f"lines of tests: {sum(lines):,} in {len(lines)} files")

    installed = find_spec("lightning")
    if installed is None or installed.origin is None:
        raise SystemExit("Lightning is not installed")
    theirs = {path: ast.parse(path.read_text("utf-8")) for path in Path(installed.origin).parent.rglob("*.py")}
    uses = lightning_uses(trees, theirs, root)
    print(f"uses of Lightning's private names: {len(uses)} in {len({path for path, *_ in uses})} files")
    for path, line, name in uses:
        print(f"  {path.relative_to(root)}:{line} {name}")

    levels = order(HERE)
    between = [(name, a, b) for name, a, b in arrows(trees, root) if a in levels and b in levels]
    up = sorted(arrow for arrow in between if levels[arrow[1]] < levels[arrow[2]])
    print(f"imports from a lower package to a higher one: {len(up)}")
    print("".join(f"  {name}: {a} -> {b}\n" for name, a, b in up), end="")
    chain = floors({(a, b) for _, a, b in between} - {arrow[1:] for arrow in up})
    print(f"floors: {1 + max(levels.values())} stated, {chain} packages in the longest chain of imports")

    longest = sorted(((len(source.splitlines()), path) for path, source in sources.items()), reverse=True)[:8]
    print("longest files:", ", ".join(f"{path.relative_to(root)} {length}" for length, path in longest))
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(root)}:{node.lineno} {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    print("longest functions:", ", ".join(f"{name} {length}" for length, name in sorted(functions, reverse=True)[:8]))
    print(f"functions over 25 lines: {sum(length > 25 for length, _ in functions)} of {len(functions)}")


if __name__ == "__main__":
    main()
