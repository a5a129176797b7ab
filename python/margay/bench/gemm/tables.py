"""The table of matrix products. Needs neither torch nor a GPU."""
from margay.bench.report import geomean, markdown, unique


def gemm(content):
    """A row per shape, two columns per dtype and layout."""
    groups = unique((case["dtype"], case["layout"]) for case in content["cases"])
    found = {(case["m"], case["n"], case["k"], case["dtype"], case["layout"]): case for case in content["cases"]}
    peer = next(iter(content["cases"][0]["speed_ratio"]))

    def cell(*key):
        case = found.get(key)
        return f"{case['tflops']['margay']:.0f} ({case['speed_ratio'][peer]:.2f})" if case else ""
    rows = [["{} x {} x {}".format(*shape), *(cell(*shape, *group) for group in groups)]
            for shape in unique((case["m"], case["n"], case["k"]) for case in content["cases"])]
    means = [geomean(case["speed_ratio"][peer] for case in content["cases"] if (case["dtype"], case["layout"]) == group)
             for group in groups]
    rows.append(["geometric mean", *(f"({mean:.3f})" for mean in means)])
    header = ["M x N x K", *(" ".join(group) for group in groups)]
    return f"Matrix product: TFLOP/s (times as fast as {peer})\n\n{markdown(header, rows)}"


TABLES = {"gemm": gemm}
