"""The judge client against real servers on the loopback: the example server, and faulty ones."""

import contextlib
import json
import threading
import time
from http import server as http_server

import numpy as np
import pytest

from scripts import reward_server
from wanjax import rewards
from wanjax.rewards import http


@contextlib.contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def scripted(*answers):
    """A server that gives these answers in turn, then right scores: a status, a body, or seconds of
    silence. Yields (url, list of received (video, prompts))."""
    left, received = list(answers), []

    class Handler(http_server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            video, prompts = http.unpack(body)
            received.append((video, prompts))
            answer = left.pop(0) if left else {"scores": scores(video, prompts, None)[0].tolist()}
            if isinstance(answer, float):
                time.sleep(answer)
                return
            status, data = answer if isinstance(answer, tuple) else (200, answer)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data if isinstance(data, bytes) else json.dumps(data).encode())

        def log_message(self, format, *args):
            pass

    with serving(http_server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, received


def scores(video, prompts, meta):
    """Brightness of the first frame plus the length of the prompt."""
    assert video.dtype == np.uint8 and meta is None
    first = video[:, 0].mean((1, 2, 3))
    return first + [len(p) for p in prompts], {"first": first}


@pytest.fixture
def video(rng):
    return rng.integers(0, 256, (5, 3, 4, 6, 3), dtype=np.uint8)


PROMPTS = ["a", "bb", "ünï \n 猫", "", "eeeee"]


def test_example_server_gives_the_scores_of_the_reward_in_order(video):
    want, info = scores(video, PROMPTS, None)
    with serving(reward_server.make_server(scores)) as url:
        got, parts = rewards.find(f"http?url={url}&batch=2&parallel=3")(video, PROMPTS, None)
        np.testing.assert_array_equal(got, want)  # lossless, three requests, order kept
        np.testing.assert_array_equal(parts["first"], info["first"])
        last = rewards.find(f"http?url={url}&frames=1")(video, PROMPTS, None)[0]
        np.testing.assert_array_equal(last, scores(video[:, 1:2], PROMPTS, None)[0])


def test_example_server_answers_a_failing_reward_and_a_bad_request_and_lives_on(video):
    def picky(video, prompts, meta):
        if "bb" in prompts:
            raise KeyError("bb")
        return scores(video, prompts, meta)

    with serving(reward_server.make_server(picky)) as url:
        reward = rewards.find(f"http?url={url}&retries=1&wait=0.01")
        with pytest.raises(ConnectionError, match="failed 2 times.*status 500 KeyError: 'bb'"):
            reward(video, PROMPTS, None)
        with pytest.raises(ConnectionError, match="refuses the request: status 400 not a req"):
            http._ask(url, b"junk", 1, deadline=5, retries=3, wait=9)
        np.testing.assert_array_equal(
            reward(video[2:], PROMPTS[2:], None)[0], scores(video[2:], PROMPTS[2:], None)[0]
        )


def test_two_failures_and_a_hang_are_tried_again(video):
    with scripted((503, b"busy"), (500, b"oops"), 1.0) as (url, received):
        reward = rewards.find(f"http?url={url}&deadline=0.3&wait=0.01")
        got, info = reward(video, PROMPTS, None)
        np.testing.assert_array_equal(got, scores(video, PROMPTS, None)[0])
        assert info == {} and len(received) == 4
        for again, prompts in received:
            np.testing.assert_array_equal(again, video)
            assert prompts == PROMPTS


def test_retries_end_with_the_last_trouble(video):
    with scripted(*[(503, b"busy")] * 3) as (url, received):
        reward = rewards.find(f"http?url={url}&retries=2&wait=0.01")
        message = "failed 3 times, the last time with: status 503 busy; look at the server"
        with pytest.raises((ConnectionError, ValueError), match=message):
            reward(video, PROMPTS, None)
        assert len(received) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"scores": [1.0, 2.0]}, r"answers scores of shape \(2,\) for 5 videos"),
        ({"scores": [1.0] * 5, "info": {"a": [1.0]}}, r"answers a of shape \(1,\) for 5 videos"),
        ({"score": [1.0] * 5}, "expected JSON with scores"),
        (b"<html>", "answers b'<html>'; expected JSON"),
        ([1.0] * 5, "expected JSON with scores"),
        ((404, b"no such path"), "refuses the request: status 404 no such path"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(video, answer, message):
    with scripted(answer) as (url, received):
        with pytest.raises((ConnectionError, ValueError), match=message):
            rewards.find(f"http?url={url}&wait=0.01")(video, PROMPTS, None)
        assert len(received) == 1


def test_null_and_nan_are_scores_that_the_judge_could_not_give(video):
    with scripted(b'{"scores": [1, null, NaN, 2.5, 0]}') as (url, _):
        got, _ = rewards.find(f"http?url={url}")(video, PROMPTS, None)
    np.testing.assert_array_equal(got, [1, np.nan, np.nan, 2.5, 0])


def test_a_wrong_or_silent_url_is_one_line_at_start():
    with pytest.raises(ValueError, match="'http': needs the argument 'url'"):
        rewards.find("http")
    with pytest.raises(ValueError, match="url is '127.0.0.1:9000'; expected something like http:"):
        rewards.find("http?url=127.0.0.1:9000")
    with serving(reward_server.make_server(scores)) as url:
        pass
    with pytest.raises(ValueError, match="nothing answers at .*; start the server first"):
        rewards.find(f"http?url={url}")
