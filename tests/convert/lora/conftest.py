"""The golden adapter files, each as its tool writes it."""

import shutil

import pytest

from convert.lora import read
from tests.convert import published


@pytest.fixture(params=sorted(published.FILES))
def golden(request, tmp_path):
    """(adapter, expected changes) of one golden file, laid out as its tool writes it."""
    name = request.param
    source = published.ADAPTERS / f"{name}.safetensors"
    if name == "peft_adapter_model":
        source = tmp_path / "adapter_model.safetensors"
        shutil.copy(published.ADAPTERS / f"{name}.safetensors", source)
        shutil.copy(
            published.ADAPTERS / f"{name}.adapter_config.json", tmp_path / "adapter_config.json"
        )
        source = tmp_path
    return read.read(source), published.expected(name)
