"""Tables, summaries and plots of result files. Needs neither torch nor a GPU."""
import importlib
import math
import statistics
from pathlib import Path


UNITS = {"tflops": "TFLOP/s", "gbs": "GB/s"}          # of a case: products bound it, or memory


def geomean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def unique(values):
    return list(dict.fromkeys(values))


def summary(cases):
    """Geometric mean and worst case against each peer, a line per group and peer."""
    lines = []
    for group in unique(case["group"] for case in cases):
        members = [case for case in cases if case["group"] == group]
        for peer in unique(peer for case in members for peer in case["speed_ratio"]):
            ratios = [case["speed_ratio"][peer] for case in members if peer in case["speed_ratio"]]
            lines.append(f"{group}: {geomean(ratios):.3f} x {peer} (geometric mean of {len(ratios)}; worst "
                         f"{min(ratios):.3f})")
    return "\n".join(lines)


def headline(content):
    """Two lines: each direction's geometric mean against the first peer, and its range."""
    cases, peer = content["cases"], next(iter(content["cases"][0]["speed_ratio"]))
    means = []
    for direction in unique(case["direction"] for case in cases):
        ratios = [case["speed_ratio"][peer] for case in cases if case["direction"] == direction]
        means.append(f"{direction} {geomean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    dtypes = ", ".join(unique(case["dtype"] for case in cases))
    return (f"Times as fast as {peer}, geometric mean and range ({content['environment']['gpu']}, {dtypes}):\n"
            f"{', '.join(means)}.")


# ---- Markdown

def markdown(header, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def caption(content):
    env = content["environment"]
    machine = (f"{env['gpu']}, driver {env['driver']}, cuDNN {env['cudnn']}" if "gpu" in env else
               f"{env['cpu']}, {env['threads']} threads")
    dates = sorted({case["date"] for case in content["cases"] if "date" in case})
    return f"{machine}, torch {env['torch']}" + (f", measured {' to '.join(unique([dates[0], dates[-1]]))}." if dates
                                                 else ".")


def overhead(content):
    """A row per measurement."""
    rows = [[case["name"], f"{case['us']:.1f}" if case["us"] < 1000 else f"{case['us'] / 1000:.1f} ms"]
            for case in content["cases"]]
    return "Host time\n\n" + markdown(["", "us"], rows)


def rate(case):
    """The unit of what bounds a case, and the rate of each runner; ("", {}) of neither."""
    return next(((unit, case[name]) for name, unit in UNITS.items() if name in case), ("", {}))


def by_case(content):
    """A row per case. A column is there where a case has what stands in it."""
    cases = content["cases"]
    unit = next(filter(None, (rate(case)[0] for case in cases)), "")
    beside = unique(name for case in cases for name in case.get("of_rate", {}))
    peers = unique(peer for case in cases for peer in case["speed_ratio"])
    needed = unique(name for case in cases for name in case.get("memory_mb", {}))
    number = lambda text, value: "" if value is None else format(value, text)  # noqa: E731
    columns = {"ms": lambda case: f"{case['ms']['margay']:.3f}"}
    if unit:
        columns[unit] = lambda case: number(".0f", rate(case)[1].get("margay"))
    if any("roofline" in case for case in cases) and not beside:
        columns["roofline"] = lambda case: number(".0%", case.get("roofline"))
    for name in beside:
        columns[f"of {name}"] = lambda case, name=name: number(".0%", case.get("of_rate", {}).get(name))
    for name in peers:
        columns[f"times as fast as {name}"] = lambda case, name=name: (
            number(".2f", case["speed_ratio"].get(name)) + " (wrong)" * (name in case.get("wrong", ())))
    for name in needed:
        columns["MB" if name == "margay" else f"MB of {name}"] = (
            lambda case, name=name: number(".0f", case.get("memory_mb", {}).get(name)))
    return markdown(["", *columns], [[case["name"], *(column(case) for column in columns.values())] for case in cases])


def tables():
    """Tables that are not by_case: result file -> function. A family that wants its own has them in TABLES of its
    tables.py."""
    found = {"overhead": overhead}
    for path in sorted(Path(__file__).parent.glob("*/tables.py")):
        found |= importlib.import_module(f"margay.bench.{path.parent.name}.tables").TABLES
    return found


def table(content):
    return f"{tables().get(content['family'], by_case)(content)}\n\n{caption(content)}"


# ---- plots

def panels(content):
    """(title, x labels, {runner: rate}) for each panel. Calls only: graphs of them look the same."""
    calls = [case for case in content["cases"] if "layers" not in case]
    for group in unique(case["group"] for case in calls):
        for mask in unique(case.get("mask", "") for case in calls):
            cases = [case for case in calls if case["group"] == group and case.get("mask", "") == mask]
            if cases:
                runners = unique(name for case in cases for name in rate(case)[1])
                yield f"{group}\n{mask}".strip(), x_labels(cases), {
                    name: [rate(case)[1].get(name, math.nan) for case in cases] for name in runners}


def x_labels(cases):
    """What differs from case to case: shapes, head dims where all have one length, else lengths."""
    for shape in (("m", "n", "k"), ("b", "t", "h"), ("b", "t", "c"), ("rows", "columns")):
        if set(shape) <= set(cases[0]):
            return ["\n".join(str(case[size]) for size in shape) for case in cases]
    if len({case["n"] for case in cases}) == 1 and "d" in cases[0]:
        return [f"D={case['d']}" for case in cases]
    return [f"{case['n'] // 1024}k" if case["n"] % 1024 == 0 else str(case["n"]) for case in cases]


def plot(content, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    drawn = figure(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(drawn)


def figure(content):
    """A panel a group, rates over sizes, a line a runner."""
    import matplotlib.pyplot as plt
    found = list(panels(content))
    # rows of equal length: forward above backward
    columns = next(n for n in (6, 4, 3, 2, 1) if len(found) % n == 0)
    rows = len(found) // columns
    size = (min(12, 5 * columns), 2.3 * rows + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, (title, labels, series) in zip(axes.flat, found):
        for name, values in series.items():
            axis.plot(labels, values, marker="o", markersize=4, label=name, linewidth=2.5 if name == "margay" else 1.2)
        axis.set_title(title, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(next(filter(None, (rate(case)[0] for case in content["cases"])), ""), fontsize=8)
    axes.flat[0].legend(fontsize=8)
    figure.suptitle(caption(content), fontsize=8)
    return figure


def figure_of_ratios(content):
    """How many times as fast as each peer, case by case: a dot a round, a line at the median, which is what tables
    show."""
    import matplotlib.pyplot as plt
    cases = content["cases"]
    figure, axis = plt.subplots(figsize=(9, 0.8 + 0.25 * len(cases)), layout="constrained")
    for i, peer in enumerate(unique(peer for case in cases for peer in case["speed_ratio"])):
        for y, case in enumerate(cases):
            if peer in case["speed_ratio"]:
                ours, theirs = next(iter(case["rounds_ms"].values())), case["rounds_ms"][peer]
                ratios = [b / a for a, b in zip(ours, theirs)]
                axis.plot(ratios, [y] * len(ratios), "o", color=f"C{i + 1}", markersize=3,
                          label=peer if y == 0 else None)
                axis.plot(case["speed_ratio"][peer], y, "|", color=f"C{i + 1}", markersize=12)
    axis.axvline(1, color="gray", linewidth=0.8)
    axis.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("times as fast as the peer")
    axis.legend()
    return figure
