"""Writes the tables of README.md and the plots in docs/img from benchmarks/results/*.json.

README.md holds pairs of lines  <!-- results: NAME -->  and  <!-- end -->;  what stands between them is the table of NAME.json.
With --check nothing is written, and the exit status says whether the tables are up to date.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from margay.bench import report  # noqa: E402

RESULTS, README, IMAGES = ROOT / "benchmarks" / "results", ROOT / "README.md", ROOT / "docs" / "img"
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.S)


def fill(text):
    def block(match):
        path = RESULTS / f"{match[2]}.json"
        return f"{match[1]}\n{body(json.loads(path.read_text()), match[2]) if path.exists() else 'Not measured yet.'}\n\n{match[3]}"
    return BLOCK.sub(block, text)


def body(content, name):
    image = f"\n\n![{content['family']}](docs/img/{name}.png)" if plotted(content) else ""
    return report.table(content) + image


def plotted(content):
    return content["family"] not in ("overhead", "features")


def main():
    old = README.read_text()
    new = fill(old)
    if "--check" in sys.argv[1:]:
        raise SystemExit(old != new and "README.md: the tables differ from benchmarks/results; run python tools/tables.py")
    README.write_text(new)
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        if plotted(content):
            report.plot(content, IMAGES / f"{path.stem}.png")


if __name__ == "__main__":
    main()
