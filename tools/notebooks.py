"""Runs notebooks from top to bottom and keeps what their cells print and draw; needs margay and matplotlib, not
jupyter.

    python tools/notebooks.py                  those of benchmarks/, in place
    python tools/notebooks.py --out FOLDER     the same, results to FOLDER
    python tools/notebooks.py FILE.ipynb ...   these
"""
import argparse
import base64
import contextlib
import io
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DPI, COLOURS = 70, 32       # of drawings: a notebook in the repository stays small


def drawings():
    """Outputs for the figures that a cell has left open, which are closed."""
    import matplotlib.pyplot as plt
    from PIL import Image
    for number in plt.get_fignums():
        drawn, image = io.BytesIO(), io.BytesIO()
        plt.figure(number).savefig(drawn, dpi=DPI)
        plt.close(number)
        Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(image, "PNG", optimize=True)
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        yield {"output_type": "display_data", "data": data, "metadata": {}}


def run(notebook, name):
    """Executes the code cells in one namespace and puts their outputs in place of those they had."""
    namespace, count = {"__name__": "__main__"}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{name}, cell {count}", "exec"), namespace)
        text = printed.getvalue().splitlines(True)
        stream = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
        cell.update(execution_count=count, outputs=[*stream, *drawings()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import matplotlib
    matplotlib.use("Agg")
    for path in arguments.files or sorted((ROOT / "benchmarks").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        run(notebook, path.name)
        target = arguments.out / path.name if arguments.out else path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(target)


if __name__ == "__main__":
    main()
