"""Serve a reward over HTTP, for wanjax's http reward: an example judge server.

    python -m scripts.reward_server "pickscore?model=/models/PickScore_v1" --port 9000
    python -m wanjax.train ... with config.reward["http?url=http://127.0.0.1:9000"] = 1.0

The protocol is described in wanjax/rewards/http.py. Requests are scored one at a time. There is no
authentication: keep it on the loopback interface, or on a private network with --host.
"""

import argparse
import json
import sys
import threading
from http import server

import numpy as np

from wanjax import rewards
from wanjax.rewards import http


def make_server(reward, host: str = "127.0.0.1", port: int = 0) -> server.ThreadingHTTPServer:
    """A server for reward(video, prompts, meta); port 0 picks a free one (server.server_port)."""
    one_at_a_time = threading.Lock()

    class Handler(server.BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                video, prompts = http.unpack(body)
            except (ValueError, TypeError, KeyError) as error:
                return self.answer(400, f"not a request: {error}")
            try:
                with one_at_a_time:
                    scores, info = reward(video, prompts, None)
            except Exception as error:  # the server survives a bad request
                return self.answer(500, f"{type(error).__name__}: {error}")
            rows = {name: np.asarray(row, float).tolist() for name, row in info.items()}
            scores = np.asarray(scores, float).tolist()
            return self.answer(200, json.dumps({"scores": scores, "info": rows}))

        def answer(self, status, text):
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args):
            del format, args

    return server.ThreadingHTTPServer((host, port), Handler)


def main():
    parser = argparse.ArgumentParser(description="Serve a reward over HTTP.")
    parser.add_argument("reward", help="name of a reward as in config.reward")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    args = parser.parse_args()
    try:
        reward = rewards.find(args.reward)
    except ValueError as error:
        sys.exit(f"reward_server: {error}")
    with make_server(reward, args.host, args.port) as running:
        print(f"{args.reward} at http://{args.host}:{running.server_port}", flush=True)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
