"""wanjax/paths.py: local paths, object stores by local emulators, a made-up Hugging Face cache."""

import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import huggingface_hub
import pytest
from etils import epath

from convert import weights
from tests import tiny
from tests.convert import tiny as comparison
from wanjax import paths

NAME = "org/name"


@pytest.mark.parametrize(
    ("text", "want"),
    [("~/m", "/people/ann/m"), ("m/x", "m/x"), ("m/~/x", "m/~/x"), ("/m", "/m")],
)
def test_a_path_means_what_a_shell_means(monkeypatch, text, want):
    monkeypatch.setenv("HOME", "/people/ann")
    for given in (text, pathlib.Path(text)):
        assert paths.resolve(given) == paths.local(given) == pathlib.Path(want)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x: "),
        ("http://host/x", "http:// is not read; give a local path, gs:// or s3://"),
    ],
)
def test_what_is_no_place_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        paths.resolve(text)
    assert "\n" not in str(caught.value)


def test_outputs_go_to_local_folders():
    with pytest.raises(ValueError, match="s3://b/x: must be a local path"):
        paths.local("s3://b/x")


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("s3", "s3fs")])
def test_a_missing_package_is_one_line_with_the_extra(monkeypatch, scheme, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{package}; pip install 'wanjax\[cloud\]'$"):
        paths.resolve(f"{scheme}://bucket/x")


def test_a_remote_path_keeps_its_address_and_reads_ranges(bucket):
    path = paths.resolve(f"{bucket}/folder/digits")
    assert isinstance(path, epath.Path) and str(path) == f"{bucket}/folder/digits"
    assert not path.exists()
    path.write_bytes(b"0123456789")
    assert paths.size(path) == 10 and paths.is_remote(path)
    assert paths.read_range(path, 3, 6) == b"345"
    assert paths.read_range(path, 8, 99) == b"89"
    assert paths.read_range(path, 3, 3) == b""


def test_an_object_that_was_stored_after_a_listing_is_found(bucket):
    (bucket / "folder/a").write_bytes(b"a")
    assert [path.name for path in paths.resolve(f"{bucket}/folder").glob("*")] == ["a"]
    code = f"from etils import epath; epath.Path('{bucket}/folder/b').write_bytes(b'b')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert paths.resolve(f"{bucket}/folder/b").exists()
    assert len(list(paths.resolve(f"{bucket}/folder").glob("*"))) == 2


def test_a_missing_object_and_a_store_that_fails_are_one_line(bucket, monkeypatch):
    with pytest.raises(ValueError, match=f"^{bucket}/x: no such object; check the address$"):
        paths.read_range(paths.resolve(f"{bucket}/x"), 0, 8)

    def fails(path):
        raise PermissionError("Forbidden:\n403")

    monkeypatch.setattr(epath.gpath.PosixGPath, "exists", fails)
    with pytest.raises(ValueError, match=r"cannot be reached \(PermissionError: Forbidden: 403\)"):
        paths.resolve(f"{bucket}/x")


def test_a_remote_folder_is_copied(bucket, tmp_path):
    for name in ("a", "more/b"):
        (bucket / "tokenizer" / name).write_bytes(name.encode())
    paths.copy_folder(bucket / "tokenizer", tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer/a").read_bytes() == b"a"
    assert (tmp_path / "tokenizer/more/b").read_bytes() == b"more/b"


def test_files_of_a_folder_are_those_that_are_there_now(place):
    folder = place / "folder"
    assert paths.files(folder) == {}
    with paths.whole_file(folder / "b/c.txt") as part:
        part.write_text("four")
    with paths.whole_file(folder / "a") as part:
        part.write_text("1")
    assert paths.files(folder) == {"a": 1, "b/c.txt": 4}
    code = f"from etils import epath; epath.Path('{folder}/d').write_bytes(b'22')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert paths.files(folder) == {"a": 1, "b/c.txt": 4, "d": 2}
    paths.remove(folder / "b")
    paths.remove(folder / "a")
    assert paths.files(folder) == {"d": 2}


def test_a_file_that_is_not_finished_takes_no_place(place):
    with paths.whole_file(place / "x") as part:
        part.write_text("old")
    with pytest.raises(KeyboardInterrupt), paths.whole_file(place / "x") as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert (place / "x").read_text() == "old"


def test_a_local_folder_ends_up_where_it_belongs(place):
    with paths.local_folder(place / "out") as folder:
        (folder / "in").mkdir(parents=True)
        (folder / "in/a").write_text("a")
    assert paths.files(place / "out") == {"in/a": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return pathlib.Path(tiny.save_model(tmp_path_factory.mktemp("saved")))


@pytest.fixture
def cache(saved, tmp_path, monkeypatch):
    """A Hugging Face cache as a finished download leaves it: the tiny model as org/name."""
    repository = tmp_path / "hub/models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    for path in filter(pathlib.Path.is_file, saved.rglob("*")):  # links into blobs/
        blob = repository / "blobs" / str(path.relative_to(saved)).replace("/", "-")
        link = repository / "snapshots" / ("a" * 40) / path.relative_to(saved)
        for to in (blob, link):
            to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_model_name_loads_from_the_cache(cache):
    params, config = weights.load(NAME)
    assert config.name == "tiny" and config.boundary == 0.875
    assert comparison.equal(params["low"], tiny.parameters()["low"])
    assert str(config.tokenizer).startswith(str(cache))


def test_an_existing_folder_comes_before_a_name(cache, tmp_path):
    (tmp_path / NAME).mkdir(parents=True)
    assert paths.model(NAME) == pathlib.Path(NAME)


@pytest.mark.parametrize("text", ["name", "a/b/c", "./org/name", "~/name", "org/name.safetensors"])
def test_only_org_name_is_a_name(cache, monkeypatch, text):
    monkeypatch.setattr(paths, "_snapshot", None)
    assert paths.model(text) == paths.resolve(text)


def test_a_name_that_is_nowhere_is_one_line_with_both_readings(cache, tmp_path):
    with pytest.raises(ValueError) as caught:
        weights.load("models/wan")
    text = str(caught.value)
    for part in ("models/wan: ", f"{tmp_path}/models/wan", str(cache), "hf download models/wan"):
        assert part in text
    assert "\n" not in text


def test_the_cache_is_that_of_the_environment(cache, tmp_path):
    code = "from wanjax import paths; print(paths.model('org/name'))"
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", code]
    root = pathlib.Path(paths.__file__).parents[1]
    out = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(cache / "models--org--name/snapshots" / ("a" * 40))


@pytest.fixture
def hub(saved):
    """The address of a server that answers as the hub does, for the tiny model as org/name."""
    model, commit = saved, "b" * 40
    names = [str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()]
    contents = {name: (model / name).read_bytes() for name in names}
    contents |= {"README.md": b"# name", "examples/clip.mp4": b"x" * 100}

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            place, _, query = self.path.partition("?")
            name = place.removeprefix(f"/org/name/resolve/{commit}/")
            if place == "/api/models/org/name/revision/main":
                body = json.dumps({"id": NAME, "sha": commit, "siblings": []}).encode()
            elif place == f"/api/models/org/name/tree/{commit}":
                of = lambda n: {"type": "file", "path": n, "size": len(contents[n]), "oid": n}
                body = json.dumps([of(n) for n in contents]).encode()
            else:
                body = contents.get(name)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{name.replace("/", "-")}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_name_is_downloaded_once_without_what_is_not_needed(hub, saved, tmp_path):
    """With the server gone the same name loads from the cache; a hole in it is downloaded again."""

    def ask(endpoint, name=NAME):
        code = f"from wanjax import paths; print(paths.model({name!r}))"
        env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        env.pop("HF_HUB_CACHE", None)
        command = [sys.executable, "-c", code]
        root = pathlib.Path(paths.__file__).parents[1]
        return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)

    def files(folder):
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}

    first = ask(hub)
    folder = pathlib.Path(first.stdout.strip())
    assert folder == tmp_path / "hub/models--org--name/snapshots" / ("b" * 40), first.stderr
    assert files(folder) == files(saved)
    assert ask("http://127.0.0.1:1").stdout == first.stdout
    (folder / "vae/config.json").unlink()
    gone = ask("http://127.0.0.1:1").stderr.strip().splitlines()[-1]
    assert gone.startswith(f"ValueError: {NAME}: no such folder here") and "vae/config.json" in gone
    assert ask(hub).stdout == first.stdout and files(folder) == files(saved)
    unknown = ask(hub, "org/other").stderr.strip().splitlines()[-1]
    assert "RepositoryNotFound" in unknown or "404" in unknown
