"""Mutation campaign: every synchronising call of a kernel is dropped, doubled, shifted and so on, one at a time.

A mutant that no run reports is a hole in the checker, or synchronisation that the kernel does not need."""

import collections
import re
from pathlib import Path

from margay.check.compiled import MUTATIONS, OPS

# What is done to which call. Doubling a call that changes nothing the second time (a wait, a fence, a commit of an
# empty group) is no mutant.
KINDS = {
    "init": ("count more", "count less"),
    "wait": ("drop", "phase", "stage"),
    "arrive": ("drop", "double", "stage", "early"),
    "expect": ("drop", "double", "bytes more", "bytes less", "stage"),
    "bar_sync": ("drop", "double"),
    "bar_arrive": ("drop", "double"),
    "wg_sync": ("drop",),
    "fence_async": ("drop", "fence late"),
    "mma_fence": ("drop",),
    "mma_commit": ("drop",),
    "mma_wait": ("drop", "group less"),
    "store_wait": ("drop", "group less"),
    "order_wait": ("drop",),
    "order_pass": ("drop",),
    "order_count": ("drop",),
    "grid_wait": ("drop",),
}


class Site:
    """A synchronising call of the kernel's text: all addresses it was compiled to."""

    def __init__(self, kernel, chain, op, pc):
        self.chain, self.op, self.pcs, self.values = chain, op, set(), set()
        first = next((i for i, frame in enumerate(chain) if not frame.inner), 0)
        outer = [frame for frame in chain[first:] if not frame.inner]
        self.line, self.function = chain[first].place(), chain[first].function
        self.call = chain[first - 1].function if first else OPS[op]
        self.within = " <- ".join(f"{frame.function}:{frame.line}" for frame in outer[1:])
        self.text = kernel.source_line(chain[first])

    def name(self):
        part = "" if OPS[self.op] in self.call else f"/{OPS[self.op]}"
        return f"{self.function}: {self.call}{part}: {self.text}" + (f"  <- {self.within}" if self.within else "")


def sites(problems, seeds=(0,)):
    """The sites that the problems reach, in the order of the text."""
    found = {}
    for problem in problems:
        for seed in seeds:
            report = problem.run(seed)
            if report:
                raise SystemExit(f"margay.check: {problem.kernel.name} is reported as it is ({problem.label}, seed "
                                 f"{seed}); mutate what is clean")
            events = {(event.pc, event.op, event.value) for event in problem.kernel.events() if OPS[event.op] in KINDS}
            problem.kernel.resolve({pc for pc, _, _ in events})
            for pc, op, value in events:
                chain = problem.kernel.chain(pc)
                site = found.setdefault((chain, op), Site(problem.kernel, chain, op, pc))
                site.pcs.add(pc)
                site.values.add(value)
    return sorted(found.values(), key=lambda site: [(frame.file, frame.line) for frame in reversed(site.chain)])


Mutant = collections.namedtuple("Mutant", "site kind missed rules")   # missed: seeds without a report


def mutants_of(problems):
    """(site, kind) of each."""
    return [(site, kind) for site in sites(problems) for kind in KINDS[OPS[site.op]]
            if kind != "count less" or min(site.values) > 1]       # a semaphore counts at least one arrival


def dealt(todos, excused):
    """What is left of the mutants of a file's kernels where a mutant that several of them have is tried on one, theirs
    in turn.

    Those that are `excused` are tried on all: the excuse may hold for one kernel only."""
    have = collections.defaultdict(list)
    for i, todo in enumerate(todos):
        for site, kind in todo:
            have[site.chain, site.op, kind].append(i)
    chosen = {key: owners[n % len(owners)] for n, (key, owners) in enumerate(have.items())}
    return [[(site, kind) for site, kind in todo if chosen[site.chain, site.op, kind] == i or excused(site, kind)]
            for i, todo in enumerate(todos)]


def campaign(problems, seeds, todo=None):
    order, mutants = list(problems), []
    for site, kind in mutants_of(problems) if todo is None else todo:
        missed, rules = [], collections.Counter()
        for seed in range(seeds):
            for i, problem in enumerate(order):
                report = problem.run(seed, mutation=MUTATIONS.index(kind), sites=site.pcs)
                if report:
                    rules[report["rule"]] += 1
                    order.insert(0, order.pop(i))              # what found the last one may find the next
                    break
            else:
                missed.append(seed)
        mutants.append(Mutant(site, kind, missed, rules))
    return mutants


# ---- mutants that are known to be harmless: lines  FILE; KIND; REGEX of the site's name; why

def read_harmless(path):
    entries = []
    for line in Path(path).read_text().splitlines() if Path(path).is_file() else ():
        parts = [part.strip() for part in line.split(";", 3)]
        if len(parts) == 4 and not line.startswith("#"):
            entries.append(parts)
    return entries


def why_harmless(entries, kernel, site, kind):
    for source, kinds, pattern, why in entries:
        if source == kernel.source.name and re.fullmatch(kinds, kind) and re.search(pattern, site.name()):
            return why
    return None
