"""Tables of attention's results. Needs neither torch nor a GPU."""
from margay.bench.report import geomean, markdown, unique


def attention(content):
    """A table per direction: TFLOP/s of Margay and, in parentheses, how many times as fast as the first peer that
    is."""
    parts = []
    for direction in unique(case["direction"] for case in content["cases"]):
        cases = [case for case in content["cases"] if case["direction"] == direction]
        lengths, peer = sorted({case["n"] for case in cases}), next(iter(cases[0]["speed_ratio"]))
        rows = []
        for dtype, d, mask in unique((case["dtype"], case["d"], case["mask"]) for case in cases):
            row = {case["n"]: case for case in cases if (case["dtype"], case["d"], case["mask"]) == (dtype, d, mask)}
            cells = [f"{row[n]['tflops']['margay']:.0f} ({row[n]['speed_ratio'][peer]:.2f})" if n in row else ""
                     for n in lengths]
            rows.append([dtype, d, mask, *cells, f"{geomean(case['speed_ratio'][peer] for case in row.values()):.2f}",
                         roofline(row.values())])
        header = ["dtype", "D", "mask", *(f"N={n}" for n in lengths), "mean", "roofline"]
        parts.append(f"Attention {direction}: TFLOP/s (times as fast as {peer})\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def roofline(cases):
    shares = [case["roofline"] for case in cases if "roofline" in case]
    return f"{max(shares):.0%}" if shares else ""


def decode(content):
    """A row per group and batch: microseconds (of a graph: of one of its layers), the share of 4.35 TB/s, and how many
    times as fast as PyTorch."""
    contexts = sorted({case["n"] for case in content["cases"]})
    rows = []
    for group, batch in unique((case["group"], case["batch"]) for case in content["cases"]):
        row = {case["n"]: case for case in content["cases"] if (case["group"], case["batch"]) == (group, batch)}
        rows.append([group, batch, *(decode_cell(row[n]) if n in row else "" for n in contexts)])
    header = ["", "B", *(f"N={n}" for n in contexts)]
    return f"Attention for generation: us, share of 4.35 TB/s (times as fast as torch)\n\n{markdown(header, rows)}"


def decode_cell(case):
    ms = case["ms"]["margay"]
    found = f"{ms * 1e3 / case.get('layers', 1):.0f}, {case['bytes'] / (ms * 1e-3) / 4.35e12:.0%}"
    return found + "".join(f" ({ratio:.1f})" for ratio in case["speed_ratio"].values())


def cpu(content):
    """A row per case."""
    rows = [[case["direction"], case["dtype"], case["d"], case["mask"], f"{case['ms']['margay']:.2f}",
             f"{case['ms']['torch']:.2f}", f"{case['speed_ratio']['torch']:.2f}"] for case in content["cases"]]
    return "Attention on the CPU, N = 2048\n\n" + markdown(["direction", "dtype", "D", "mask", "margay ms", "torch ms",
                                                            "times as fast"], rows)


def features(content):
    """A row per kind of problem, a column per direction and head dim."""
    columns = unique((case["direction"], case["d"]) for case in content["cases"])
    found = {(case["kind"], case["direction"], case["d"]): case for case in content["cases"]}

    def cell(*key):
        case = found.get(key)
        if not case:
            return ""
        notes = [f"{ratio:.2f} of dense" for ratio in case.get("of_rate", {}).values()]
        notes += [f"{ratio:.2f} x {peer}" for peer, ratio in case["speed_ratio"].items()]
        return f"{case['tflops']['margay']:.0f}" + (f" ({', '.join(notes)})" if notes else "")
    rows = [[kind, *(cell(kind, *column) for column in columns)]
            for kind in unique(case["kind"] for case in content["cases"])]
    header = ["causal, bfloat16", *(f"{direction} D={d}" for direction, d in columns)]
    return ("Features of attention: TFLOP/s of the visible pairs (of the dense rate, times as fast as others)\n\n"
            f"{markdown(header, rows)}")


TABLES = {"attention": attention, "attention-fp8": attention, "features": features, "decode": decode, "cpu": cpu}
