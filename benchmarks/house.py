"""Measures size, structure and names of the code: lines, layers of packages, short helpers, missing types, odd names.

    python benchmarks/house.py [CHECKOUT] [--list]

`--list` prints the short helpers and the odd names with their files and lines. Uses of Lightning's private names and
the longest files are always listed.

Code lines are those of vlm/ and train.py as `ruff format` lays them out at a width of 120, imports included; blank
lines, comments and docstrings do not count. Nothing is imported: all is read from source files, Lightning's too.
"""

import argparse
import ast
import builtins
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Trees = dict[Path, ast.Module]


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Returns the numbers of the code lines: not blank, no comment, no docstring."""
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
    return lines


def word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


SHORT_BODY = 6  # code lines of a helper that could be part of its only caller
# Participles that do not end in -ed, and words in -ed that are no participles.
PARTICIPLES = word_set(
    "begun began bound built caught chosen dealt done drawn fed felt found given gone grown had heard held kept "
    "known laid led left lent lit lost made meant met paid put said seen sent shown sold spent spoken stood stuck "
    "sunk swept taken thawed thought thrown told won worn written"
)
NOT_PARTICIPLES = word_set("bleed embed feed need proceed seed speed")
# Pronouns, quantifiers and adverbs, which say nothing as the only word of a function's name.
VAGUE_WORDS = word_set(
    "after again ahead alike alone along anywhere apart around aside away before beside both each few fewer how "
    "least more most near nearest one other others out over own rest same such there together under up what when "
    "where which whole why within without"
)
# Words that this project once used for technical terms.
PRIVATE_WORDS = word_set(
    "alone anew asked begun beside drawn found gone grown heaviest kept known left leftover lit obey one other "
    "others own said seen settle shown spoken taken talked thawed told whole written"
)
# Names of torch and of the standard library that contain such a word.
FOREIGN_NAMES = {*dir(builtins), "left_key", "lost_sync", "named_buffers", "named_children", "named_modules"}
FOREIGN_NAMES |= {"named_parameters", "NamedTuple", "one_hot"}


def split_words(name: str) -> list[str]:
    """Returns the lower-case words of a name in snake case or camel case."""
    return [word.lower() for part in name.split("_") for word in re.split(r"(?<=[a-z0-9])(?=[A-Z])", part) if word]


def is_participle(word: str) -> bool:
    return word in PARTICIPLES or (word.endswith("ed") and len(word) > 4 and word not in NOT_PARTICIPLES)


def mentioned_names(node: ast.AST) -> list[str]:
    """Returns the names that a node itself, without its children, uses or defines."""
    names = [getattr(node, field, None) for field in ("id", "attr", "arg")]
    names += [node.name] if isinstance(node, (ast.ClassDef, *FUNCTIONS)) else []
    return [name for name in names if isinstance(name, str)]


def count_untyped(node: ast.AST) -> int:
    """Returns how often a node's annotations name Any or object, and how many of its arguments have no annotation."""
    annotations: list[ast.expr | None] = [getattr(node, "annotation", None)]
    count = 0
    if isinstance(node, FUNCTIONS):
        annotations.append(node.returns)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count += sum(arg.annotation is None and arg.arg not in ("self", "cls", "mcs") for arg in arguments)
    for annotation in filter(None, annotations):
        for part in ast.walk(annotation):
            text = part.value if isinstance(part, ast.Constant) else next(iter(mentioned_names(part)), None)
            count += text in ("Any", "object") or (isinstance(text, str) and re.search(r"\bAny\b", text) is not None)
    return count


def body_size(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: set[int]) -> int:
    """Returns the code lines of a function's body; 0 for a stub, which only raises, passes or names a constant."""
    statements = function.body[ast.get_docstring(function, clean=False) is not None :]
    constants = [node for node in statements if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    if all(isinstance(node, ast.Pass | ast.Raise) or node in constants for node in statements):
        return 0
    return sum(statements[0].lineno <= line <= (function.end_lineno or 0) for line in lines)


def readability(trees: Trees, lines: dict[Path, set[int]]) -> tuple[list[str], list[str]]:
    """Returns lines of figures about functions, types and names, and what they count with files and lines."""
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    functions = [(path, node) for path, node in nodes if isinstance(node, FUNCTIONS)]
    uses = Counter(name for _, n in nodes for name in (getattr(n, "id", None), getattr(n, "attr", None)) if name)
    definitions = Counter(function.name for _, function in functions)
    # Dunder methods, decorated functions and stubs have a form that is not ours to choose.
    measured = [(path, node) for path, node in functions if not node.name.startswith("__") and not node.decorator_list]
    sizes = {(path, node): size for path, node in measured if (size := body_size(node, lines[path]))}
    helpers = [
        f"{path}:{function.lineno} {function.name} ({size} lines, used once)"
        for (path, function), size in sizes.items()
        if size <= SHORT_BODY and uses[function.name] == definitions[function.name] == 1
    ]
    classes = [(path, node) for path, node in nodes if isinstance(node, ast.ClassDef)]
    odd_classes, odd_functions = [], []
    for path, node in (*classes, *functions):
        words = split_words(node.name)
        if len(words) == 1 and not node.name.startswith("__"):
            if isinstance(node, ast.ClassDef):
                odd_classes += [f"{path}:{node.lineno} class {node.name}"] * is_participle(words[0])
            elif is_participle(words[0]) or words[0] in VAGUE_WORDS:
                odd_functions.append(f"{path}:{node.lineno} def {node.name}")
    names = [(path, node, name) for path, node in nodes for name in mentioned_names(node)]
    private_names = [
        f"{path}:{getattr(node, 'lineno', 0)} {name}"
        for path, node, name in names
        if name not in FOREIGN_NAMES and PRIVATE_WORDS.intersection(split_words(name))
    ]
    untyped = sum(count_untyped(node) for _, node in nodes)
    code = sum(map(len, lines.values()))
    figures = [
        f"mean body of {len(sizes):,} functions: {sum(sizes.values()) / len(sizes):.1f} code lines",
        f"functions of at most {SHORT_BODY} lines with one use: {len(helpers)}",
        f"functions named by a participle or an adverb: {1000 * len(odd_functions) / len(functions):.1f} per 1000",
        f"classes named by a participle: {1000 * len(odd_classes) / len(classes):.1f} per 1000",
        f"names with a word of our own vocabulary: {1000 * len(private_names) / len(names):.1f} per 1000",
        f"Any, object and arguments without a type: {1000 * untyped / code:.1f} per 1000 code lines",
    ]
    return figures, [*odd_functions, *odd_classes, *helpers, *private_names]


def list_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
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

    def inherited_names(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Returns the private names that a class inherits from Lightning."""
        if name in seen or name not in own_classes | their_classes:
            return set()
        node = own_classes.get(name) or their_classes[name]
        own = set() if name in own_classes else own_names(node)
        return own.union(*(inherited_names(base, seen | {name}) for base in base_names(node)))

    knowing = {
        home(path) for path, tree in ours.items() if any(m.startswith("lightning") for m, _ in list_imports(tree))
    }
    uses = []
    for path, tree in ours.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
                hidden = any(map(private, node.module.split(".")))
                uses += [(path, node.lineno, alias.name) for alias in node.names if hidden or private(alias.name)]
            elif isinstance(node, ast.ClassDef):
                has = set().union(*map(inherited_names, base_names(node)))
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
        for module, what in list_imports(tree):
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
    parser = argparse.ArgumentParser(description="Measures size, structure and names of the code.")
    parser.add_argument("checkout", nargs="?", type=Path, default=HERE)
    parser.add_argument("--list", action="store_true", help="print what is counted, with files and lines")
    options = parser.parse_args()
    root = options.checkout.resolve()
    files = [*sorted(root.glob("vlm/**/*.py")), root / "train.py"]
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    lines = {path: code_lines(source, trees[path]) for path, source in sources.items()}
    sizes = {path: len(numbers) for path, numbers in lines.items()}
    print(f"code lines: {sum(sizes.values()):,} in {len(files)} files")
    per: dict[str, int] = defaultdict(int)
    for path, size in sizes.items():
        parts = path.relative_to(root).parts
        per[parts[1] if len(parts) > 2 else "others"] += size
    print("  " + "  ".join(f"{name} {size:,}" for name, size in sorted(per.items(), key=lambda pair: -pair[1])))
    tests = [len(path.read_text(encoding="utf-8").splitlines()) for path in root.glob("tests/**/*.py")]
    print(f"lines of tests: {sum(tests):,} in {len(tests)} files")
    figures, counted = readability(trees, lines)
    print("\n".join([*figures, *([f"  {entry}" for entry in counted] if options.list else [])]))

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
