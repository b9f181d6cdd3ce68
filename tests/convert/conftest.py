"""The tiny two-expert model as a diffusers folder."""

import shutil

import pytest

from convert import save
from tests.convert import tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """(folder that save_diffusers wrote, the parameters in it); not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    params = tiny.params()
    save.save_diffusers(params, tiny.CONFIG, folder)
    return folder, params


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the folder to damage."""
    return shutil.copytree(saved[0], tmp_path / "broken")
