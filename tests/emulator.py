"""Object stores on this machine: s3:// by moto, gs:// by gcp-storage-emulator.

Each is a server in a thread that listens on 127.0.0.1 and keeps objects in memory. Clients, also
those of subprocesses, find them through the environment; the addresses hold for the whole session,
as fsspec and epath keep their clients.
"""

import http
import itertools
import json
import logging
import pathlib
import urllib.request

import pytest
from etils import epath

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def stores():
    """{scheme: make(name)} of the running servers; make creates a bucket."""
    from gcp_storage_emulator import server as gs
    from gcp_storage_emulator.handlers import objects
    from moto.server import ThreadedMotoServer

    for name in ("werkzeug", "gcp_storage_emulator"):
        logging.getLogger(name).setLevel(logging.ERROR)  # a line a request
    s3 = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    s3.start()
    google = gs.create_server("127.0.0.1", 0, in_memory=True)
    google.start()
    at_s3 = "http://{}:{}".format(*s3.get_host_and_port())
    at_gs = "http://{}:{}".format(*google._api._httpd.server_address)
    with pytest.MonkeyPatch.context() as patch:
        for _, methods in gs.HANDLERS:
            for method in set(methods) & {"GET", "POST"}:
                if methods[method] in (objects.get, objects.download, objects.insert):
                    patch.setitem(methods, method, _conditional(methods[method]))
        patch.setenv("AWS_ENDPOINT_URL", at_s3)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("STORAGE_EMULATOR_HOST", at_gs)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", at_gs)  # of Orbax
        patch.setenv("GCE_METADATA_ROOT", "127.0.0.1:1")  # nobody there: no credentials
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks a service not emulated
        yield {
            "s3": lambda name: _send("PUT", f"{at_s3}/{name}"),
            "gs": lambda name: _send("POST", f"{at_gs}/storage/v1/b?project=test", {"name": name}),
        }
    google.stop()
    s3.stop()


@pytest.fixture(params=("gs", "s3"))
def bucket(request, stores) -> epath.Path:
    """The path of an empty bucket, of either store in turn."""
    return _make(request.param, stores)


@pytest.fixture(params=("local", "gs", "s3"))
def place(request, tmp_path) -> pathlib.Path | epath.Path:
    """The path of an empty folder here and of an empty bucket of either store in turn."""
    if request.param == "local":
        return tmp_path
    return _make(request.param, request.getfixturevalue("stores"))


def upload(source, to: epath.Path) -> epath.Path:
    """Copy a local file, or the files of a local folder, to the path `to`, which is returned."""
    source = pathlib.Path(source)
    for path in [source] if source.is_file() else filter(pathlib.Path.is_file, source.rglob("*")):
        (to / path.relative_to(source)).write_bytes(path.read_bytes())
    return to


def _conditional(handler):
    """A handler of gcp-storage-emulator with what it lacks and TensorStore commits by: generations
    of objects, and requests on condition of one."""

    def handle(request, response, storage):
        name = request.params.get("object_id") or request.query.get("name", [""])[0]
        objects = storage.objects.get(request.params["bucket_name"], {})
        now = objects.get(name, {}).get("generation", "0")  # 0: there is none
        asked = lambda key: request.query.get(key, [None])[0]
        if asked("ifGenerationMatch") not in (None, now):
            response.status = http.HTTPStatus.PRECONDITION_FAILED
        elif asked("ifGenerationNotMatch") == now != "0":
            response.status = http.HTTPStatus.NOT_MODIFIED
        else:
            handler(request, response, storage)
            response["x-goog-generation"] = objects.get(name, {}).get("generation", "0")

    return handle


def _make(scheme: str, stores) -> epath.Path:
    name = f"bucket-{next(_NUMBERS)}"
    stores[scheme](name)
    return epath.Path(f"{scheme}://{name}")


def _send(method: str, url: str, body=None) -> None:
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data, head, method=method)).close()
