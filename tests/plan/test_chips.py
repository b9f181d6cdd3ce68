"""Topologies by name and the mesh that is proposed for them."""

import types

import jax
import pytest

from wanjax.plan import chips


def test_proposed_mesh_divides_batch_and_heads():
    mesh = chips.propose_mesh(64, batch=16, heads=40, held=0, hbm=1)
    assert (mesh["data"], mesh["fsdp"], mesh["context"]) == (16, 1, 4)
    mesh = chips.propose_mesh(8, batch=2, heads=3, held=0, hbm=1)
    assert (mesh["data"], mesh["context"]) == (2, 4)


@pytest.mark.parametrize(
    "held, data, fsdp", [(220, 16, 1), (230, 8, 2), (900, 4, 4), (9999, 1, 16)]
)
def test_proposed_mesh_splits_weights_only_as_far_as_memory_needs(held, data, fsdp):
    """A device of 95 may hold 57, a quarter of what four devices over context hold."""
    mesh = chips.propose_mesh(64, batch=16, heads=40, held=held, hbm=95)
    assert (mesh["data"], mesh["fsdp"], mesh["context"]) == (data, fsdp, 4)


def test_unknown_topology_lists_the_known():
    with pytest.raises(ValueError, match="v9.*v5p:4x4x4.*h100"):
        chips.devices_of("v9:2x2")


def test_a_gpu_that_is_present_compiles_for_more_of_its_kind(monkeypatch):
    asked, jax_devices = [], jax.devices("cpu")
    device = types.SimpleNamespace(device_kind="NVIDIA H200")
    described = types.SimpleNamespace(devices=[device] * 8)

    def describe(*args, **kwargs):
        asked.append((args, kwargs))
        return described

    monkeypatch.setattr(chips.topologies, "get_topology_desc", describe)
    assert len(chips.devices_of("h200:8")[1]) == 8 and not asked  # here: 8 CPU devices
    monkeypatch.setattr(jax, "devices", lambda *backend: jax_devices if backend else [device])
    assert chips.devices_of("h200:8") == ("h200", [device] * 8)
    assert asked == [(("",), {"platform": "cuda", "topology": "1x1x8"})]
    assert chips.devices_of("h200:1") == ("h200", [device]) and len(asked) == 1  # itself
    assert chips.devices_of("h100:8") == ("h100", jax_devices[:8]) and len(asked) == 1
