"""docs/SCOREBOARD.md out of the rows' results."""

import collections
import pathlib
import re

FOUND = (  # library, what a wrong row's name and lines have in them, number in docs/FOUND.md
    ("transformers", "hrm_text", "8"),
    ("transformers", r"use_qk_norm|tp_plan.*(alpha_p|q_layernorm|k_layernorm)", "2"),
    ("transformers", r"^\S*-m2 .*(q_norm|k_norm)", "1"), ("peft", r"^\S*-m2 .*(q_norm|k_norm)", "1"),
    ("transformers", r"^\S*ep-\S*of-fsdp.*experts.* 2 times too small", "4"), ("torch", "divide", "4"),
    ("trainer", "FSDP2.*smoothing", "3"), ("torchtitan", "MTP-2", "6"), ("torchtitan", "MTP.*eh_proj", "5"),
    ("torchtitan", "gpt_oss.*tp-2", "7"))
ASKED = {("trainer", "tokens-averaged-a-rank"): "as its argument asks: ",  # no fault
         ("accelerate", "scheduler"): "as its documentation says, a move a process: ",
         ("transformers", "inkling2"): "logits are right, but the whole of its DTensor is not the checkpoint's: ",
         ("transformers", "youtu"): "of gradients that are right, on one of two ranks, not explained: "}
HEAD = """# Which libraries train over ranks as in one process

{count} configurations of {libraries} libraries, each trained for three steps in one process and over two or four ranks
on a CPU (gloo), recorded by [`same_numbers`](SAME_NUMBERS.md) and judged by it: {exact} are exact; {wrong} are judged
wrong, {asked} of them as an argument or the documentation says, or with a remark in the row; {refused} are refused or
do not run; {other} could not be judged. `tools/maintain/scoreboard.py` made this page from
[`scoreboard.jsonl`](scoreboard.jsonl), which it wrote; no row is written by hand. Models are of toy size and in float64
unless a row says otherwise; every parameter is random, and dropout is off.

```bash
python tools/maintain/scoreboard.py                       # all rows that are not there yet
python tools/maintain/scoreboard.py transformers --row qwen3-tp_plan-2-m2      # one row alone
```

"Exact" means: samples, gradients, loss and what the optimizer did are those of one process, to what its dtype rounds
(float64: gradients within 1e-9 of their length in the first step, 2e-6 where something computes in float32; where
layers return float32, 3e-4, and then the row says so). "Compared" says how much that was: steps, gradients of
parameters, samples; "off" is the largest difference of a whole gradient in the first step, relative to its length,
computed in plain torch without `same_numbers`. A wrong row names the parameters and how far they are off, and where
[FOUND.md](FOUND.md) has the fault, its number. `m` is the number of micro-batches a step and data-parallel rank; "s"
are the seconds of both runs and the verdict on a machine that others used, too: {slow} rows took longer than a minute.

## Environments

Each is made by the command, in a folder of its own, and one at a time on disk is enough (`--remove`). Trainer's rows
run in that of transformers.

| library | versions | made in, s | GB |
| --- | --- | --- | --- |
"""


def outcome(row: dict) -> str:
    """exact, wrong, not judged, or does not run."""
    return "does not run" if row["code"] is None else {0: "exact", 1: "wrong"}.get(row["code"], "not judged")


def plain(text: str, most: int = 150) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def found(row: dict) -> str:
    text = f"{row['row']} {' '.join(row['lines'])}"
    number = next((n for library, words, n in FOUND if library == row["library"] and re.search(words, text)), "")
    asked = next(
        (words for (library, name), words in ASKED.items() if library == row["library"] and name in row["row"]), ""
    )
    return f"[{number}](FOUND.md#fault-{number}): " if number else asked


def exactly(row: dict) -> str:
    """yes, and to what precision, where layers return less than the weights' float64."""
    limit = re.search(r"gradients to (\S+) of", " ".join(row["lines"]))
    return "yes" if row["dtype"] != "float64" or not limit or limit[1] == "1e-09" else f"yes, to {limit[1]}"


def line(row: dict) -> str:
    kind = outcome(row)
    worst = (row.get("plain") or {}).get("worst")
    sizes = f"{row['steps']}, {row['gradients']}, {row['samples']}" if "steps" in row else ""
    words = plain(row["lines"][0]) if row["lines"] else ""
    if kind == "wrong":
        words = found(row) + plain(row["lines"][0].partition(": ")[2])
    dtype = "" if row["dtype"] == "float64" else f" ({row['dtype']})"
    return (f"| {row['model']}{dtype} | {row['parallelism']} | {row['micro_batches']} | {row['ranks']} | "
            f"{exactly(row) if kind == 'exact' else ''} | {words if kind == 'wrong' else ''} | "
            f"{words if kind in ('does not run', 'not judged') else ''} | {row['patch']} | {sizes} | "
            f"{'' if worst is None else f'{worst:.0e}'} | {row['seconds']:.0f} |")


def write(rows: list[dict], path: pathlib.Path) -> None:
    environments = {each["library"]: each for each in rows if "row" not in each}
    libraries = collections.defaultdict(list)
    for row in rows:
        if "row" in row:
            libraries[row["library"]].append(row)
    kinds = collections.Counter(outcome(row) for each in libraries.values() for row in each)
    text = HEAD.format(count=sum(kinds.values()), libraries=len(libraries), exact=kinds["exact"], wrong=kinds["wrong"],
                       refused=kinds["does not run"], other=kinds["not judged"],
                       slow=sum(row["seconds"] > 60 for each in libraries.values() for row in each),
                       asked=sum(outcome(row) == "wrong" and any(
                           library == row["library"] and name in row["row"] for library, name in ASKED)
                           for each in libraries.values() for row in each))
    for name, made in environments.items():
        text += f"| {name} | {' '.join(made['needs'])} | {made['seconds']} | {made['gigabytes']} |\n"
    for name, each in libraries.items():
        counts = collections.Counter(map(outcome, each))
        versions = ", ".join(f"{key} {value}" for key, value in each[-1]["versions"].items())
        text += (
            f"\n## {name}\n\n{versions}: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}.\n\n"
            "| model | over | m | ranks | exact | wrong | refused or does not run "
                 "| only with a patch of | compared | off | s |\n"
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        )
        text += "".join(line(row) + "\n" for row in each)
    path.write_text(text)
