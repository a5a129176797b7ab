"""Every test gets fresh copies of the libraries, so that it starts with a driver not yet opened."""
import pytest

import mocked


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    mocked.build(folder)
    return folder


@pytest.fixture
def rt(built, tmp_path, monkeypatch):
    return mocked.Runtime(built, tmp_path, monkeypatch)


@pytest.fixture
def module(built, tmp_path, rt):
    module = mocked.load_module(built, tmp_path)
    module.log = rt.log
    return module
