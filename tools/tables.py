"""Writes docs/speed.md's tables, README.md's headline and the plots in docs/img from benchmarks/results/*.json.

A page holds pairs of lines  <!-- results: NAME -->  and  <!-- end -->.  Between them stands the table of NAME.json.
Between  <!-- headline: NAME -->  and  <!-- end -->  stand its means in two lines.
docs/ops.md's table, and the lines of python/margay/_C.pyi, are those of the rows of csrc/ops.def.
With --check nothing is written, and the exit status says whether the pages are up to date.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python"))      # behind an installed package, whose extension is built
from margay import _op  # noqa: E402
from margay.bench import report  # noqa: E402

RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "img"
PAGES = (ROOT / "README.md", ROOT / "docs" / "speed.md", ROOT / "docs" / "ops.md",
         ROOT / "python" / "margay" / "_C.pyi")
BLOCK = re.compile(r"(<!-- (results|headline): (\S+) -->\n).*?(<!-- end -->)", re.S)
ROWS = re.compile(r"(<!-- rows -->\n).*?(<!-- end -->)", re.S)
STUBS = re.compile(r"(# Rows of ops.def, written by tools/tables.py.\n).*?(# End of the rows.\n)", re.S)


def fill(text):
    def block(match):
        begin, kind, name, end = match.groups()
        path = RESULTS / f"{name}.json"
        return (f"{begin}\n{body(json.loads(path.read_text()), kind, name) if path.exists() else 'Not measured yet.'}"
                f"\n\n{end}")
    text = ROWS.sub(lambda match: match[1] + table_of_rows() + "\n" + match[2], text)
    text = STUBS.sub(lambda match: match[1] + "".join(_op.Row(name).stub() + "\n" for name in _op.ROWS) + match[2],
                     text)
    return BLOCK.sub(block, text)


def table_of_rows():
    """Arguments in C's order; an argument in brackets may be absent."""
    lines = ["| op | writes | reads | numbers | must hold |", "|---|---|---|---|---|"]
    for row in map(_op.Row, _op.ROWS):
        tensors = lambda fields: ", ".join(described(f) for f in fields)  # noqa: E731
        numbers = ", ".join(f"{f['name']} = {_op.default(f):g}" for f in row.numbers)
        needs = [(f["text"] or f"`{f['name']}`").replace("|", "\\|") for f in row.derived if f["role"] != "let"]
        needs = ", ".join([*needs, *(f"{let} = `{text}`" for let, text, _ in row.lets)])
        changed = [f for f in row.inputs if f["role"] == "inout"]
        lines.append(f"| `{row.name}` | {tensors([*row.results, *row.saves, *row.work, *changed])} | "
                     f"{tensors([f for f in row.inputs if f not in changed])} | {numbers} | {needs} |")
    return "\n".join(lines) + "\n"


def described(f):
    kind = "" if f["kind"] == "half" else f" {f['kind']}"
    text = f"{f['name']}{kind} [{', '.join(f['sizes'])}]"
    note = {"save": " (kept for the backward)", "work": " (scratch)", "optwork": " (scratch)",
            "space": " (scratch)", "inout": " (in place)"}.get(f["role"], "")
    return (f"({text})" if f["role"] in _op.MAY_MISS else text) + note


def body(content, kind, name):
    if kind == "headline":
        return report.headline(content)
    image = f"\n\n![{content['family']}](img/{name}.png)" if plotted(content) else ""
    return report.table(content) + image


def plotted(content):
    return content["family"] not in ("overhead", "features", "linear_attention", "ssd", "causal_conv1d", "fft_conv",
                                     "steps", "delta", "norm", "llama", "rotary", "cross_entropy")


def main():
    for page in PAGES:
        old = page.read_text()
        new = fill(old)
        if "--check" not in sys.argv[1:]:
            page.write_text(new)
        elif old != new:
            raise SystemExit(f"{page.name}: differs from benchmarks/results; run python tools/tables.py")
    if "--check" in sys.argv[1:]:
        return
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        if plotted(content):
            report.plot(content, IMAGES / f"{path.stem}.png")


if __name__ == "__main__":
    main()
