"""A competing server for tests of benchmarks. It looks embeddings up in a JSON file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar


class RivalHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections alive
    # Send head and body together. The client may delay its acknowledgment of a head alone, and the
    # body would wait for it.
    wbufsize = -1
    vectors: ClassVar[dict[str, list[float]]] = {}

    def do_GET(self) -> None:
        self._answer("ok")

    def do_POST(self) -> None:
        inputs = json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"]
        texts = [inputs] if isinstance(inputs, str) else inputs
        self._answer([self.vectors[text] for text in texts])

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--sign", type=float, default=1.0)
    parser.add_argument("--child", type=Path, help="start a child and write its pid to this file")
    parser.add_argument("--fail", help="end at once with this message")
    options = parser.parse_args()
    if options.fail:
        sys.exit(options.fail)
    if options.child:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        options.child.write_text(str(child.pid))
    if options.vectors:
        vectors = json.loads(options.vectors.read_text())
        RivalHandler.vectors = {k: [options.sign * x for x in v] for k, v in vectors.items()}
    ThreadingHTTPServer(("127.0.0.1", options.port), RivalHandler).serve_forever()


if __name__ == "__main__":
    main()
