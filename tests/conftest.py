"""Marks, seeds and an honest ending: what was not run is listed by name and reason, and an empty run fails."""
import collections
import os
import random
import zlib

import pytest

import margay

SEED = int(os.environ.get("MARGAY_TEST_SEED") or random.SystemRandom().randrange(2**31))
os.environ["MARGAY_TEST_SEED"] = str(SEED)        # processes that run tests side by side inherit it, and name the same
                                                  # tests


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU that Margay's kernels run on, and a PyTorch that sees it")


# Processor seconds that the tests of a file may take, their processes included: twice what the largest took when this
# was written, so that a busy machine changes nothing. tests/check has a share for each row, whose compilation is in it.
MOST, MOST_OF_A_ROW = 300, 5
seconds = collections.Counter()


def processor_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.began = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        # Reaches the process that started this one
        report.user_properties.append(("seconds", processor_seconds() - item.began))
    return report


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        seconds[report.nodeid.split("::")[0]] += dict(report.user_properties).get("seconds", 0)


def over_budget():
    """Files of tests that take too long, with what they may take. A GPU's tests, and repetitions, take what they
    take."""
    if os.environ.get("MARGAY_TEST_FULL") == "1" or why_no_gpu() is None:
        return {}
    most = lambda file: MOST_OF_A_ROW * margay.info()["kernels"] if "/check/" in file else MOST
    return {file: most(file) for file in seconds if seconds[file] > most(file)}


@pytest.fixture
def poison():
    """torch.empty returns NaN. Deterministic algorithms, which this needs, are on meanwhile, those of margay too."""
    import torch
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_report_header():
    info = margay.info()
    gpu = (", ".join(device["name"] for device in info.get("devices") or [])
           if not info["gpu_reason"] else f"not used ({info['gpu_reason']})")
    return [f"margay: {os.path.dirname(margay.__file__)}, {info['kernels']} kernels, cpu {info['isa']}, gpu {gpu}",
            f"seed: {SEED} (MARGAY_TEST_SEED={SEED} draws the same problems)"]


def why_no_gpu():
    reason = margay.info()["gpu_reason"]
    if reason:
        return reason
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    return None if torch.cuda.is_available() else "PyTorch sees no GPU"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture
def seed(request):
    """Differs from test to test, the same for a test in every run with one MARGAY_TEST_SEED."""
    return (SEED + zlib.crc32(request.node.nodeid.encode())) % 2**31


@pytest.fixture
def one_thread():
    """For tiny problems, which several threads only slow down, most of all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter):
    not_run = collections.defaultdict(collections.Counter)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        not_run[reason.removeprefix("Skipped: ")][report.nodeid.split("[")[0]] += 1
    if not_run:
        terminalreporter.section("not run")
    for reason, tests in not_run.items():
        terminalreporter.line(f"{reason}:")
        for test, count in tests.items():
            terminalreporter.line(f"  {test}" + (f" ({count} cases)" if count > 1 else ""))


    terminalreporter.section("processor seconds")
    for file, taken in seconds.most_common(8):
        terminalreporter.line(f"  {taken:6.1f}  {file}")
    for file, most in over_budget().items():
        terminalreporter.line(f"{file}: {seconds[file]:.0f} s, may take {most} s (MOST in tests/conftest.py)", red=True)


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.OK and not hasattr(session.config, "workerinput") and over_budget():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.testscollected == 0 and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
