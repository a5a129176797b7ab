"""Checks kernels' synchronisation on the CPU: races, missing fences, wrong phases and counts, deadlocks, crashes.

KERNEL is a regular expression that has to match the whole name of a row of csrc/kernels.def, or a .cu file. Without
one, all rows are checked. A .cu file has a line `// margay.check: bf16 STAGES=2` with its element type and constants,
and behind its ENTRY a problem to run it on:
  EXAMPLE(kernel, BLOCKS, p.in = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
Exit status: 0 nothing reported (with --mutate: no mutant survives), 1 something reported or a tool missing, 2 a wrong
option. Rules, reports and what it cannot see: docs/protocol.md.
"""

import argparse
import collections
import concurrent.futures
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path

from margay.check import mutants, text
from margay.check.compiled import RULES, TOOLS, Kernel, csrc, options_in, tool

HARMLESS = "harmless.txt"

PER_POOL = 24     # kernels until processes are replaced: a kernel's library and its shadow memory stay in one as long
                  # as it lives


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m margay.check", description=__doc__.split("\n\n")[0],
                                     epilog=__doc__.split("\n\n")[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="schedules of each problem (4)")
    parser.add_argument("--seed", type=int, metavar="S", help="only this schedule")
    parser.add_argument("--shapes", default="", metavar="REGEX", help="problems whose description matches")
    parser.add_argument("--mutate", action="store_true",
                        help="mutate every synchronising call and list what no run reports")
    parser.add_argument("--once", action="store_true",
                        help="with --mutate: a call that several rows have is mutated in one of them, theirs in turn")
    parser.add_argument("--harmless", type=Path, metavar="FILE",
                        help="mutants known to be harmless (of the library: csrc/check/harmless.txt)")
    parser.add_argument("--json", action="store_true", help="findings as JSON, a line each")
    parser.add_argument("--list", action="store_true", help="list the problems, run nothing")
    parser.add_argument("--constants", metavar="NAME=N,...",
                        help="of a .cu file; else its line `// margay.check: TYPE NAME=N, ...`")
    parser.add_argument("--as", dest="in_place_of", metavar="ROW",
                        help="check a .cu file in the place of this row: its parameters, constants and problems")
    parser.add_argument("--type", choices=("bf16", "fp16", "e4m3", "float"), help="element type of a .cu file")
    parser.add_argument("--rules-off", default="", metavar="RULE,...",
                        help=f"rules to leave out, of {', '.join(RULES)}")
    parser.add_argument("--device", action="store_true",
                        help="on the GPU: delays in each role in turn, and traces compared with the CPU's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile and check")
    options = parser.parse_args(arguments)
    for rule in filter(None, options.rules_off.split(",")):
        if rule not in RULES:
            parser.error(f"--rules-off: there is no rule {rule}, expected some of {', '.join(RULES)}")
    return options


def file_problems(path, options):
    from margay.check.problems import Problem
    found = options_in(path.read_text()) or (None, None)
    dtype, constants = options.type or found[0], options.constants or found[1]
    if not dtype or constants is None:
        raise SystemExit(f"margay.check: {path} needs --type and --constants, or a line `// margay.check: bf16 "
                         "NAME=1, ...`")
    return [Problem(Kernel(path, dtype, constants), "its EXAMPLE")]


def problems_of(name, options):
    """Problems of a row or of a file."""
    from margay.check.problems import problems, rows
    if name.endswith(".cu") and options.in_place_of:
        if options.in_place_of not in rows():
            raise SystemExit(f"margay.check: --as: no row of kernels.def is called {options.in_place_of}")
        return [problem for problem in problems(rows()[options.in_place_of], Path(name), options.device)
                if re.search(options.shapes, problem.label)]
    if name.endswith(".cu"):
        return file_problems(Path(name), options)
    return [problem for problem in problems(rows()[name], large=options.device)
            if re.search(options.shapes, problem.label)]


def wanted(options):
    from margay.check.problems import rows
    names = []
    for pattern in options.kernels or [".*"]:
        if pattern.endswith(".cu"):
            if not Path(pattern).is_file():
                raise SystemExit(f"margay.check: there is no file {pattern}")
            names.append(pattern)
            continue
        found = [name for name in rows() if re.fullmatch(pattern, name)]
        if not found:
            raise SystemExit(f"margay.check: no row of kernels.def is called {pattern}; `--list` shows them")
        names += found
    return list(dict.fromkeys(names))


def command(name, label, seed, options):
    place = f" --as {options.in_place_of}" if options.in_place_of else ""
    shape = "" if name.endswith(".cu") and not place else f" --shapes '^{re.escape(label)}$'"
    return f"python -m margay.check {name}{place}{shape} --seed {seed}"


def rules_off(options):
    return sum(1 << RULES.index(rule) for rule in filter(None, options.rules_off.split(",")))


# ---- work on one kernel, in a process of its own

def check_kernel(name, options):
    """(runs, finding or None) where a finding is (text, JSON)."""
    from margay.check.problems import NoProblems
    runs = 0
    try:
        problems = problems_of(name, options)
    except NoProblems as error:                # the others are checked all the same
        return 0, (str(error), {"kernel": name, "rule": None, "text": str(error)})
    for problem in problems:
        for seed in [options.seed] if options.seed is not None else range(options.seeds):
            found = problem.run(seed, rules_off=rules_off(options))
            runs += 1
            if found and found["rule"] == "limit":      # what no place has
                said = f"{name}: {problem.label}: {found['text']}"
                return runs, (said, {"kernel": name, "rule": "limit", "text": said})
            if found:
                arguments = problem.reported, problem.label, found, command(name, problem.label, seed, options)
                return runs, (text.report(*arguments), text.as_json(*arguments))
    return runs, None


def mutate_kernels(names, options):
    """(mutants, reported, harmless lines, survivor lines) of each. With --once they are kernels of one file."""
    problems = [problems_of(name, options) for name in names]
    entries = mutants.read_harmless(options.harmless or csrc() / "check" / HARMLESS)
    todos = [mutants.mutants_of(found) for found in problems]
    if options.once:
        todos = mutants.dealt(todos,
                              lambda site, kind: mutants.why_harmless(entries, problems[0][0].kernel, site, kind))
    return [mutate_kernel(found, todo, entries, options) for found, todo in zip(problems, todos)]


def mutate_kernel(problems, todo, entries, options):
    all_mutants = mutants.campaign(problems, options.seeds, todo)
    harmless, survivors = [], []
    for mutant in all_mutants:
        if not mutant.missed:
            continue
        why = mutants.why_harmless(entries, problems[0].kernel, mutant.site, mutant.kind)
        line = (f"{mutant.kind} | {mutant.site.name()} | {mutant.site.line} | "
                f"no report in {len(mutant.missed)} of {options.seeds} seeds")
        if why:
            harmless.append(f"{line}: {why}")
        else:
            survivors.append(line)
    return len(all_mutants), sum(not mutant.missed for mutant in all_mutants), harmless, survivors


def of_one_file(names):
    """Lists of names, the longest first: processes then end together."""
    from margay.check.problems import rows
    files = collections.defaultdict(list)
    for name in names:
        files[rows()[name]["source"] if name in rows() else name].append(name)
    return sorted(files.values(), key=len, reverse=True)


def each(work, names, options, show):
    """Work on every name, or list of names, results in order."""
    progress = text.Progress(len(names), not options.json)
    title = lambda name: name if isinstance(name, str) else ", ".join(name)
    start_cheaply()
    for first in range(0, len(names), PER_POOL):
        part = names[first:first + PER_POOL]
        with concurrent.futures.ProcessPoolExecutor(max(1, min(options.jobs, len(part)))) as pool:
            futures = [(name, pool.submit(work, name, options)) for name in part]
            for name, future in futures:
                try:
                    result = future.result()
                except concurrent.futures.process.BrokenProcessPool:
                    left = [title(name) for name, future in futures if not future.done() or future.exception()]
                    raise SystemExit("margay.check: a process died while it checked "
                                     f"{' or '.join(left[:options.jobs])}: a kernel that writes where it must not, "
                                     "or no memory left; `--jobs 1` says which") from None
                progress.clear()
                show(name, result)
                progress.step(title(name))
    progress.clear()


def start_cheaply():
    """Fail here, once, if tools are missing, instead of in every process."""
    for variable in TOOLS:
        tool(variable)
    from margay.check.compiled import runtime_object, vocabulary
    runtime_object()
    vocabulary()


def count_of(names):
    return f"{len(names)} kernel{'s' * (len(names) != 1)}"


def check(names, options):
    start, total, bad = time.monotonic(), 0, []

    def show(name, result):
        nonlocal total
        runs, finding = result
        total += runs
        if finding:
            bad.append(name)
            print(json.dumps(finding[1]) if options.json else finding[0] + "\n", flush=True)
    each(check_kernel, names, options, show)
    if not options.json:
        print(f"{count_of(names)}, {total} runs, {len(bad)} reported, {time.monotonic() - start:.1f} s")
    return not bad


def mutate(names, options):
    start, counts, open_ones = time.monotonic(), [0, 0, 0], []

    def show(names, results):
        for name, result in zip(names, results):
            show_one(name, *result)

    def show_one(name, total, reported, harmless, survivors):
        for i, n in enumerate((total, reported, len(harmless))):
            counts[i] += n
        open_ones.extend(survivors)
        if options.json:
            print(json.dumps({"kernel": name, "mutants": total, "reported": reported,
                              "harmless": harmless, "survivors": survivors}), flush=True)
            return
        print(f"{name}: {total} mutants, {reported} reported, {len(harmless)} known to be harmless, "
              f"{len(survivors)} survive", flush=True)
        for line in harmless:
            print(text.dim(f"  {line}"))
        for line in survivors:
            print(text.red("  survives: ") + line, flush=True)
    each(mutate_kernels, of_one_file(names) if options.once else [[name] for name in names], options, show)
    if not options.json:
        print(f"{counts[0]} mutants, {counts[1]} reported ({counts[1] / max(1, counts[0]):.1%}), {counts[2]} known to "
              f"be harmless, {len(open_ones)} survive, "
              f"{time.monotonic() - start:.1f} s")
    return not open_ones


def main(arguments=None):
    options = parse(arguments)
    if not importlib.util.find_spec("numpy"):
        raise SystemExit("margay.check: needs NumPy, which is not installed")
    csrc()
    names = wanted(options)
    if options.device:
        from margay.check import device
        raise SystemExit(not device.run(names, options))
    if options.list:
        for name in names:
            print(f"{name}: " + "; ".join(problem.label for problem in problems_of(name, options)))
        return
    good = mutate(names, options) if options.mutate else check(names, options)
    raise SystemExit(not good)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:                    # of `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
