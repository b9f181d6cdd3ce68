"""Reward by a judge server: videos are posted in batches, scores come back.

Request   POST url, body = one line of JSON, then the videos as an .npy file (lossless)
              {"prompts": ["...", ...]}       and a newline
              uint8 [b, T, H, W, 3]
Response  200 with JSON {"scores": [b numbers], "info": {"part": [b numbers], ...}}; info may be
          absent; null or NaN is a score that the judge could not give.

A refused or broken connection, no answer within the deadline, status 429 or 5xx: retried after 1,
2, 4, ... times `wait` seconds. Any other status, or an answer in a different form, is an error at
once. `scripts/reward_server.py` serves any reward this way; `unpack` reads a request.
"""

import http.client as http_client
import io
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent import futures

import numpy as np

from wanjax.rewards.frames import picker


def http(
    url: str,
    frames: str = "all",
    batch: int = 8,
    parallel: int = 4,
    deadline: float = 60.0,
    retries: int = 4,
    wait: float = 1.0,
    once: int = 0,
) -> Callable:
    """The reward of a server that is already running.

    Args:
        frames: which of them are sent, as in frames.picker.
        batch, parallel: videos per request, requests at a time.
        deadline: seconds per attempt.
        once: 1 = of several processes only process 0 asks, for all of them.
    """
    pick, where = picker(frames), urllib.parse.urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"url is {url!r}; expected something like http://127.0.0.1:9000")
    port = where.port or (443 if where.scheme == "https" else 80)
    try:
        socket.create_connection((where.hostname, port), timeout=10).close()
    except OSError as error:
        raise ValueError(f"nothing answers at {url} ({error}); start the server first") from None

    def judge(part):
        return _ask(url, pack(*part), len(part[1]), deadline=deadline, retries=retries, wait=wait)

    def reward(video_BTHWC, prompts, meta):
        del meta
        video_BTHWC = video_BTHWC[:, pick(video_BTHWC.shape[1])]
        cuts = [slice(i, i + batch) for i in range(0, len(prompts), batch)]
        with futures.ThreadPoolExecutor(parallel) as pool:
            answers = list(pool.map(judge, [(video_BTHWC[cut], prompts[cut]) for cut in cuts]))
        names = answers[0][1]
        if any(info.keys() != names.keys() for _, info in answers):
            raise ValueError(f"{url} gives different info for different requests")
        info = {name: np.concatenate([info[name] for _, info in answers]) for name in names}
        return np.concatenate([scores for scores, _ in answers]), info

    reward.once = bool(once)
    return reward


def pack(video_BTHWC, prompts) -> bytes:
    """The body of a request."""
    body = io.BytesIO()
    body.write(json.dumps({"prompts": list(prompts)}).encode() + b"\n")
    np.save(body, np.asarray(video_BTHWC, np.uint8), allow_pickle=False)
    return body.getvalue()


def unpack(body: bytes):
    """(video_BTHWC, prompts) of a request; ValueError if it is not one."""
    line, _, data = body.partition(b"\n")
    prompts = json.loads(line)["prompts"]
    return np.load(io.BytesIO(data), allow_pickle=False), prompts


def _ask(url: str, body: bytes, count: int, *, deadline, retries, wait):
    """Post until there is an answer; returns (scores, info), or raises ConnectionError."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/octet-stream"})
    trouble = ""
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(wait * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=deadline) as response:
                return _read(url, response.read(), count)
        except urllib.error.HTTPError as error:
            text = error.read(200).decode("utf-8", "replace").partition("\n")[0]
            trouble = f"status {error.code} {text}"
            if error.code != 429 and error.code < 500:
                raise ConnectionError(f"{url} refuses the request: {trouble}") from None
        except (OSError, http_client.HTTPException) as error:
            trouble = str(error) or type(error).__name__
    raise ConnectionError(
        f"{url} failed {retries + 1} times, the last time with: {trouble}; look at the server, or "
        "raise deadline and retries in the reward's name"
    )


def _read(url: str, answer: bytes, count: int):
    """(scores, info) of the JSON of an answer."""
    try:
        data = json.loads(answer)
        rows = {"": data["scores"], **data.get("info", {})}
        rows = {name: np.array(row, np.float64) for name, row in rows.items()}  # null becomes NaN
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{url} answers {answer[:80]!r}; expected JSON with scores and info"
        ) from None
    for name, row in rows.items():
        if row.shape != (count,):
            raise ValueError(
                f"{url} answers {name or 'scores'} of shape {row.shape} for {count} videos; "
                "expected one number each"
            )
    return rows.pop(""), rows
