"""Copies of the repository in which a test builds."""
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def share_cache(tree):
    """What has been compiled from the same content by the same command is not compiled again."""
    (tree / "build").mkdir()
    (ROOT / "build" / "cache").mkdir(parents=True, exist_ok=True)
    (tree / "build" / "cache").symlink_to(ROOT / "build" / "cache")
