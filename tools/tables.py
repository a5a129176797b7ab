"""Writes docs/speed.md's tables, README.md's headline and the plots in docs/img from benchmarks/results/*.json.

A page holds pairs of lines  <!-- results: NAME -->  and  <!-- end -->.  Between them stands the table of NAME.json.
Between  <!-- headline: NAME -->  and  <!-- end -->  stand its means in two lines.
With --check nothing is written, and the exit status says whether the pages are up to date.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from margay.bench import report  # noqa: E402

RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "img"
PAGES = (ROOT / "README.md", ROOT / "docs" / "speed.md")
BLOCK = re.compile(r"(<!-- (results|headline): (\S+) -->\n).*?(<!-- end -->)", re.S)


def fill(text):
    def block(match):
        begin, kind, name, end = match.groups()
        path = RESULTS / f"{name}.json"
        return f"{begin}\n{body(json.loads(path.read_text()), kind, name) if path.exists() else 'Not measured yet.'}\n\n{end}"
    return BLOCK.sub(block, text)


def body(content, kind, name):
    if kind == "headline":
        return report.headline(content)
    image = f"\n\n![{content['family']}](img/{name}.png)" if plotted(content) else ""
    return report.table(content) + image


def plotted(content):
    return content["family"] not in ("overhead", "features")


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
